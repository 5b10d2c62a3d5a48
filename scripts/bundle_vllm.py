"""Pack real vLLM, its packages, NIXL and this project for a GPU machine without a network, in parts
that are small enough to copy.

    .venv-vllm/bin/python -m pip freeze > freeze.txt    # an environment in which vLLM runs
    python3 -m pip list --format=freeze > have.txt      # on the GPU machine
    python scripts/bundle_vllm.py build/gpu-vllm --freeze freeze.txt --have have.txt --strip strip
    # copy build/gpu-vllm to the GPU machine, as many parts at a time as fit; then there:
    bash build/gpu-vllm/arrive.sh ~/kvferry-gpu         # runs the tests in tests/gpu/vllm
    bash build/gpu-vllm/arrive.sh ~/kvferry-gpu kvferry bench vllm-handover --device cuda

The GPU machine must have torch for its GPU; a package that it has stays at its version. After a
change to the project, `--project-only` packs the project again, which is small.

Of vLLM's compiled code, only what attention and a dense model need is kept: the common kernels and
FlashAttention 3. `--keep _moe_C` adds the kernels of mixture-of-experts models.
"""

import argparse
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bundle_libraries import (
    CONSTRAINTS,
    DISTRIBUTIONS,
    ROOT,
    download,
    drop_libraries,
    drop_unused,
    environment,
    normalized,
    read_versions,
    with_versions,
)

VLLM_VERSION = "0.33.0"
NEW_PACKAGES = ("orjson",)
"""Packages that vLLM 0.33 imports and the environment of its newest CPU build, 0.32, lacks."""
PARTS, PROJECT, ARRIVE = "vllm.tar.xz", "project.tar.xz", "arrive.sh"
COMPILED = (
    "vllm/_C_stable_libtorch",
    "vllm/vllm_flash_attn/_vllm_fa3_C",
    "vllm/cumem_allocator",  # sleep mode
)
"""The start of the paths of those of vLLM's libraries that are kept."""
LEFT_OUT_OF_VLLM = (
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/include",
    "vllm/third_party/fmha_sm100",
    "vllm/entrypoints/serve/instrumentator/static",
)
LEFT_OUT = ("vllm", "intel-", "fastapi-cloud-cli", "nixl-cu12", "pycountry", "sentry-sdk", "torch")
"""Packages of a CPU environment that no server on a GPU imports, and torch, which must be there."""
UNUSED = ("mistral_common/data", "cv2", "opencv_*")
ENVIRONMENT = """\
# The sampler of FlashInfer is compiled when it is first used, which needs its sources.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
"""
ARRIVE_SCRIPT = """\
# bash arrive.sh FOLDER [COMMAND…]: unpack into FOLDER what lies beside this file (the libraries
# once, the project each time), and run the command in the project. Without a command: the tests
# with real vLLM.
set -eu
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" folder="$1" python="${PYTHON:-python@VERSION@}"
shift
mkdir -p "$folder/libraries" "$folder/bin"
folder="$(cd "$folder" && pwd)"
if [ ! -e "$folder/libraries/.complete" ]; then
    cat "$here"/part*/@PARTS@.* | tar -xJ -C "$folder/libraries"
    "$python" -m compileall -q -j 0 "$folder/libraries" > /dev/null || true
    touch "$folder/libraries/.complete"
fi
rm -rf "$folder/project"
mkdir "$folder/project"
tar -xJf "$here/@PROJECT@" -C "$folder/project"
printf '#!/bin/sh\\nexec "%s" -m kvferry "$@"\\n' "$python" > "$folder/bin/kvferry"
chmod +x "$folder/bin/kvferry"
export PYTHON="$python" PATH="$folder/bin:$PATH"
cd "$folder/project"
. "$folder/libraries/env.sh"
if [ $# = 0 ]; then set -- "$python" -m pytest tests/gpu/vllm; fi
exec "$@"
"""


