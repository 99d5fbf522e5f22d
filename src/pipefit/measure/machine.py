"""The processor of this machine, and other facts on which the memory of its kernels may depend.

torch and oneDNN choose kernels by the processor's instructions and the environment variables that limit them,
and block sizes by its caches. These facts are not interpreted here: measurements of one machine are used on
another only if all facts are equal.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

# ---- The number of CPU threads during a measurement for a worker


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Let torch's kernels use `count` threads in the body."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- The machine

_CHOOSING = (
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "MKLDNN_",
    "TORCH_MKLDNN_",
)  # variables that affect the choice of kernels
_FACTS = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
_SYSTEM = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts on which the memory of kernels depends, in addition to the operation."""

    cpu: str  # name of the processor, with the sizes of its caches
    capability: str  # widest instructions that torch uses, and the environment variables that limit them
    details: str  # digest of all facts that the system reports about the processor
    torch: str
    threads: int


def this_machine(threads: int) -> Machine:
    """Return the machine that runs this, with kernels on `threads` threads."""
    cpu, details = _processor()
    return Machine(
        cpu=cpu, capability=_capability(), details=details, torch=torch.__version__, threads=threads
    )


def flags() -> str:
    """Return settings that kernels depend on, as a prefix of an operation's text; empty by default."""
    result = []
    if torch.are_deterministic_algorithms_enabled() or torch.backends.mkldnn.deterministic:
        result.append("deterministic")
    if not torch.backends.mkldnn.enabled:
        result.append("without oneDNN")
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        result.append(f"{precision} precision")
    return "".join(f"{flag}: " for flag in result)


@cache
def _capability() -> str:
    """Return the processor capability that torch uses. Cached, because libraries read the environment
    once.
    """
    said = (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_CHOOSING))
    return " ".join(
        (torch.backends.cpu.get_cpu_capability(), *(word for word in said if "VERBOSE" not in word))
    )


@cache
def _processor() -> tuple[str, str]:
    """Return the processor's name with its caches, and a digest of all facts."""
    facts = _facts()
    caches = [_read(index / "size") for index in sorted(_SYSTEM.glob("index*"))]
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = "/".join(facts[key] for key in ("cpu family", "model", "stepping") if key in facts)
    known = ", ".join(filter(None, (numbers, " ".join(caches))))
    digest = hashlib.sha256(repr((platform.machine(), sorted(facts.items()), caches)).encode()).hexdigest()
    return f"{name} ({known})" if known else name, digest[:16]


def _facts() -> dict[str, str]:
    """Return what Linux reports about the first processor; empty on other systems."""
    first = _read(Path("/proc/cpuinfo")).partition("\n\n")[0]
    pairs = re.findall(r"^([^\t:]+)\t*: ?(.*)$", first, re.MULTILINE)
    return {name: value for name, value in pairs if name in _FACTS}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
