"""Commands with Linux features removed, as far as that can be simulated.

    python missing_linux.py win32 "plan zoo:mlp --cluster 2x-rtx-3090 --batch-size 8" "train plan.json zoo:mlp"

pipefit's dependencies are imported first, because they would take another path there. An exit code follows
each line.
"""

from __future__ import annotations

import importlib.abc
import multiprocessing.context
import multiprocessing.reduction
import os
import signal
import sys
from importlib import import_module

STANDS_ON = (
    *(
        "multiprocessing.connection",
        "subprocess",
        "numpy",
        "pydantic",
        "rich.progress",
        "safetensors",
        "scipy.optimize",
    ),
    *("torch._dynamo", "torch.distributed", "torch.export", "typer.main"),
)
LINUX = ("memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fadvise", "O_DIRECT")
POSIX = {
    os: (
        *(
            "fork",
            "pread",
            "preadv",
            "pwrite",
            "pwritev",
            "posix_spawn",
            "sysconf",
            "statvfs",
            "getuid",
            "geteuid",
        ),
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "killpg", "getpgid", "WNOHANG", "register_at_fork"),
    ),
    signal: ("SIGHUP", "SIGQUIT", "SIGKILL", "SIGUSR1", "SIGCHLD", "SIGALRM", "SIGPIPE", "pthread_sigmask"),
    multiprocessing.context: ("ForkServerContext", "ForkContext"),
    multiprocessing.reduction: ("DupFd",),
}
MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "_posixsubprocess")


class Missing(importlib.abc.MetaPathFinder):
    """Finder that hides modules missing on the system."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Fail for these names."""
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def become(system: str) -> None:
    """Remove the features that `system`, darwin or win32, lacks."""
    for name in STANDS_ON:
        import_module(name)
    gone = {os: LINUX} if system == "darwin" else {**POSIX, os: (*LINUX, *POSIX[os])}
    for module, names in gone.items():
        for name in names:
            vars(module).pop(name, None)
    if system == "win32":
        sys.meta_path.insert(0, Missing())
        for name in MODULES:
            sys.modules.pop(name, None)
    sys.platform = system


if __name__ == "__main__":
    become(sys.argv[1])
    from pipefit.cli import main

    for line in sys.argv[2:]:
        print(f"-> {main(line.split())}", flush=True)
