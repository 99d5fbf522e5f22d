"""Operators that torch composes from others on devices without a kernel for them, and that have a CUDA
kernel.

Source: the list of torch's operators in torchgen, which is part of torch's wheel.
"""

from __future__ import annotations

import re
from pathlib import Path

import torchgen

LIST = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
COMPOSED = "CompositeImplicitAutograd"


def with_a_kernel_for_cuda() -> set[str]:
    """Return their names, without variants that write into an argument."""
    entries = {entry.partition("(")[0]: entry for entry in LIST.read_text().split("\n- func: ")[1:]}
    found = set[str]()
    for name, entry in entries.items():
        delegate = re.search(r"\n  structured_delegate: (\S+)", entry)
        devices = _devices(entry) | (_devices(entries[delegate[1]]) if delegate else set())
        if {COMPOSED, "CUDA"} <= devices:
            found.add(name)
    return found


def _devices(entry: str) -> set[str]:
    """Return the dispatch keys that have a kernel of an operator."""
    table = re.search(r"\n  dispatch:\n((?:    .*\n)+)", entry)
    lines = table[1].splitlines() if table else []
    return {key.strip() for line in lines for key in line.partition(":")[0].split(",")}
