"""The processor of this machine, and what else the memory of its kernels may depend on.

torch and oneDNN choose kernels by the instructions that the processor has and that environment variables allow, and the
sizes of blocks by its caches. Nothing of this is interpreted here: what was measured on one machine is used on another
only if all of it is equal.
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

# ----------------------------------------------------------------------------------------------------
# The number of CPU threads, set for as long as something is measured that a worker will run with that number.


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Inside, torch's kernels use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------

_CHOOSING = ("ATEN_", "ONEDNN_", "DNNL_", "MKLDNN_", "TORCH_MKLDNN_")  # variables that libraries choose kernels by
_FACTS = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
_SYSTEM = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the memory of kernels depends on besides the operation itself."""

    cpu: str  # its name, with the sizes of its caches
    capability: str  # the widest instructions that torch uses, and the environment variables that limit them
    details: str  # a digest of all that the system says about the processor
    torch: str
    threads: int


def this_machine(threads: int) -> Machine:
    """The machine that runs this, with kernels on so many threads."""
    cpu, details = _processor()
    return Machine(cpu=cpu, capability=_capability(), details=details, torch=torch.__version__, threads=threads)


def flags() -> str:
    """The settings of this process that kernels depend on, as a prefix of an operation's text; empty by default."""
    found = []
    if torch.are_deterministic_algorithms_enabled() or torch.backends.mkldnn.deterministic:
        found.append("deterministic")
    if not torch.backends.mkldnn.enabled:
        found.append("without oneDNN")
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        found.append(f"{precision} precision")
    return "".join(f"{flag}: " for flag in found)


@cache
def _capability() -> str:
    """Read once, because the libraries read the environment once."""
    said = (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_CHOOSING))
    return " ".join((torch.backends.cpu.get_cpu_capability(), *(word for word in said if "VERBOSE" not in word)))


@cache
def _processor() -> tuple[str, str]:
    """The processor's name with its caches, and a digest of all facts."""
    facts = _facts()
    caches = [_read(index / "size") for index in sorted(_SYSTEM.glob("index*"))]
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = "/".join(facts[key] for key in ("cpu family", "model", "stepping") if key in facts)
    known = ", ".join(filter(None, (numbers, " ".join(caches))))
    digest = hashlib.sha256(repr((platform.machine(), sorted(facts.items()), caches)).encode()).hexdigest()
    return f"{name} ({known})" if known else name, digest[:16]


def _facts() -> dict[str, str]:
    """What Linux says about the first processor; nothing on other systems."""
    first = _read(Path("/proc/cpuinfo")).partition("\n\n")[0]
    pairs = re.findall(r"^([^\t:]+)\t*: ?(.*)$", first, re.MULTILINE)
    return {name: value for name, value in pairs if name in _FACTS}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
