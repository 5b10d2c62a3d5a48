"""Checks the documents: links have targets, commands exist, and the tour names every package."""

import re
import shlex
from pathlib import Path

import pytest

from kvferry.cli.cluster.addresses import curl_command
from kvferry.cli.cluster.local_cluster import UpOptions
from kvferry.cli.main import COMMANDS, main
from kvferry.cli.up import NEXT_QUESTION, sample_request
from kvferry.protocol.messages import OLDEST_WIRE_VERSION, WIRE_VERSION
from kvferry.types import Address
from kvferry.vllm.release import TESTED

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"\bkvferry (--?[a-z-]+|[a-z][a-z-]+)")
PROSE_AFTER_NAME = {
    "and",
    "is",
    "does",
    "needs",
    "has",
    "never",
    "on",
    "in",
    "as",
    "with",
    "only",
    "for",
    "or",
    "the",
    "carries",
    "moves",
}


def local_links(path: Path) -> list[str]:
    return [
        link
        for link in LINK.findall(path.read_text(encoding="utf-8"))
        if "://" not in link and not link.startswith("mailto:")
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert [link for link in local_links(path) if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_code_exist(path: Path) -> None:
    """Inside backticks and code blocks, `kvferry WORD` is a command."""
    code = "\n".join(
        re.findall(r"```.*?```|`[^`\n]+`", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
    known = {*COMMANDS, "--version", "--help"} | PROSE_AFTER_NAME
    assert [word for word in COMMAND.findall(code) if word not in known] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_are_named_exist(path: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text(encoding="utf-8"))
    assert [
        f"{module}::{name}" for module, name in named if f"def {name}(" not in _text(ROOT / module)
    ] == []


def test_links_of_the_readme_to_tests_have_the_names_of_tests() -> None:
    """Each row of the abuse table links to the file of its test; the link text is the test's
    name.
    """
    named = re.findall(r"\[([^\]]+)\]\((tests/[\w/]+\.py)\)", _text(ROOT / "README.md"))
    assert len(named) >= 8
    assert [
        name
        for name, module in named
        if f"def test_{name.replace(' ', '_')}(" not in _text(ROOT / module)
    ] == []


def test_the_readme_shows_the_request_that_kvferry_up_prints() -> None:
    request = sample_request(UpOptions(), NEXT_QUESTION)
    assert curl_command(Address("127.0.0.1", 8000), request) in _text(ROOT / "README.md")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_every_wire_version_in_use_has_an_entry_in_the_changelog() -> None:
    section = _text(ROOT / "CHANGELOG.md").split("## Wire versions\n")[1].split("\n## ")[0]
    listed = [int(version) for version in re.findall(r"^- \*\*(\d+)\*\* ", section, re.MULTILINE)]
    assert listed == list(range(WIRE_VERSION, OLDEST_WIRE_VERSION - 1, -1))


def test_every_promise_about_faults_names_a_test() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and not line.startswith(("| what happens |", "|---"))
    ]
    assert len(rows) >= 9
    assert [row for row in rows if "::test_" not in row] == []


def test_what_readers_start_with_is_there() -> None:
    assert {"README.md", "CONTRIBUTING.md", "LICENSE"} <= {path.name for path in ROOT.iterdir()}


def test_every_package_is_on_the_tour() -> None:
    tour = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "src" / "kvferry").glob("*/__init__.py")]
    assert packages
    assert [name for name in packages if f"{name}/" not in tour] == []


def test_a_newcomer_reads_the_tour_in_a_few_minutes() -> None:
    words = re.findall(r"\S*\w\S*", _text(ROOT / "docs" / "tour.md"))
    assert 1000 < len(words) < 1200


def test_readme_and_the_page_on_vllm_show_the_same_commands() -> None:
    def commands(path: Path, section: str) -> list[str]:
        text = path.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
        lines = "\n".join(text.split("```")[1::2]).replace("\\\n", " ").splitlines()
        return [" ".join(line.split()) for line in lines if line.strip()]

    shown = commands(ROOT / "README.md", "In vLLM")
    assert shown == commands(ROOT / "docs" / "vllm.md", "On one host")
    assert len(shown) == 3


def test_the_readme_and_the_page_on_vllm_name_the_tested_releases() -> None:
    page = _text(ROOT / "docs" / "vllm.md")
    (header,) = re.findall(r"## Releases of vLLM\n.*?\n(\|[^\n]*)\n\|---", page, re.DOTALL)
    assert [cell.strip() for cell in header.strip("|").split("|")[1:]] == list(TESTED)
    sentence = f"{', '.join(TESTED[:-1])} and {TESTED[-1]}"
    assert f"is tested with vLLM {sentence} " in page
    assert f"| vLLM | {sentence} " in _text(ROOT / "README.md")


def test_no_document_or_source_names_a_machine() -> None:
    """Paths of a developer's machine and addresses of package registries do not belong in the
    project.
    """
    machine = re.compile(
        r"(?<![\w.])/(?:work|home|root|Users)/|pypi\.org|pythonhosted|download\.pytorch"
    )
    files = [
        *DOCUMENTS,
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("tests/**/*.py"),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        ROOT / ".ci" / "run",
    ]
    assert [
        str(path.relative_to(ROOT))
        for path in files
        if path != Path(__file__) and machine.search(path.read_text(encoding="utf-8"))
    ] == []


def test_the_commands_of_the_page_on_planning_run_and_write_the_table_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(
        '{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}'
    )
    monkeypatch.chdir(tmp_path)
    commands = [
        shlex.split(line)
        for block in page.split("```")[1::2]
        for line in block.strip().splitlines()
    ]
    outputs = []
    for words in commands:
        assert words[:2] == ["kvferry", "plan"]
        assert main(words[1:]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(outputs) == 6
    for title, output, num_lines in (("Llama-3.1-70B", 0, 7), ("Llama-3.1-8B", 4, 7)):
        cells = [cell.strip() for line in outputs[output].splitlines() for cell in line.split("|")]
        shown = page.split(f"for the sizes of {title}:\n\n")[1].split("\n\n")[0].splitlines()
        assert len(shown) == num_lines
        assert [
            cell
            for line in shown
            if "---" not in line
            for cell in map(str.strip, line.split("|"))
            if cell not in cells
        ] == []
