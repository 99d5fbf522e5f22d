"""Build of a CUDA without a GPU into a given folder: torch's CUDA build over libraries of ours.

    python tests/emulated/build.py build/cuda
    build/cuda/bin/python -m pytest -m gpu

`bin/python` there has that torch, and all other packages of this interpreter. Functions of NVIDIA's libraries
that are not implemented here print their name when called, and end the process. Takes 2 GB and two minutes,
most of them for `kernels.cpp`, after half a gigabyte of downloads.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from support.cuda_wheels import fetched, run  # noqa: E402 - of tests/

REAL = ("runtime.c", "streams.c", "driver.c", "blas.c")
READERS = (
    "torch_cuda", "torch_cpu", "c10_cuda", "torch_python", "torch_nvshmem", "torch_cuda_linalg", "caffe2_nvrtc",
)  # fmt: skip
NAMES = (
    "libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", "libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9",
    "libcusparse.so.12", "libcusparseLt.so.0", "libcusolver.so.12", "libcufft.so.12", "libcurand.so.10",
    "libcufile.so.0", "libcupti.so.13", "libnvrtc.so.13", "libnvJitLink.so.13", "libnvshmem_host.so.3",
)  # fmt: skip
OURS = re.compile(r"__cuda|cu[A-Z]|cuda|cublas|cudnn|cusparse|cusolver|cufft|curand|cupti|nvrtc|nvshmem")
NCCL = re.compile(r"nccl[A-Z]")
STUBS = """#include <stdio.h>
#include <stdlib.h>
static void missing(const char *name) { fprintf(stderr, "emulated CUDA: %s is not there\\n", name), abort(); }
"""
STARTUP = """import ctypes, pathlib
FOLDER = pathlib.Path(__file__).parent
for name in {names}:
    ctypes.CDLL(str(FOLDER / "nvidia/cu13/lib" / name), ctypes.RTLD_GLOBAL if "cudart" in name else ctypes.DEFAULT_MODE)
def kernels():
    ctypes.CDLL(str(FOLDER / "kernels.so")).emulate()
"""
INFORMATION = {
    "METADATA": "Metadata-Version: 2.1\nName: emulated-cuda\nVersion: 0\n",
    "entry_points.txt": "[torch.backends]\nemulated_cuda = emulated_cuda:kernels\n",  # torch calls it when imported
}


def looked_for(torch: Path, names: re.Pattern[str]) -> dict[str, str]:
    """Return the symbols that torch's libraries import from NVIDIA's, each with its version, if any."""
    found: dict[str, str] = {}
    for reader in READERS:
        for line in run(f"nm -D --undefined-only {torch}/lib/lib{reader}.so").splitlines():
            name, _, version = line.split()[-1].partition("@")
            if names.match(name):
                found[name] = version or found.get(name, "")
    return found


def stubs(file: Path, names: set[str]) -> Path:
    """Generate functions that print their names and end the process."""
    file.write_text(
        STUBS + "".join(f'void {name}(void) {{ missing("{name}"); }}\n' for name in sorted(names))
    )
    return file


def cuda(folder: Path, lib: Path) -> None:
    """Build one library under all of NVIDIA's names except NCCL's."""
    wanted, objects = (
        looked_for(folder / "torch", OURS),
        [folder / source.replace(".c", ".o") for source in REAL],
    )
    for source, made in zip(REAL, objects, strict=True):
        run(f"gcc -O2 -Wall -fPIC -pthread -I{folder}/nvidia/cu13/include -c {HERE}/{source} -o {made}")
    there = set(run(f"nm --defined-only --format=just-symbols {' '.join(map(str, objects))}").split())
    versions: dict[str, set[str]] = {NAMES[0]: {"cu[A-Z]*", "nvml*", "enqueue", "_fini"}}
    for name in {*wanted, *filter(OURS.match, there)}:
        versions.setdefault(wanted.get(name) or NAMES[0], set()).add(name)
    script = folder / "versions.map"
    script.write_text(
        "".join(f"{name} {{ global: {'; '.join(sorted(of))}; }};\n" for name, of in versions.items())
    )
    run(
        f"gcc -shared -fPIC -w {stubs(folder / 'stubs.c', set(wanted) - there)} {' '.join(map(str, objects))} "
        f"-o {lib / NAMES[0]} -pthread -ldl -Wl,-soname,{NAMES[0]} -Wl,--version-script={script}"
    )
    for name in NAMES[1:]:
        (lib / name).unlink(missing_ok=True)
        (lib / name).symlink_to(NAMES[0])
    driver = (
        lib / "libcuda.so.1"
    )  # programs open it by its name: a separate library with all of the other's symbols
    driver.unlink()
    run(f"gcc -shared -o {driver} -Wl,-soname,{driver.name} -Wl,--no-as-needed -L{lib} -l:{NAMES[0]}")


def nccl(folder: Path, lib: Path) -> None:
    """Build NCCL over shared memory, and its check, which contains a separate CUDA."""
    compiled = f"gcc -O2 -fwrapv -Wall -pthread -I{folder}/nvidia/cu13/include"
    here, made = folder / "nccl.o", lib / "libnccl.so.2"
    run(f"{compiled} -fPIC -c {HERE}/nccl.c -o {here}")
    run(f"{compiled} {HERE}/nccl.c {HERE}/streams.c {HERE}/check_nccl.c -o {folder}/check_nccl")
    missing = set(looked_for(folder / "torch", NCCL)) - set(
        run(f"nm --defined-only --format=just-symbols {here}").split()
    )
    run(
        f"gcc -shared -fPIC -w -pthread {here} {stubs(folder / 'nccl_stubs.c', missing)} -o {made} "
        f"-Wl,-soname,{made.name} -L{lib} -l:{NAMES[0]}"
    )


def kernels(folder: Path, lib: Path) -> None:
    """Build the operators; recompilation after a change takes a minute and a half."""
    source, made = HERE / "kernels.cpp", folder / "kernels.so"
    if made.exists() and made.stat().st_mtime > source.stat().st_mtime:
        return
    include, torch = f"{folder}/torch/include", f"{folder}/torch/lib"
    run(
        f"g++ -std=c++20 -O1 -fPIC -shared -w {source} -o {made} -I{include} -I{include}/torch/csrc/api/include "
        f"-I{folder}/nvidia/cu13/include -L{torch} -l:libtorch_cpu.so -l:libtorch_cuda.so -l:libc10.so "
        f"-l:libc10_cuda.so -L{lib} -l:{NAMES[0]} -Wl,--allow-shlib-undefined"
    )


def interpreter(folder: Path) -> None:
    """Create a Python that loads the libraries first, with this one's packages on its path."""
    venv.create(folder, with_pip=False)
    (folder / "emulated_cuda.py").write_text(STARTUP.format(names=(*NAMES, "libnccl.so.2")))
    information = folder / "emulated_cuda-0.dist-info"
    information.mkdir(exist_ok=True)
    for name, text in INFORMATION.items():
        (information / name).write_text(text)
    (site,) = folder.glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    (site / "emulated.pth").write_text(
        f"{folder}\nimport emulated_cuda\nimport site; site.addsitedir({here!r})\n"
    )


def main(folder: Path) -> None:
    """Download missing files, and compile."""
    fetched(
        folder, lambda name: not name.startswith("nvidia/cu13/lib/")
    )  # NVIDIA's would be found before ours
    lib = folder / "nvidia/cu13/lib"
    lib.mkdir(parents=True, exist_ok=True)
    cuda(folder, lib)
    nccl(folder, lib)
    kernels(folder, lib)
    interpreter(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
