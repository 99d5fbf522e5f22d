"""Which of the values between two layers share memory, so that a layer that works in place on one changes another.

Where a stage ends between the two layers, each value is sent by itself, and the other would not change. So such a layer
is refused wherever stages end: a plan never changes the numbers. Traced models are not cut between such layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import NoReturn

from pipefit.errors import UsageError
from pipefit.layer_costs import Origin

_FIXED = -1  # the memory of parameters, buffers and constants


class ValueMemory:
    """The memory of the values before a layer: numbers, equal for values that share it. A model's inputs share none."""

    def __init__(self) -> None:
        self._new = count()
        self._before: list[int] | None = None  # None before the first layer

    def check(self, changed: Iterable[int], what: str) -> None:
        """Check that a layer which works in place on inputs `changed` changes these alone.

        Raises:
            UsageError: such an input shares its memory with another one, or with a parameter or buffer.
        """
        before = self._before or []
        for number in changed:
            mine = before[number] if number < len(before) else None
            if mine == _FIXED:
                _refuse(what, number, "with a parameter or buffer of an earlier layer, which would change with it")
            others = [other for other, memory in enumerate(before) if memory == mine and other != number]
            if others:
                _refuse(what, number, f"with input {others[0]}, which would not change with it on another device")

    def go_on(self, origins: Sequence[Origin]) -> None:
        """The next values are those that a layer returns, with storages of these origins."""
        inputs = [o.index for o in origins if o.kind == "input"]
        before = self._before or [next(self._new) for _ in range(max(inputs, default=-1) + 1)]
        own = {o.index: next(self._new) for o in origins if o.kind == "own"}
        self._before = [
            own[o.index] if o.kind == "own" else before[o.index] if o.kind == "input" else _FIXED for o in origins
        ]


def _refuse(what: str, number: int, reason: str) -> NoReturn:
    raise UsageError(
        f"{what} changes its input {number} in place, and that shares memory {reason}: return a clone() of it from the "
        "layer before, or leave the change in place out"
    )
