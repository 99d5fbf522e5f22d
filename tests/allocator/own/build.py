"""Build torch's caching allocator over a driver without a GPU, into the given folder.

    python tests/allocator/own/build.py build/allocator

From torch's CUDA build only libc10_cuda.so and libc10.so are used, with their headers; CUDA's headers come
from NVIDIA's packages. `driver.c` and `idle.c` replace the libcudart and the NVML of these libraries. The
script downloads half a gigabyte with pip, from an index with torch's CUDA build, and compiles for ten
seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))

from support.cuda_wheels import fetched, run  # noqa: E402 - of tests/

# No more than this: NVIDIA's libcudart would be found before ours.
WANTED = (
    "torch/lib/libc10.so", "torch/lib/libc10_cuda.so", "torch/include/c10/", "torch/include/torch/headeronly/",
    "nvidia/cu13/include/",
)  # fmt: skip


def main(folder: Path) -> None:
    """Download missing packages, and compile."""
    fetched(folder, lambda name: name.startswith(WANTED))
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
