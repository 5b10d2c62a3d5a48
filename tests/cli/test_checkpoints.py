"""Tests models by name: the real client of the Hugging Face hub against a hub on loopback.

The client reads its settings when it is imported, so each download is a process of its own.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.hub import COMMIT, OTHER_COMMIT, Hub

from kvferry.cli.checkpoints import find_checkpoint, find_config, has_chat_template, is_hub_name
from kvferry.cli.cluster.local_cluster import UpOptions
from kvferry.cli.up import sample_request
from kvferry.engine.make_model.writer import make_model
from kvferry.errors import ConfigError

NAME = "owner/tiny-model"
FETCH = """
import sys
from kvferry.cli.checkpoints import find_checkpoint
from kvferry.errors import ConfigError
try:
    print(find_checkpoint(sys.argv[1], sys.argv[2] or None))
except ConfigError as error:
    sys.exit(f"refused: {error}")
"""
MIB = 1024 * 1024
NEVER_FETCHED = ("pytorch_model.bin", "consolidated.safetensors", "README.md")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model(folder)
    for name in NEVER_FETCHED:
        (folder / name).write_bytes(b"x")
    return folder


def fetch(
    hub: Hub | str,
    home: Path,
    name: str = NAME,
    revision: str = "",
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Fetch a model in a process of its own, with its cache under `home`."""
    own = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": hub if isinstance(hub, str) else hub.url,
        "HF_HUB_DOWNLOAD_TIMEOUT": "20",
        "HF_HUB_ETAG_TIMEOUT": "20",
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    return subprocess.run(
        [sys.executable, "-c", FETCH, name, revision],
        env=inherited | own | environ,
        cwd=home,
        capture_output=True,
        text=True,
    )


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result
    return result.stderr[result.stderr.index("refused: ") :].strip()


def test_a_name_is_fetched_once_and_without_the_files_the_engine_does_not_read(
    files: Path, tmp_path: Path
) -> None:
    with Hub.of_folder(NAME, files).serving() as hub:
        first = fetch(hub, tmp_path)
        assert first.returncode == 0, first.stderr
        folder = Path(first.stdout.strip())
        assert folder.name == COMMIT
        wanted = {name for name in os.listdir(files) if name not in NEVER_FETCHED}
        assert set(os.listdir(folder)) == wanted
        assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
        assert "model.safetensors" in first.stderr or "%" in first.stderr
        assert set(hub.sent) == wanted
        hub.sent.clear()
        second = fetch(hub, tmp_path)
        assert second.stdout == first.stdout
        assert hub.sent == {}
    # The hub is gone, then forbidden: the cache is enough.
    assert fetch(hub, tmp_path).stdout == first.stdout
    assert fetch(hub, tmp_path, HF_HUB_OFFLINE="1").stdout == first.stdout


def test_a_revision_is_fetched_by_its_name(files: Path, tmp_path: Path) -> None:
    with Hub.of_folder(NAME, files).serving() as hub:
        assert fetch(hub, tmp_path, revision="v1").returncode == 0
        assert f'{NAME} on {hub.url} has no revision "v9"' in refusal(
            fetch(hub, tmp_path, revision="v9")
        )


def test_a_model_that_does_not_exist_is_named(files: Path, tmp_path: Path) -> None:
    with Hub.of_folder(NAME, files).serving() as hub:
        sentence = refusal(fetch(hub, tmp_path, name="owner/other"))
    assert f"owner/other is neither a folder nor a model on {hub.url} that you may read" in sentence


def test_a_gated_model_needs_a_token(files: Path, tmp_path: Path) -> None:
    with Hub.of_folder(NAME, files, token="hf_secret").serving() as hub:
        sentence = refusal(fetch(hub, tmp_path))
        assert f"{NAME} is gated: accept its terms at {hub.url}/{NAME}" in sentence
        wrong = refusal(fetch(hub, tmp_path, HF_TOKEN="hf_wrong"))
        assert "HF_TOKEN" in wrong
        assert "hf_wrong" not in wrong
        assert hub.sent == {}
        assert fetch(hub, tmp_path, HF_TOKEN="hf_secret").returncode == 0


def test_a_private_model_and_a_broken_hub_are_told_apart(files: Path, tmp_path: Path) -> None:
    with Hub.of_folder(NAME, files, status=401).serving() as hub:
        assert "set HF_TOKEN if the model is private" in refusal(fetch(hub, tmp_path))
        # The hub refuses every request with an expired token, also for public models.
        assert "that your token" in refusal(fetch(hub, tmp_path, HF_TOKEN="hf_expired"))
        hub.status = 418
        assert "418" in refusal(fetch(hub, tmp_path))


