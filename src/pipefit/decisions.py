"""Decisions about the memory of a stage: which runs of layers are recomputed, and what is moved away, and where to.

A decision is for a share of the microbatches, and says how far ahead of its use the memory comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from pipefit.errors import UsageError
from pipefit.places import Place
from pipefit.validation import check_types

StateKind = Literal["parameters", "gradients", "optimizer", "versions"]


class What(StrEnum):
    """What a decision does to its subject."""

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Layers `start` to `stop - 1`, a part of a stage or all of it.

    Raises:
        UsageError: no layers.
    """

    __pydantic_config__ = {"extra": "forbid"}

    start: int
    stop: int

    def __post_init__(self) -> None:
        check_types(self)
        _check_layers("a run holds", self.start, self.stop)

    def __str__(self) -> str:
        return f"layer {self.start}" if self.stop == self.start + 1 else f"layers {self.start} to {self.stop - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """Saved tensors that move together, each named by its layer and its number there. Their storages are moved.

    Raises:
        UsageError: no tensors.
    """

    __pydantic_config__ = {"extra": "forbid"}

    tensors: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        check_types(self)
        if not self.tensors:
            raise UsageError("a decision about saved tensors names at least one, such as layer 5 and its number 3")

    def __str__(self) -> str:
        return "saved " + ", ".join(f"{layer}.{index}" for layer, index in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of layers `start` to `stop - 1`, whatever the microbatch: parameters, gradients, optimizer or versions.

    Raises:
        UsageError: no layers.
    """

    __pydantic_config__ = {"extra": "forbid"}

    start: int
    stop: int
    kind: StateKind

    def __post_init__(self) -> None:
        check_types(self)
        _check_layers("a state is of", self.start, self.stop)

    def __str__(self) -> str:
        return f"{self.kind} of layers {self.start} to {self.stop - 1}"


def _check_layers(what: str, start: int, stop: int) -> None:
    if not 0 <= start < stop:
        raise UsageError(f"{what} at least one layer, not layers {start} to {stop - 1}")


class Microbatches(NamedTuple):
    """The microbatches that a decision is for: `taken` of every `every`, from number `first` on.

    Microbatch m is one of them if (m - first) modulo `every` is less than `taken`. So a decision has the same meaning
    for any number of microbatches, and for schedules without end.
    """

    taken: int = 1
    every: int = 1
    first: int = 0

    def __contains__(self, microbatch: object) -> bool:
        assert isinstance(microbatch, int)
        return (microbatch - self.first) % self.every < self.taken


ALL_MICROBATCHES = Microbatches()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done with a part of a stage's memory instead of keeping it.

    A run of layers can be recomputed: its forward keeps only its inputs, and runs again before its backward. Saved
    tensors or a state can be offloaded to `place`. `ahead` is how many forwards and backwards of the device lie between
    the start of the recomputation or reload and the backward that needs it; with 0 it comes directly before. `behind`
    is how many lie between the start of an offload and its join, which frees the device's copy.

    Raises:
        UsageError: the subject cannot be recomputed or offloaded, or there is a place where none belongs.
    """

    __pydantic_config__ = {"extra": "forbid"}

    stage: int
    subject: Run | SavedTensors | State
    what: What
    microbatches: Microbatches = ALL_MICROBATCHES
    place: Place | None = None
    ahead: int = 0
    behind: int = 1
    why: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.subject, Run) != (self.what is What.RECOMPUTE):
            raise UsageError(f"{self}: runs of layers are recomputed, saved tensors and states are offloaded")
        if (self.place is None) != (self.what is What.RECOMPUTE):
            raise UsageError(f"{self}: what is offloaded needs a place to go to, what is recomputed has none")
        if self.ahead < 0 or self.behind < 0:
            raise UsageError(
                f"{self}: ahead and behind are numbers of actions, zero or more, not {self.ahead} and {self.behind}"
            )
        taken, every, _ = self.microbatches
        if not 0 < taken <= every:
            raise UsageError(f"{self}: it takes {taken} of every {every} microbatches; take 1 or more, up to {every}")

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that the subject names: of a run or a state, the first and the last."""
        subject = self.subject
        if isinstance(subject, SavedTensors):
            return tuple(layer for layer, _ in subject.tensors)
        return subject.start, subject.stop - 1

    def __str__(self) -> str:
        where = "" if self.place is None else f" to {self.place}"
        return f"stage {self.stage}: {self.what.value} {self.subject}{where}"
