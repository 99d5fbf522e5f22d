"""Real text on every machine: the sources of Python's standard library, byte by byte, for a small GPT.

About a million bytes of its larger modules. A model without knowledge has a loss of ln 256 = 5.5 nats per
byte; one that knows the frequency of each byte, about 3.2.
"""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.models.gpt import gpt
from pipefit.models.settings import Depth, OptimizerName, Rate, Share, Size, checked

_BYTES = 256
_LARGEST_MODULES = 24


@checked
def gpt_stdlib(
    *,
    layers: Depth = 8,
    hidden: Size = 128,
    heads: Size = 4,
    sequence: Size = 128,
    dropout: Share = 0.0,
    optimizer: OptimizerName = "adamw",
    lr: Rate | None = 2e-3,
) -> Task:
    """A byte-level GPT that learns Python's standard library: bytes (batch, sequence) and, for each, the next one.

    Raises:
        UsageError: a setting has a wrong value, or this Python lacks library sources.
    """
    task = gpt(
        layers=layers, hidden=hidden, heads=heads, vocabulary=_BYTES, sequence=sequence, dropout=dropout,
        optimizer=optimizer, lr=lr,
    )  # fmt: skip
    return replace(task, batch=partial(_batch, sequence=sequence), name="gpt-stdlib")


def _batch(size: int, *, sequence: int) -> tuple[Tensor, Tensor]:
    """Return windows of the text at random places."""
    text = _text()
    starts = torch.randint(0, len(text) - sequence - 1, (size, 1))
    windows = text[starts + torch.arange(sequence + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@cache
def _text() -> Tensor:
    """Return the largest modules of the library, largest first, as bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = sorted(library.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))[:_LARGEST_MODULES]
    if not modules:
        raise UsageError(f"this Python has no sources in {library}: use zoo:gpt, which makes its data up")
    text = b"".join(path.read_bytes() for path in modules)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
