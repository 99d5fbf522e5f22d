"""Download of torch's CUDA build and NVIDIA's headers, for tools that run pipefit's libraries against them.

Downloads half a gigabyte with pip, from an index with torch's CUDA build.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("torch==2.13.0", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")


def run(line: str) -> str:
    """Return the output of a command, which must succeed."""
    return subprocess.run(shlex.split(line), check=True, stdout=subprocess.PIPE, text=True).stdout


def fetched(folder: Path, wanted: Callable[[str], bool]) -> Path:
    """Return the folder with the unpacked files of the `wanted` packages; unpack them if missing."""
    library = folder / "torch/lib/libc10_cuda.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as wheels:
            run(
                f"{sys.executable} -m pip download --quiet --no-deps --only-binary=:all: -d {wheels} "
                + " ".join(PACKAGES)
            )
            for wheel in Path(wheels).glob("*.whl"):
                with zipfile.ZipFile(wheel) as packed:
                    packed.extractall(folder, filter(wanted, packed.namelist()))
    if not library.exists():
        raise SystemExit(
            "pip has found a build of torch without CUDA: let it look at an index that has the other one"
        )
    return folder
