"""Builds torch's own caching allocator over a driver without a GPU, into the folder that is named.

    python tests/allocator/own/build.py build/allocator

Of torch's CUDA build only libc10_cuda.so and libc10.so are taken, with their headers; those of CUDA come from NVIDIA's
packages. `driver.c` and `idle.c` are the libcudart and the NVML that these libraries look for. Downloads half a
gigabyte with pip, which has to reach an index with torch's CUDA build, and compiles for ten seconds.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = ("torch==2.13.0", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
WANTED = (
    "torch/lib/libc10.so", "torch/lib/libc10_cuda.so", "torch/include/c10/", "torch/include/torch/headeronly/",
    "nvidia/cu13/include/",
)  # fmt: skip


def run(line: str) -> None:
    """Run a command, which has to succeed."""
    subprocess.run(shlex.split(line), check=True)


def unpacked(folder: Path) -> None:
    """What is wanted of the packages, and no more: NVIDIA's libcudart would be found before ours."""
    with tempfile.TemporaryDirectory() as wheels:
        run(f"{sys.executable} -m pip download --quiet --no-deps --only-binary=:all: -d {wheels} {' '.join(PACKAGES)}")
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(folder, [name for name in packed.namelist() if name.startswith(WANTED)])
    if not (folder / "torch/lib/libc10_cuda.so").exists():
        raise SystemExit("pip has found a build of torch without CUDA: let it look at an index that has the other one")


def main(folder: Path) -> None:
    """Fetch what is not there, and compile."""
    if not (folder / "torch/lib/libc10_cuda.so").exists():
        unpacked(folder)
    cuda, torch, library = folder / "nvidia/cu13/include", folder / "torch", folder / "libcudart.so.13"
    run(
        f"gcc -O1 -shared -fPIC -I{cuda} {HERE}/driver.c {HERE}/idle.c -o {library} -ldl "
        f"-Wl,--version-script={HERE}/versions.map -Wl,-soname,{library.name}"
    )
    (folder / "libnvidia-ml.so.1").unlink(missing_ok=True)
    (folder / "libnvidia-ml.so.1").symlink_to(library.name)
    run(
        f"g++ -std=c++20 -O1 -I{torch}/include -I{cuda} {HERE}/events.cpp -o {folder}/events -L{torch}/lib -L{folder} "
        "-l:libc10_cuda.so -l:libc10.so -l:libcudart.so.13 -Wl,-rpath,$ORIGIN/torch/lib:$ORIGIN "
        "-Wl,--allow-shlib-undefined"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
