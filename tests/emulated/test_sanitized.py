"""Streams do not touch memory that another one still uses, according to torch's sanitizer. Skipped without
the emulated CUDA.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EMULATED = torch.cuda.is_available() and torch.cuda.get_device_name(0).startswith("Emulated")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not EMULATED, reason="needs the emulated CUDA (make cuda)")]
SCRIPT = Path(__file__).with_name("sanitized.py")


@pytest.mark.parametrize("options", [[], ["unjoined"]])
def test_what_moves_is_ordered_by_its_joins(options: list[str]) -> None:
    """Tensors and state of three stages in one process, on three devices, are ordered; without the joins the
    sanitizer reports it.
    """
    ended = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    accesses, unordered = map(int, ended.stdout.split())
    assert accesses > 1000
    assert (unordered > 0) == bool(options)