def test_without_a_network_and_offline_the_reason_is_the_cache(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    assert f"{NAME} cannot be fetched from {nowhere}" in refusal(fetch(nowhere, tmp_path))
    offline = refusal(fetch(nowhere, tmp_path, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE is set; unset it to download the model" in offline


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("HF_TOKEN", "hf_ä", "codec can't encode"),
        ("ALL_PROXY", "socks5://127.0.0.1:9", "Using SOCKS proxy"),
        ("HF_ENDPOINT", "http://[", "(Invalid IPv6 URL); check HF_ENDPOINT"),
        ("HF_HOME", "/dev/null", "set HF_HOME to a folder that can be written"),
    ],
)
def test_settings_with_which_the_client_fails_are_one_sentence(
    variable: str, value: str, sentence: str, tmp_path: Path
) -> None:
    result = fetch("http://127.0.0.1:9", tmp_path, **{variable: value})
    assert sentence in refusal(result)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "faults",
    [
        {"status": 418},
        {"status": 401},
        {"token": "hf_secret"},
        {"cut_after": 1000, "cuts": 1},
        {},
    ],
)
@pytest.mark.parametrize("password", ["a-secret", "@/ secret"])
def test_no_message_shows_the_password_of_the_hub(
    faults: dict[str, Any], password: str, files: Path, tmp_path: Path
) -> None:
    with Hub.of_folder(NAME, files, **faults).serving() as hub:
        url = hub.url.replace("://", f"://user:{password}@")
        missing = {} if faults else {"revision": "v9"}
        result = fetch(url, tmp_path, **missing)
    # For a download that was cut, that is the client's own log.
    if password == "a-secret":
        assert hub.url.removeprefix("http://") in result.stderr
    assert "secret" not in result.stdout + result.stderr


def test_ctrl_c_ends_a_download_at_once(files: Path, tmp_path: Path) -> None:
    with Hub.of_folder(NAME, files, stalls="model.safetensors").serving() as hub:
        own = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_DOWNLOAD_TIMEOUT": "300"}
        # A test run in the background ignores SIGINT, and its children inherit that.
        command = ["env", "--default-signal=INT", sys.executable]
        command += ["-m", "kvferry", "serve", NAME, "--port", "0"]
        with subprocess.Popen(command, env=os.environ | own, cwd=tmp_path) as process:
            try:
                assert hub.stalled.wait(60)
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
            finally:
                process.kill()
    cached = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert ".json" in cached
    assert ".incomplete" not in cached


