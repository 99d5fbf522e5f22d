"""Profiles of a model at rising values of a setting that may say how many equal blocks it has.

Every value is traced until two of them have shown different numbers of layers. Then three small neighbours are, and
profiles of larger values are written from these (`pipefit.profiler.repetition`), as long as that says what traces say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from pipefit.errors import UsageError
from pipefit.fake_cuda.chain import Chains
from pipefit.profiler.on_demand import OnDemand
from pipefit.profiler.repetition import NotRepeated, Repeated, same_costs
from pipefit.schema.plan import Plan

_FIRST = 1  # of the three neighbours: a single block is both the first and the last


class Depths:
    """The profiles of the `values` of a setting, each of which `trace` makes; some are written instead. `trace_at`
    traces a value for microbatches of some sizes alone.
    """

    def __init__(
        self, values: range, trace: Callable[[int], OnDemand], trace_at: Callable[[int, Sequence[int]], OnDemand]
    ) -> None:
        self._values, self._trace, self._trace_at = values, trace, trace_at
        self._writes = len(values) > _FIRST + 3
        self._layers = set[int]()  # how many layers values have that were traced
        self._neighbours: tuple[OnDemand, ...] = ()

    def profiles(self, value: int) -> OnDemand | Repeated:
        """The profiles of a value, traced or written.

        Raises:
            UsageError: the model refuses the value.
        """
        place = self._values.index(value)
        self._trace_at(value, ())  # settings that the model refuses are refused
        if self._writes and place >= _FIRST + 3 and len(self._layers) > 1:
            with suppress(UsageError, NotRepeated):
                self._neighbours = self._neighbours or tuple(map(self._trace, self._values[_FIRST : _FIRST + 3]))
                written = Repeated(self._neighbours, place - _FIRST)
                written(min(written.sizes, default=1))
                return written
            self.trace_all()
        traced = self._trace(value)
        self._layers.add(len(traced(min(traced.sizes, default=1)).layers))
        return traced

    def trace_all(self) -> None:
        """Write no profile from now on."""
        self._writes, self._neighbours = False, ()

    def as_traced(self, value: int, plan: Plan) -> tuple[Plan, Chains] | None:
        """The plan of a value with its traced profile in place of a written one, and the chains of the trace; None
        where the two profiles differ.
        """
        made = plan.profile
        try:
            known = self._trace_at(value, sorted({measured.microbatch_size for measured in made.measurements}))
            every = [known(m.microbatch_size, (m.tensor,), sequences=m.sequences) for m in made.measurements]
        except UsageError:
            return None
        measurements = tuple(
            one.at(*m.way[:2], sequences=m.sequences) for one, m in zip(every, made.measurements, strict=True)
        )
        profile = replace(every[0], measurements=measurements, kernels=made.kernels)
        return (replace(plan, profile=profile), known.chains) if same_costs(profile, made) else None
