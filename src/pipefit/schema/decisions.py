"""Decisions about the memory of a stage: recomputation, offloading with its target, and updates on a host.

A decision applies to a share of the microbatches, and says how long before its use the memory returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from pipefit.errors import UsageError
from pipefit.schema.devices import MemberKind, Place
from pipefit.schema.validation import check_types
from pipefit.texts import layers_text

StateKind = Literal["parameters", "gradients", "optimizer", "versions"]


class What(StrEnum):
    """The technique that a decision applies to its subject."""

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    UPDATE = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Layers `start` to `stop - 1`, all or a part of a stage.

    Raises:
        UsageError: no layers.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        check_types(self)
        _check_layers("a run holds", self.start, self.stop)

    def __str__(self) -> str:
        return layers_text(self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """Saved tensors that are offloaded together with their storages.

    A tensor is a pair of its layer and its number in the layer.

    Raises:
        UsageError: no tensors.
    """

    tensors: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        check_types(self)
        if not self.tensors:
            raise UsageError(
                "a decision about saved tensors must name at least one tensor by layer and number, such as "
                "layer 5 and number 3"
            )

    def __str__(self) -> str:
        return "saved " + ", ".join(f"{layer}.{index}" for layer, index in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state of layers `start` to `stop - 1`: parameters, gradients, optimizer or versions.

    Raises:
        UsageError: no layers.
    """

    start: int
    stop: int
    kind: StateKind

    def __post_init__(self) -> None:
        check_types(self)
        _check_layers("a state is of", self.start, self.stop)

    def __str__(self) -> str:
        return f"{self.kind} of {layers_text(self.start, self.stop)}"


def _check_layers(what: str, start: int, stop: int) -> None:
    if not 0 <= start < stop:
        raise UsageError(f"{what} at least one layer, not layers {start} to {stop - 1}")


class Microbatches(NamedTuple):
    """The microbatches of a decision: `taken` of every `every`, from number `first` on.

    Microbatch m is included if (m - first) modulo `every` is less than `taken`. Thus a decision has the same
    meaning for any number of microbatches, and for asynchronous schedules.
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
    """A technique applied to a part of a stage's memory instead of keeping that part on the device.

    A run of layers can be recomputed: its forward keeps only its inputs, and runs again before its backward.
    Saved tensors or a state can be offloaded to `place`. `ahead` counts the forwards and backwards of the
    device between the start of the recomputation or reload and the backward that needs it; 0 means directly
    before. `behind` counts those between the start of an offload and its join, which frees the device's copy.
    For states, every piece of a forward or backward and the update of every run of layers count; for
    optimizer state, only updates count.

    Layers can also be updated at `place`, a host: their optimizer state is never on the device, gradients are
    sent to the host, and new parameters return.

    Raises:
        UsageError: the technique does not suit the subject, a place is missing or superfluous, or a state
            would be moved for
        some microbatches only.
    """

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
            raise UsageError(
                f"{self}: only runs of layers can be recomputed, and only saved tensors and "
                "states can be offloaded"
            )
        if self.what is What.UPDATE and not (
            isinstance(self.subject, State) and self.subject.kind == "optimizer"
        ):
            raise UsageError(
                f"{self}: only an optimizer's state can be updated at a place, and it stays there: write "
                "State(start, stop, kind='optimizer')"
            )
        if (self.place is None) != (self.what is What.RECOMPUTE):
            raise UsageError(f"{self}: offloading needs a place, and recomputation does not take one")
        if self.what is What.UPDATE and [member.kind for member, _ in self.place or ()] != [MemberKind.HOST]:
            raise UsageError(f"{self}: an update runs on one host, such as host or host1")
        if self.ahead < 0 or self.behind < 0:
            raise UsageError(
                f"{self}: ahead and behind are numbers of actions, zero or more, not {self.ahead} and "
                f"{self.behind}"
            )
        taken, every, _ = self.microbatches
        if not 0 < taken <= every:
            raise UsageError(
                f"{self}: it applies to {taken} of every {every} microbatches, but must apply to 1 to {every}"
            )
        whole = isinstance(self.subject, State) and self.subject.kind != "versions"
        if whole and self.microbatches != ALL_MICROBATCHES:
            raise UsageError(f"{self}: all microbatches share this state: omit `microbatches`")

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of saved tensors, or the first and the last layer of a run or a state."""
        subject = self.subject
        if isinstance(subject, SavedTensors):
            return tuple(layer for layer, _ in subject.tensors)
        return subject.start, subject.stop - 1

    def __str__(self) -> str:
        where = "" if self.place is None else f" {'on' if self.what is What.UPDATE else 'to'} {self.place}"
        return f"stage {self.stage}: {self.what.value} {self.subject}{where}"
