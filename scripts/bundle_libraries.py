"""Make a folder with all that kvferry and its tests need beside torch and numpy: for a GPU machine
that reaches no package index.

    python scripts/bundle_libraries.py build/libraries --python 3.12 --strip x86_64-linux-gnu-strip
    # there, in the repository's root, with that folder in it:
    . build/libraries/env.sh && python3.12 -m pytest tests/gpu

Versions are those of constraints.txt. Of NIXL only what its UCX plugin needs is kept.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
DISTRIBUTIONS = (
    *(
        "aiohappyeyeballs",
        "aiohttp",
        "aiosignal",
        "attrs",
        "execnet",
        "frozenlist",
        "httptools",
        "hypothesis",
        "idna",
    ),
    *(
        "iniconfig",
        "jinja2",
        "markupsafe",
        "msgspec",
        "multidict",
        "nixl",
        "nixl-cu13",
        "packaging",
    ),
    *(
        "pluggy",
        "prometheus-client",
        "propcache",
        "psutil",
        "pygments",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
    ),
    *(
        "pyzmq",
        "rich",
        "safetensors",
        "sortedcontainers",
        "tokenizers",
        "typing-extensions",
        "uvloop",
        "yarl",
    ),
)
NIXL_LIBRARIES, NIXL_CORE = "nixl_cu13.libs", ".nixl_cu13.mesonpy.libs"
UCX_MODULES = ("libucm_cuda.so", "libuct_cma.so", "libuct_cuda.so")
LEXERS = {"__init__.py", "_mapping.py", "data.py", "diff.py", "python.py", "special.py", "text.py"}
UNUSED = (
    "nixl_ep_cu13",
    "*.data",
    "*.scripts",
    f"{NIXL_LIBRARIES}/nixl",
    "**/tests",
    "**/*.pyi",
    "zmq/backend/cffi",
    "aiohttp/.hash",
    "**/*.pyx",
    "**/*.c",
    "**/__pycache__",
)
ENVIRONMENT = """\
# Source this from the root of the repository.
_libraries="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
_python="${PYTHON:-python@VERSION@}"
_cuda="$("$_python" -c 'import glob, os, torch; found = glob.glob(os.path.join(os.path.dirname(torch.__path__[0]), "nvidia", "*", "lib"))
print(":".join(found))')"
export PYTHONPATH="$_libraries:$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
export NIXL_PLUGIN_DIR="$_libraries/@CORE@/plugins"
export UCX_MODULE_DIR="$_libraries/@LIBRARIES@/ucx"
export LD_LIBRARY_PATH="$_cuda:$_libraries/@LIBRARIES@:$_libraries/@CORE@${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
_include="$("$_python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')"
[ -d src/kvferry ] || echo "this is not the root of the repository: go there, and source this again"
if "${CC:-gcc}" -O3 -shared -fPIC -DPy_LIMITED_API=0x030B0000 -I"$_include" src/kvferry/transports/copy/_copy.c -o src/kvferry/transports/copy/_copy.new
then mv src/kvferry/transports/copy/_copy.new src/kvferry/transports/copy/_copy.abi3.so
else echo "no compiler, or no headers of Python: kvferry copies with numpy"
fi
"""  # noqa: E501


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="is made, or made anew")
    parser.add_argument(
        "--python", default="3.12", help="of the other machine (default: %(default)s)"
    )
    parser.add_argument("--machine", default="x86_64", help="its processor (default: %(default)s)")
    parser.add_argument(
        "--strip",
        help="a program that takes symbols out of libraries for that processor: half the size",
    )
    options = parser.parse_args()
    if options.folder.exists():
        if not (options.folder / "env.sh").exists():
            parser.error(
                f"{options.folder} was not made by this script; name another folder, or remove it"
            )
        shutil.rmtree(options.folder)
    with tempfile.TemporaryDirectory() as wheels:
        download(
            Path(wheels),
            with_versions(DISTRIBUTIONS, read_versions(CONSTRAINTS)),
            options.python,
            options.machine,
        )
        for wheel in sorted(Path(wheels).iterdir()):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(options.folder)
    drop_unused(options.folder)
    drop_libraries(options.folder)
    if options.strip:
        for library in options.folder.rglob("*.so*"):
            subprocess.run([options.strip, "--strip-unneeded", library], check=True)
    (options.folder / "env.sh").write_text(environment(options.python))
    size = sum(file.stat().st_size for file in options.folder.rglob("*") if file.is_file())
    print(f"{options.folder}: {size / 2**20:.0f} MiB")
    return 0


def environment(version: str) -> str:
    """Return the text of env.sh for this version of Python."""
    words = {"@VERSION@": version, "@CORE@": NIXL_CORE, "@LIBRARIES@": NIXL_LIBRARIES}
    return re.sub("@[A-Z]+@", lambda found: words[found[0]], ENVIRONMENT)


def read_versions(file: Path) -> dict[str, str]:
    """Return name and version of each line `name==version`; other lines are ignored."""
    pairs = (line.split("==") for line in file.read_text().splitlines() if "==" in line)
    return {
        normalized(pair[0]): pair[1].strip()
        for pair in pairs
        if len(pair) == 2 and not pair[0].startswith("#")
    }


def with_versions(names: Iterable[str], versions: Mapping[str, str]) -> list[str]:
    return [f"{name}=={versions[name]}" if name in versions else name for name in names]


def normalized(name: str) -> str:
    """Return the form of a distribution's name in which two spellings of it are equal."""
    return re.sub("[-_.]+", "-", name.strip()).lower()


