"""`pipefit doctor`: the resources of this machine, and what pipefit can do on it."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipefit.cli.options import Json
from pipefit.cli.output import on_stderr
from pipefit.cli.progress import progress
from pipefit.errors import first_line
from pipefit.tables import Table, write
from pipefit.units import format_bytes

_PACKAGES = ("pipefit", "torch", "numpy", "scipy", "pydantic", "typer", "rich", "safetensors")

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only looked at
EXAMPLE = "pipefit doctor"


def command(as_json: Json = False) -> None:
    """Show what pipefit can do on this machine."""
    with progress("checking this machine"):
        result = examine()
    if as_json:
        print(json.dumps(result))
        return

    rows = tuple(
        (name.removesuffix("_bytes").replace("_", " "), _shown(value))
        for name, value in result.items()
        if name not in ("abilities", "packages")
    )
    packages = tuple((name, number or "missing") for name, number in result["packages"].items())
    abilities = "\n".join(f"{'yes' if able else 'no '}  {what}" for what, able in result["abilities"].items())
    write(
        [
            Table(("machine", ""), rows),
            Table(("package", "version"), packages),
            f"pipefit can do here:\n{abilities}",
        ]
    )


def examine() -> dict[str, Any]:
    """Return everything that the command prints, as plain data; sizes in bytes."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "shared_memory_bytes": _or_none(lambda: shutil.disk_usage(_SHARED_MEMORY).free),
        "open_files": _limit("RLIMIT_NOFILE"),
        "locked_memory_bytes": _limit("RLIMIT_MEMLOCK"),
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    facts |= _torch_facts()
    facts["abilities"] = dict(_abilities(facts))
    return facts


def _abilities(facts: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the abilities that the facts allow."""
    has_torch = facts["torch"] is not None
    gpus = len(facts["gpus"])
    yield "plan, simulate, show and compare", True
    yield "profile and certify on fake tensors, for cpu and cuda", has_torch
    yield "train on emulated devices, by worker processes", facts["gloo"] and hasattr(os, "memfd_create")
    yield f"train on {gpus or 'CUDA'} GPUs" if gpus != 1 else "train on 1 GPU", gpus > 0 and facts["nccl"]


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError) as error:
        on_stderr(f"pipefit: torch cannot be imported: {error}")
        return {"torch": None, "threads": None, "gpus": [], "gloo": False, "nccl": False}
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpus": _gpus(torch.cuda),
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
        "nccl": distributed.is_available() and distributed.is_nccl_available(),
    }


def _gpus(cuda: Any) -> list[dict[str, Any]]:
    """Return the GPUs that torch can use; none, with a message, if their driver is too old or broken."""
    try:
        result = [cuda.get_device_properties(number) for number in range(cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        on_stderr(f"pipefit: GPUs cannot be used: {first_line(error)}")
        return []
    return [{"name": one.name, "memory_bytes": one.total_memory} for one in result]


def _memory_bytes() -> int | None:
    """Return the machine's memory, or its container's limit."""
    machine = _or_none(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    container = _or_none(lambda: int(Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" means no limit
    return min((nbytes for nbytes in (machine, container) if nbytes is not None), default=None)


def _limit(name: str) -> int | None:
    """Return the soft limit of this name; None if there is none."""

    def ask() -> int | None:
        import resource

        soft = resource.getrlimit(getattr(resource, name))[0]
        return None if soft == resource.RLIM_INFINITY else int(soft)

    return _or_none(ask)


def _or_none(ask: Callable[[], int | None]) -> int | None:
    """Return the result of a query, or None on systems that do not support it."""
    try:
        return ask()
    except (ImportError, AttributeError, OSError, ValueError):
        return None


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # takes 25 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _shown(value: Any) -> str:

    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        alike = Counter(f"{gpu['name']}, {format_bytes(gpu['memory_bytes'])}" for gpu in value)
        return "; ".join(f"{count} x {kind}" for kind, count in alike.items()) or "none"
    if value is None:
        return "no limit, or unknown"
    return format_bytes(value) if isinstance(value, int) and value >= 1 << 20 else str(value)
