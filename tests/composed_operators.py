"""Operators that torch composes of others wherever a device has no kernel for them, and CUDA has one.

Read from the list of torch's operators, which comes with torchgen, beside torch in its wheel.
"""

from __future__ import annotations

import re
from pathlib import Path

import torchgen

LIST = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
COMPOSED = "CompositeImplicitAutograd"


def with_a_kernel_for_cuda() -> set[str]:
    """Their names, without those of forms that write into an argument."""
    entries = {entry.partition("(")[0]: entry for entry in LIST.read_text().split("\n- func: ")[1:]}
    found = set[str]()
    for name, entry in entries.items():
        delegate = re.search(r"\n  structured_delegate: (\S+)", entry)
        devices = _devices(entry) | (_devices(entries[delegate[1]]) if delegate else set())
        if {COMPOSED, "CUDA"} <= devices:
            found.add(name)
    return found


def _devices(entry: str) -> set[str]:
    """The dispatch keys that have a kernel of an operator."""
    table = re.search(r"\n  dispatch:\n((?:    .*\n)+)", entry)
    lines = table[1].splitlines() if table else []
    return {key.strip() for line in lines for key in line.partition(":")[0].split(",")}
