"""The gradients that a layer's backward leaves for its inputs: whose storages they live in, and how they lie there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from pipefit.layer_costs import GradientOrigin, Span
from pipefit.meter.cpu import Tracked
from pipefit.profiler.arriving import Layouts
from pipefit.profiler.pass_meter import PassMeter


class Gradients(NamedTuple):
    """The origins of the inputs' gradients, and the bytes of the storages among them that are the layer's own."""

    origins: tuple[GradientOrigin, ...]
    storages: tuple[int, ...]

    def also_as(self, others: Sequence[Gradients]) -> Gradients:
        """What holds here and in all `others`: gradients contiguous in each, storages the largest."""
        alike = [one for one in others if len(one.storages) == len(self.storages)]
        origins = tuple(
            replace(origin, contiguous=all(one.origins[number].contiguous for one in others))
            for number, origin in enumerate(self.origins)
        )
        return Gradients(origins, tuple(map(max, zip(*(one.storages for one in alike), strict=True))))


class BackwardPass(NamedTuple):
    """A first backward and a later one, and the gradients that they leave."""

    first: tuple[Span, ...]
    later: tuple[Span, ...]
    gradients: Gradients
    left: Layouts


def gradients_of(
    meter: PassMeter,
    outgoing: Sequence[Tensor | None],
    given: Sequence[Tracked | None],
    usual: Sequence[GradientOrigin],
) -> Gradients:
    """Whether inputs' gradients are in storages of their own, or in those of the outputs' gradients, `given`.

    Several of these may share a storage; then `usual`, if there are any, tells which of them is passed on.
    """
    own: list[Tracked] = []

    def origin(number: int, gradient: Tensor | None) -> GradientOrigin:
        if gradient is None:
            return GradientOrigin(kind="none")
        (tracked,), contiguous = meter.storages([gradient]), gradient.is_contiguous()
        if usual and usual[number].kind == "output" and given[usual[number].index] is tracked:
            return usual[number]
        if tracked in given:
            return GradientOrigin(kind="output", index=given.index(tracked), contiguous=contiguous)
        if tracked not in own:
            own.append(tracked)
        return GradientOrigin(kind="own", index=own.index(tracked), contiguous=contiguous)

    origins = tuple(origin(number, gradient) for number, gradient in enumerate(outgoing))
    return Gradients(origins, tuple(tracked.nbytes for tracked in own))
