"""Stages of any degrees that run again in part: their tensors move to hosts instead, where that makes steps shorter.

Of such a stage (`planner.mixed`) the tensors of its first blocks move, the fewest with which it fits: those of all that
ran again and as many more as it takes, or those of half of them, and the fewest others run again. A stage's tensors
move together, beside the next forward or backward, and so do those of all its replicas; what their links to the host
carry the simulator says. Stages are tried from the one on which the most blocks run again, each with what was found for
those before.

Costs: log2 of a stage's blocks programs of the stage (`hybrid.reading`) and a simulation for either, within a limit of
work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from pipefit.decisions import Decision, Run, What
from pipefit.errors import UsageError
from pipefit.planner.choices import KEPT, TO_HOST, StageChoice, decisions_of
from pipefit.planner.degrees import Degree
from pipefit.planner.evaluation import HOST
from pipefit.planner.hybrid.reading import Reader
from pipefit.planner.menus import Menus
from pipefit.planner.question import Split
from pipefit.planner.replicas import representative
from pipefit.planner.simulations import Simulations
from pipefit.schedule.room import missing_bytes

_WORK = 60_000  # actions that were read, after which no other stage is tried

Decisions = tuple[Decision, ...]


class Swapped(NamedTuple):
    """Decisions of a plan that fits, with its seconds and its peaks by simulation."""

    decisions: Decisions
    seconds: float
    peaks: tuple[int, ...]  # of every device, in bytes


def swapped(simulations: Simulations, split: Split, best: Swapped) -> Swapped:
    """The plan of a split, or a faster one in which hosts have tensors that it computed again."""
    search = _Search(simulations, split)
    if not simulations.question.means.host:
        return best
    again = {one.stage: search.blocks(one) for one in best.decisions if one.what is What.RECOMPUTE}
    for number in sorted(again, key=lambda number: -again[number]):
        others = tuple(one for one in best.decisions if one.stage != number)
        for own in search.ways(number, again[number]):
            found = search.simulated((*others, *own))
            best = found if found is not None and found.seconds < best.seconds else best
    return best


class _Search:
    """What may be done on the stages of one split."""

    def __init__(self, simulations: Simulations, split: Split) -> None:
        self._simulations, self._question, self._split = simulations, simulations.question, split
        self._reader = Reader(simulations.question)
        self._menus: dict[Degree, Menus] = {}

    def blocks(self, decision: Decision) -> int:
        """How many blocks run again by a decision, from its stage's first on."""
        assert isinstance(decision.subject, Run), "stages run again by runs"
        return self._question.edges.index(decision.subject.stop) - self._split.edges[decision.stage]

    def ways(self, number: int, again: int) -> Iterator[Decisions]:
        """Decisions for a stage that fits with so many of its blocks computed again: all moved, and half of them."""
        count = self._split.edges[number + 1] - self._split.edges[number]
        if self._split.grid(number).shard != "none":
            return
        half = max(1, again // 2)
        ways: list[Callable[[int], Decisions]] = [
            lambda moved: self._decisions(number, moved, moved),
            lambda last: self._decisions(number, half, max(half, last)),
        ]
        for way in ways if again > 1 else ways[:1]:
            if self._reader.actions <= _WORK:
                with suppress(UsageError):
                    found = self._fewest(number, count, way)
                    if found is not None:
                        yield found

    def _fewest(self, number: int, count: int, way: Callable[[int], Decisions]) -> Decisions | None:
        """The decisions for the fewest blocks with which a stage fits, by bisection; None if it does with none."""
        low, high = 0, count  # blocks that are too few, and that are enough
        if not self._fits(number, way(high)):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(number, way(middle)) else (middle, high)
        return way(high)

    def _fits(self, number: int, own: Decisions) -> bool:
        room = min(self._question.cluster.budgets[device] for device in self._split.grid(number).devices)
        (peak,) = self._reader.peaks(self._split, [number], own)
        return peak <= room

    def _decisions(self, number: int, moved: int, last: int) -> Decisions:
        """Those of a stage of which the first blocks' tensors move, and the next ones, up to `last`, run again.

        Raises:
            UsageError: a layer of it can have no replicas.
        """
        start, stop = self._split.edges[number : number + 2]
        grid, edges = self._split.grid(number), self._question.edges
        degree = Degree.of(grid)
        if degree not in self._menus:
            self._menus[degree] = Menus(representative(self._question, degree))
        places = (TO_HOST,) * moved + (KEPT,) * (stop - start - moved)
        choice = StageChoice((0,) * (stop - start), places, near=moved)
        run = Run(start=edges[start + moved], stop=edges[start + last]) if last > moved else None
        again = () if run is None else (Decision(stage=number, subject=run, what=What.RECOMPUTE),)
        return (*again, *decisions_of(number, choice, self._menus[degree].of_stage(start, stop), HOST))

    def simulated(self, decisions: Decisions) -> Swapped | None:
        """What the simulator says of these decisions; None if they do not fit or cannot be carried out."""
        with suppress(UsageError):
            found = self._simulations.of(self._split, decisions)
            budgets = self._question.cluster.budgets
            full = any(peak > budget for peak, budget in zip(found.peak_bytes, budgets, strict=True))
            if not full and not any(missing_bytes(found.plan, found.arenas).values()):
                return Swapped(decisions, found.step_seconds[-1], found.peak_bytes)
        return None
