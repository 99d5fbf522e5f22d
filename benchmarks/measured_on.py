"""What figures were measured with and when, for the JSON beside them. Not a benchmark itself."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch


def machine() -> dict[str, str | int]:
    """The day, the versions, and the machine."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """The name of the CPU where the system tells it, else its architecture."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