def test_an_incomplete_cache_is_not_taken_for_the_model(files: Path, tmp_path: Path) -> None:
    """The cache is as after downloads of single files: the client has no list of all files."""
    cache = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    folder = cache / "snapshots" / COMMIT
    shutil.copytree(files, folder, ignore=lambda *_: ["generation_config.json"])
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / shards[0]).write_bytes(b"x")
    for missing in (shards[1], "tokenizer.json"):
        (folder / missing).unlink(missing_ok=True)
        sentence = refusal(fetch("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1"))
        assert f"{NAME} is not complete in the cache {tmp_path}" in sentence
        (folder / missing).write_bytes(b"x")
    complete = fetch("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert complete.stdout.strip() == str(folder), complete.stderr


def test_a_download_that_is_cut_goes_on_where_it_ended(files: Path, tmp_path: Path) -> None:
    hub = Hub.of_folder(NAME, files, cut_after=11 * MIB, cuts=1)
    hub.files["model.safetensors"] = weights = os.urandom(12 * MIB)
    with hub.serving():
        result = fetch(hub, tmp_path)
    assert result.returncode == 0, result.stderr
    assert (Path(result.stdout.strip()) / "model.safetensors").read_bytes() == weights
    assert hub.cuts == 0
    # The client keeps whole chunks, of 10 MiB.
    assert hub.sent["model.safetensors"] == 11 * MIB + 2 * MIB


def test_a_download_that_fails_is_completed_by_the_next_start(files: Path, tmp_path: Path) -> None:
    hub = Hub.of_folder(NAME, files, cut_after=11 * MIB, cuts=1, dies_of_cut=True)
    hub.files["model.safetensors"] = weights = os.urandom(12 * MIB)
    with hub.serving():
        sentence = refusal(fetch(hub, tmp_path))
        assert f"{hub.url} answered with status 500; try again later" in sentence
        assert not list(tmp_path.rglob("*.incomplete"))
        complete = set(hub.sent) - {"model.safetensors"}
        hub.status = 200
        hub.sent.clear()
        result = fetch(hub, tmp_path)
        assert "config.json" in complete
        assert not complete & set(hub.sent), "complete files are not fetched again"
    assert (Path(result.stdout.strip()) / "model.safetensors").read_bytes() == weights


def test_a_hub_that_never_answers_is_given_up(files: Path, tmp_path: Path) -> None:
    with Hub.of_folder(NAME, files, is_silent=True).serving() as hub:
        assert f"{NAME} cannot be fetched from {hub.url} (timed out)" in refusal(
            fetch(hub, tmp_path, HF_HUB_ETAG_TIMEOUT="1", HF_HUB_DOWNLOAD_TIMEOUT="1")
        )


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"config.json": b'{"architectures": ["GPT2LMHeadModel"]}'}, "architectures must be one"),
        ({"config.json": None}, f"{NAME} on the hub has no config.json"),
        ({"tokenizer.json": None}, f"{NAME} on the hub has no tokenizer.json"),
        ({"model.safetensors": None}, "has no weights named model*.safetensors"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_fetched(
    files: Path, tmp_path: Path, changed: dict[str, bytes | None], sentence: str
) -> None:
    hub = Hub.of_folder(NAME, files)
    hub.files = {k: v for k, v in (hub.files | changed).items() if v is not None}
    with hub.serving():
        assert sentence in refusal(fetch(hub, tmp_path))
    assert set(hub.sent) <= {"config.json"}


def test_a_folder_is_preferred_to_a_name_on_the_hub(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_hub_name(NAME)
    (tmp_path / "owner").mkdir()
    (tmp_path / NAME).symlink_to(files)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name(NAME)
    assert find_checkpoint(NAME) == Path(NAME)
    assert find_config(NAME) == Path(NAME) / "config.json"
    (tmp_path / "owner" / "config.json").symlink_to(files / "config.json")
    assert find_config("owner/config.json") == Path("owner/config.json")
    with pytest.raises(ConfigError, match="--revision is for models of the hub"):
        find_checkpoint(NAME, "main")
    with pytest.raises(ConfigError, match="--revision is for models of the hub"):
        find_config("owner/config.json", "main")


def test_home_is_expanded_where_the_shell_does_not(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(files.parent))
    assert find_checkpoint(f"~/{files.name}") == files
    assert find_config(f"~/{files.name}") == files / "config.json"


@pytest.mark.parametrize(
    "model", ["", "../..", "a/b/c", "a\0b", "~nobody-here/x", "tiny", "./tiny", "/", ".a/b"]
)
def test_what_is_no_model_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match="MODEL is"):
        find_checkpoint(model)


@pytest.mark.parametrize("model", ["foo--bar/baz", "foo/bar.git", "a..b/c", "a/b-"])
def test_a_name_that_the_hub_does_not_allow_is_named(model: str) -> None:
    for find in (find_checkpoint, find_config):
        with pytest.raises(ConfigError, match="neither a folder nor a name that the"):
            find(model)


def test_a_path_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = 300 * "x"
    (tmp_path / "owner").mkdir()
    (tmp_path / NAME).symlink_to(too_long)
    monkeypatch.chdir(tmp_path)
    for model in (too_long, f"owner/{too_long}", NAME):
        for find in (find_checkpoint, find_config):
            with pytest.raises(ConfigError, match=r"cannot be read \(File name too long\)"):
                find(model)


@pytest.mark.parametrize(
    ("flags", "is_fetched"),
    [
        ([], True),
        (["--revision", "v1"], True),
        (["--revision=v1", "--enforce-eager"], True),
        (["--download-dir", "x"], False),
        (["--load_format=dummy"], False),
    ],
    ids=str,
)
def test_the_weights_of_vllm_servers_are_fetched_with_progress_before_they_start(
    files: Path, tmp_path: Path, flags: list[str], is_fetched: bool
) -> None:
    """The stand-in of vLLM only dies, so all that the hub has sent was fetched before."""
    (tmp_path / "dies").symlink_to(Path(__file__).with_name("stub_vllm.py"))
    command = [sys.executable, "-m", "kvferry", "up", "--port", "0", "--vllm", NAME]
    command += ["--vllm-python", str(tmp_path / "dies"), "--", *flags]
    hub = Hub.of_folder(NAME, files)
    hub.files = {name: text for name, text in hub.files.items() if name not in NEVER_FETCHED}
    with hub.serving():
        own = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "TMPDIR": str(tmp_path)}
        result = subprocess.run(
            command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True
        )
        assert "Engine core initialization failed" in result.stdout, result.stderr
        assert ("model.safetensors" in hub.sent) == is_fetched
        assert ("Fetching" in result.stderr) == is_fetched