def download(folder: Path, wanted: Sequence[str], version: str, machine: str) -> None:
    """Download the wheels of `wanted`, and of nothing that they depend on."""
    abi = "cp" + version.replace(".", "")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    command += [
        "--python-version",
        version,
        "--implementation",
        "cp",
        "--abi",
        abi,
        "--abi",
        "abi3",
        "--abi",
        "none",
    ]
    for glibc in ("2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5"):
        command += ["--platform", f"manylinux_{glibc}_{machine}"]
    subprocess.run([*command, "--platform", f"manylinux2014_{machine}", *wanted], check=True)


def drop_unused(folder: Path) -> None:
    for pattern in UNUSED:
        for found in list(folder.glob(pattern)):
            shutil.rmtree(found) if found.is_dir() else found.unlink()
    for lexer in (folder / "pygments" / "lexers").glob("*"):
        if lexer.name not in LEXERS:
            lexer.unlink()


def drop_libraries(folder: Path) -> None:
    """All of NIXL that UCX on one host does not need, directly or by another library."""
    core, libraries = folder / NIXL_CORE, folder / NIXL_LIBRARIES
    for plugin in (core / "plugins").iterdir():
        if plugin.name != "libplugin_UCX.so":
            plugin.unlink()
    for module in (libraries / "ucx").iterdir():
        if not module.name.startswith(UCX_MODULES):
            module.unlink()
    needed = [
        *(core / "plugins").iterdir(),
        *(libraries / "ucx").iterdir(),
        *(folder / "nixl_cu13").glob("*.so"),
    ]
    looked_at = set[Path]()
    while needed:
        library = needed.pop()
        looked_at.add(library)
        said = subprocess.run(
            ["readelf", "--dynamic", library], check=True, capture_output=True, text=True
        ).stdout
        named = [
            place / name
            for name in re.findall(r"\(NEEDED\).*\[(.*)\]", said)
            for place in (core, libraries)
        ]
        needed += [found for found in named if found.exists() and found not in looked_at]
    for library in (*core.iterdir(), *libraries.iterdir()):
        if library.is_file() and library not in looked_at:
            library.unlink()


if __name__ == "__main__":
    sys.exit(main())
