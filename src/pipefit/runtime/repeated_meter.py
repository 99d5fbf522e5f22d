"""The memory of a device on which some layers stand for others that are equal to them (`pipefit.runtime.repeated`).

A storage belongs to the layers that were at work when it was made. Layers are at work from the first operation on one
of their parameters or buffers to the first on those of other layers. What passes in between, in a forward, a backward
or an update, is the same for all layers of a repeat but its ends. The two that are executed between the ends have to
agree on every passage and on all they hold. If they do not, or if an operation works on the whole repeat at once, the
layers are not `alike`, and the dry run is made again with all of them. A passage that stands for several is repeated as
many times: where that leads, and how high it goes, is arithmetic.

Costs a few microseconds an operation more than `Meter`, and nothing where no layers are repeated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.capture.constants import constants
from pipefit.capture.storages import storage_key
from pipefit.meter.cpu import SCALAR_BYTES, Meter, Tracked
from pipefit.meter.kernels import Kernels
from pipefit.runtime.folding import Bytes, Change
from pipefit.runtime.master_weights import copies_of
from pipefit.runtime.repeated import KEPT, Copy
from pipefit.runtime.stage import StageRunner
from pipefit.trace import CATEGORIES, Category, MemorySample

NEXT_STEP = "the next step"  # what begins, by its name, behind the last action of a step
_ACTIVATIONS = CATEGORIES.index(Category.ACTIVATIONS)
_TWIN, _STAND_IN = 1, 2  # the numbers of the executions between the ends of a repeat
_SWEEPS = ([0, 1, 2, 3], [3, 2, 1, 0])


class Passage(NamedTuple):
    """What happened while the layers of `copy` were at work: at its peak, and until the next ones were."""

    copy: Copy | None
    at_peak: Bytes
    after: Bytes


class RepeatedMeter(Meter):  # type: ignore[no-untyped-call]
    """A meter of the whole device, though not all of its layers are executed.

    `alike` turns False where layers turn out to differ: then nothing that the meter tells is valid.

    Args:
        swept: for the text of an action, the repeats that it must pass through.
        place: where the device's tensors are.
    """

    def __init__(
        self,
        device: int,
        *,
        kernels: Kernels | None,
        swept: Mapping[str, frozenset[int]],
        place: torch.device | None = None,
    ) -> None:
        super().__init__(device, kernels=kernels, place=place)
        self.alike = True
        self._swept = swept
        self._own: dict[int, Copy | None] = {}  # by storage: parameters, buffers and master weights
        self._maker: dict[int, Copy | None] = {}  # by storage: which layers were at work
        self._numbers = Counter[Copy | None]()  # that autograd keeps, by the layers that were at work
        self._stand_ins: set[Copy] = set()
        self._at_work: Copy | None = None
        self._passages: list[Passage] = []
        self._from: Bytes = tuple(self.bytes)
        self._began: list[Bytes] = []
        self._peaks: list[Bytes] = []

    def own_layers(self, stage: StageRunner, copies: Sequence[Copy | None]) -> None:
        """Take note of what the layers of a stage, each of one of `copies`, hold from the start."""
        masters, state = copies_of(stage.optimizer), stage.optimizer.state if stage.optimizer is not None else {}
        born: dict[int, Copy | None] = {}
        for number, (layer, copy) in enumerate(zip(stage.layers, copies, strict=True), start=stage.start):
            if copy is not None:
                parameters = list(layer.module.parameters())
                _take(copy, [one.tensor for _, one in stage.copies.of(number)], self._own)
                trained = [masters.get(parameter, parameter) for parameter in parameters]
                held = [*layer.module.buffers(), *constants(layer.module)]
                _take(copy, [*parameters, *held, *trained], self._own)
                _take(copy, [state[parameter] for parameter in trained if parameter in state], born)
        self._maker |= self._own | born
        self._stand_ins |= {copy for copy in copies if copy is not None and copy.number == _STAND_IN}

    @property
    def level(self) -> Bytes:
        """The bytes of every category now, in the whole device."""
        held: defaultdict[Copy, list[int]] = defaultdict(lambda: [0] * len(CATEGORIES))
        for key, tracked in self._live.items() if self._stand_ins else ():
            copy = self._maker.get(key)
            if copy is not None:
                held[copy][tracked.category] += tracked.nbytes
        for copy, count in self._numbers.items():
            if copy is not None:
                held[copy][_ACTIVATIONS] += SCALAR_BYTES * count
        found: Bytes = tuple(self.bytes)
        for copy in self._stand_ins:
            self.alike &= held[copy] == held[Copy(copy.repeat, _TWIN, 1)]
            found = _plus(found, held[copy], copy.times - 1)
        return found

    def changes(self) -> list[Change]:
        """What every action since the last call did to the whole device."""
        self.begin(NEXT_STEP)
        began, peaks = self._began, self._peaks
        self._began, self._peaks = [], []
        return [
            Change(_plus(peak, before, -1), _plus(after, before, -1))
            for peak, (before, after) in zip(peaks, pairwise(began), strict=True)
        ]

    # ---------------------------------------------------------------- what a meter does

    def begin(self, action: str) -> None:
        super().begin(action)
        self._at_work, self._passages = None, []
        self._from = tuple(self.bytes)
        self._began.append(self.level)

    def end(self, step: int, seconds: float, category: Category = Category.TEMPORARY) -> MemorySample:
        self._pass_on(None)
        self.alike &= self._whole_sweeps()
        peak: Any = self._highest(self._began[-1])
        self._peaks.append(peak)
        return replace(super().end(step, seconds, category), bytes=peak)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._stand_ins:
            return super().operation(func, args, kwargs)
        storages = storages_in((args, kwargs))
        owners = {copy for key in storages if (copy := self._own.get(key)) is not None}
        if len(owners) == 1 and (owner := owners.pop()) != self._at_work:
            if self._spent:
                self._release_scalars()
            self._pass_on(owner)
        known = (len(self._born), self._peak)
        out = super().operation(func, args, kwargs)
        if known != (len(self._born), self._peak):
            makers = Counter(copy.repeat for copy in {self._maker.get(key) for key in storages} if copy is not None)
            self.alike &= len(owners) <= 1 and max(makers.values(), default=0) < KEPT
        return out

    def _track(self, tensor: Tensor) -> Tracked:
        key = storage_key(tensor)
        if key not in self._live:
            self._maker[key] = self._at_work
        return super()._track(tensor)

    def _hold_scalars(self, number: int) -> None:
        self._numbers[self._at_work] += number
        super()._hold_scalars(number)

    # ---------------------------------------------------------------- passages

    def _pass_on(self, copy: Copy | None) -> None:
        """The layers of `copy` are at work from now on."""
        now = tuple(self.bytes)
        at_peak, after = _plus(tuple(self._peak_bytes), self._from, -1), _plus(now, self._from, -1)
        self._passages.append(Passage(self._at_work, at_peak, after))
        self._at_work, self._from = copy, now
        self._peak, self._peak_bytes = self.total, list(self.bytes)

    def _whole_sweeps(self) -> bool:
        """Whether the action passed through every repeat that it should from one end to the other, evenly."""
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for copy, _, _ in self._passages:
            if copy is not None:
                numbers[copy.repeat].append(copy.number)
        whole = all(
            found[place : place + 4] in _SWEEPS for found in numbers.values() for place in range(0, len(found), 4)
        )
        return whole and self._swept.get(self.action, frozenset()) <= set(numbers) and self._even()

    def _even(self) -> bool:
        """Whether every passage that stands for several is equal to the one next to it, on the side of its twin."""
        for before, here, behind in zip(self._passages, self._passages[1:], self._passages[2:], strict=False):
            if here.copy is not None and here.copy.number == _STAND_IN:
                twin = Passage(Copy(here.copy.repeat, _TWIN, 1), here.at_peak, here.after)
                if twin not in (before, behind):
                    return False
        return True

    def _highest(self, level: Bytes) -> Bytes:
        """The peak in the whole device of an action that began at `level`. Where a passage is repeated, the last or the
        first is highest.
        """
        highest = level
        for copy, at_peak, after in self._passages:
            times = 1 if copy is None else copy.times
            top = _plus(_plus(level, after, times - 1) if sum(after) > 0 else level, at_peak)
            highest = max(highest, top, key=sum)
            level = _plus(level, after, times)
        return highest


def _take(copy: Copy, tensors: Sequence[Any], owners: dict[int, Copy | None]) -> None:
    """Enter `copy` as the owner of these tensors' storages. A buffer that all layers share belongs to none."""
    for key in storages_in(tensors):
        owners[key] = copy if owners.get(key, copy) == copy else None


def storages_in(item: Any) -> set[int]:
    """The storages of all tensors in the arguments of an operation, lists and dictionaries of them."""
    if isinstance(item, Tensor):
        return {storage_key(item)}
    if isinstance(item, dict):
        return storages_in(list(item.values()))
    return set().union(*map(storages_in, item)) if isinstance(item, (tuple, list)) else set()


def _plus(one: Bytes, other: Iterable[int], times: int = 1) -> Bytes:
    return tuple(a + times * b for a, b in zip(one, other, strict=True))