def test_a_repository_in_mistrals_format_is_left_to_vllm(files: Path, tmp_path: Path) -> None:
    hub = Hub.of_folder(NAME, files)
    hub.files["consolidated.safetensors"] = b"x"
    code = f"from kvferry.cli.checkpoints import prefetch; prefetch({NAME!r}, 'main')"
    with hub.serving():
        own = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
        subprocess.run([sys.executable, "-c", code], env=os.environ | own, check=True)
    assert hub.sent == {}


def test_vllm_servers_of_a_model_that_the_hub_refuses_are_not_started(
    files: Path, tmp_path: Path
) -> None:
    (tmp_path / "dies").symlink_to(Path(__file__).with_name("stub_vllm.py"))
    command = [sys.executable, "-m", "kvferry", "up", "--port", "0", "--vllm", NAME]
    with Hub.of_folder(NAME, files, token="hf_secret").serving() as hub:
        own = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
        result = subprocess.run(
            [*command, "--vllm-python", str(tmp_path / "dies")],
            env={k: v for k, v in os.environ.items() if k != "HF_TOKEN"} | own,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert f"{NAME} is gated: accept its terms" in result.stderr


def test_a_plan_fetches_the_configuration_alone(files: Path, tmp_path: Path) -> None:
    with Hub.of_folder(NAME, files).serving() as hub:
        result = subprocess.run(
            [sys.executable, "-m", "kvferry", "plan", NAME, "--json"],
            env=os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert json.loads(result.stdout)["bytes_per_token"] > 0, result.stderr
    assert set(hub.sent) == {"config.json"}
    # The configuration alone is not the model.
    assert f"{NAME} cannot be fetched from {hub.url}" in refusal(fetch(hub, tmp_path))


def test_a_plan_of_a_repository_without_a_configuration_says_so(
    files: Path, tmp_path: Path
) -> None:
    hub = Hub.of_folder(NAME, files)
    del hub.files["config.json"]
    with hub.serving():
        result = subprocess.run(
            [sys.executable, "-m", "kvferry", "plan", NAME],
            env=os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert result.returncode == 2
    assert f"{NAME} on {hub.url} has no config.json" in result.stderr


def test_a_name_has_chats_if_its_cached_files_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert not has_chat_template(Path(NAME))
    cache = tmp_path / f"models--{NAME.replace('/', '--')}"
    folder = cache / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    (folder / "config.json").write_text("{}")
    assert not has_chat_template(Path(NAME))
    (folder / "chat_template.jinja").write_text("")
    assert has_chat_template(Path(NAME))


def test_each_revision_has_chats_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has the tokenizer alone where `--tokenizer-revision` names another revision."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / f"models--{NAME.replace('/', '--')}"
    for name, commit, config in (("main", COMMIT, {}), ("v1", OTHER_COMMIT, {"chat_template": ""})):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "tokenizer_config.json").write_text(json.dumps(config))
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / name).write_text(commit)
    for revision in (None, "main", COMMIT, "v9"):
        assert not has_chat_template(Path(NAME), revision)
    for revision in ("v1", OTHER_COMMIT):
        assert has_chat_template(Path(NAME), revision)
        asked = sample_request(UpOptions(model=Path(NAME), revision=revision), "hi")
        assert "messages" in asked
    assert "messages" not in sample_request(UpOptions(model=Path(NAME)), "hi")


@pytest.mark.slow
def test_up_serves_a_model_by_its_name_on_the_hub(files: Path, tmp_path: Path) -> None:
    with Hub.of_folder(NAME, files).serving() as hub:
        own = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            [sys.executable, "-m", "kvferry", "up", "--model", NAME, "--once", "--port", "0"],
            env=os.environ | own,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "of KV cache by " in result.stdout
    assert hub.sent["model.safetensors"] == len(hub.files["model.safetensors"])