def main() -> int:
    options = _parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    _pack_project(options.folder / PROJECT)
    (options.folder / ARRIVE).write_text(arrive_script(options.python))
    if not options.project_only:
        with tempfile.TemporaryDirectory() as work:
            libraries = Path(work) / "libraries"
            _collect(options, Path(work) / "wheels", libraries)
            for old in options.folder.glob("part*"):
                shutil.rmtree(old)
            write_parts(libraries, options.folder, round(options.part_mb * 1e6))
    for file in sorted(file for file in options.folder.rglob("*") if file.is_file()):
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="where the parts are written")
    add("--freeze", type=Path, help="`pip freeze` of an environment in which vLLM runs")
    add("--have", type=Path, help="what the GPU machine has: a name, or name==version, per line")
    add("--vllm", default=VLLM_VERSION, help="release of vLLM (default: %(default)s)")
    add("--python", default="3.12", help="of the GPU machine (default: %(default)s)")
    add("--machine", default="x86_64", help="its processor (default: %(default)s)")
    add("--part-mb", type=float, default=60, help="at most so many MB each (default: %(default)g)")
    add("--keep", action="append", default=[], metavar="LIBRARY", help="of vLLM's, also keep this")
    add("--strip", help="a program that takes symbols out of libraries for that processor")
    add("--project-only", action="store_true", help="pack only this project again")
    options = parser.parse_args()
    if not options.project_only and (options.freeze is None or options.have is None):
        parser.error("--freeze and --have are needed; --help says what they hold")
    return options


def _collect(options: argparse.Namespace, wheels: Path, libraries: Path) -> None:
    """Download and unpack everything, and remove what is not needed."""
    wanted = choose(read_versions(options.freeze), options.have.read_text().splitlines())
    download(wheels, [f"vllm=={options.vllm}", *wanted], options.python, options.machine)
    for wheel in sorted(wheels.iterdir()):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if wheel.name.startswith("vllm-"):
                names = [name for name in names if is_kept(name, options.keep)]
            archive.extractall(libraries, names)
        wheel.unlink()
    drop_unused(libraries)
    drop_libraries(libraries)
    for pattern in UNUSED:
        for found in libraries.glob(pattern):
            shutil.rmtree(found)
    if options.strip:
        for library in libraries.rglob("*.so*"):
            # vLLM's own are nearly all GPU code.
            if "vllm" not in library.parts:
                subprocess.run([options.strip, "--strip-unneeded", library], check=True)
    (libraries / "env.sh").write_text(environment(options.python) + ENVIRONMENT)


def choose(versions: Mapping[str, str], have: Sequence[str]) -> list[str]:
    """Return what must be downloaded: the packages of vLLM's environment, what its newest release
    needs besides, kvferry's and its tests',
    without those that the GPU machine has.
    """
    known = {normalized(line.partition("==")[0]) for line in have}
    wanted = {
        name
        for name in {*versions, *DISTRIBUTIONS, *NEW_PACKAGES}
        if name not in known and not name.startswith(LEFT_OUT)
    }
    return with_versions(sorted(wanted), {**read_versions(CONSTRAINTS), **versions})


def is_kept(name: str, also: Sequence[str]) -> bool:
    """Say whether this file of vLLM's wheel is needed."""
    if ".so" in Path(name).suffixes:
        file = Path(name).name
        return name.startswith(COMPILED) or any(file.startswith(start) for start in also)
    return not name.startswith(LEFT_OUT_OF_VLLM)


def write_parts(tree: Path, folder: Path, part_bytes: int) -> None:
    """Write one archive of `tree` as part01/vllm.tar.xz.01 and so on."""
    with tempfile.TemporaryFile() as whole:
        with (
            lzma.open(whole, "w", preset=3) as packed,
            tarfile.open(fileobj=packed, mode="w|") as archive,
        ):
            archive.add(tree, ".")
        whole.seek(0)
        number = 0
        while piece := whole.read(part_bytes):
            number += 1
            part = folder / f"part{number:02}"
            part.mkdir()
            (part / f"{PARTS}.{number:02}").write_bytes(piece)


def arrive_script(version: str) -> str:
    words = {"@VERSION@": version, "@PARTS@": PARTS, "@PROJECT@": PROJECT}
    script = ARRIVE_SCRIPT
    for word, meaning in words.items():
        script = script.replace(word, meaning)
    return script


def _pack_project(file: Path) -> None:
    """Pack the files of the working tree that git knows or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tarfile.open(file, "w:xz") as archive:
        for name in filter(None, sorted(set(listed.split("\0")))):
            path = ROOT / name
            if path.is_file():
                archive.addfile(archive.gettarinfo(str(path), name), io.BytesIO(path.read_bytes()))


if __name__ == "__main__":
    sys.exit(main())
