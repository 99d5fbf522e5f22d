"""What `x.data` is while a layer runs: the same memory, of which autograd sees the changes.

Whatever is changed by `x.data` as torch has it, autograd does not see. In plain training that does no harm to what was
saved for a backward that is over before the next forward. In a pipeline other forwards come first, and the backward
would compute with their numbers. So such a change counts, and the backward is refused by name
(`runtime.flight.naming_changes`). Costs a microsecond for each call of a layer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

DATA: Any = Tensor.__base__.__dict__["data"]
_TORCH, _LAYERS = str(Path(torch.__file__).parent), str(Path(nn.__file__).parent)


def data_of(tensor: Tensor) -> Tensor:
    """What `tensor.data` is for a model's code: an operation, which a trace sees, and which shares its versions."""
    return tensor.detach() if asked_by_a_model() else DATA.__get__(tensor)


def asked_by_a_model() -> bool:
    """Whether whoever asked for an attribute is a model's code, or a layer of torch.nn, and not torch's machinery."""
    file = sys._getframe(2).f_code.co_filename
    return file.startswith(_LAYERS) or not file.startswith(_TORCH)


class _Seen:
    """A context in which changes by `x.data` are seen; it may be entered again inside, and by other threads."""

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                setattr(Tensor, "data", property(data_of, DATA.__set__))  # noqa: B010 -- a property of torch's own class

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                delattr(Tensor, "data")


SEEN = _Seen()
