"""The search: plans until two neighbouring values are found, one that fits and one that does not; then dry runs.

A plan costs a profile over fake tensors and a search; a dry run costs every action of two steps. So the search
uses plans, and only the two neighbours are run. Where a dry run contradicts its plan, the search goes on with the peaks
of the dry run. Alternatives are looked for to the plan of the answer alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipefit.errors import InfeasibleError, UsageError
from pipefit.fits import Attempt, Fit
from pipefit.fitting.attempts import attempt
from pipefit.fitting.growth import Growth
from pipefit.fitting.search import Edge, edge
from pipefit.planner import Answer
from pipefit.runtime import certify as dry_run

Progress = Callable[[int, int, str], None]


def find(growth: Growth, *, certify: bool = True, progress: Progress | None = None) -> Fit:
    """The largest, or smallest, value that fits, and the next one, which does not.

    Size is taken to cost memory: beyond a value that does not fit, none is looked for.

    Args:
        growth: what grows, and through which values.
        certify: also run both dry: their peaks then do not depend on what planner and profile assume.
        progress: called with (attempts done, attempts known of, what is next).

    Raises:
        InfeasibleError: not even the smallest, or largest, value fits; says which device, and by how much.
        UsageError: every value is refused; with the first refusal. Or no plan can be made as demanded.
    """
    search = _Search(growth, progress)
    while True:
        found = edge(search.holds, growth.values)
        new = [value for value in found if value is not None and search.known[value].certified_bytes is None]
        if not (certify and new):
            return _answer(growth, search, found)
        for value in new:
            search.certify(value)


@dataclass
class _Search:
    """What has been tried so far. The statement is "it fits" while growing, and "it does not fit" while shrinking."""

    growth: Growth
    progress: Progress | None
    known: dict[int, Attempt] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    fitting: tuple[int, Answer] | None = None  # the last that fits; earlier ones would hold all that was searched

    def holds(self, value: int) -> bool | None:
        """The statement at `value`; None where it is refused."""
        if value not in self.known and value not in self.refused:
            self._say("planning", value)
            try:
                profiles = self.growth.profiles(value)
            except UsageError as refusal:
                self.refused[value] = str(refusal)
            else:
                found = self.growth.plan(profiles, value)
                self.known[value] = attempt(value, found.plan)
                self.fitting = (value, found) if self.known[value].fits else self.fitting
        known = self.known.get(value)
        return None if known is None else known.fits == (self.growth.sense == "largest")

    def certify(self, value: int) -> None:
        """Replace the planned peaks by those of the dry run."""
        self._say("dry run of", value)
        planned = self.known[value]
        trace = dry_run(self.growth.task(value), planned.plan)
        self.known[value] = replace(planned, certified_bytes=trace.peak_bytes)

    def complete(self, value: int) -> Attempt:
        """The attempt, with a plan that has its alternatives."""
        self._say("alternatives to", value)
        if self.fitting is None or self.fitting[0] != value:  # a dry run did not fit where its plan did
            self.fitting = value, self.growth.plan(self.growth.profiles(value), value)
        return replace(self.known[value], plan=self.fitting[1].complete())

    def _say(self, what: str, value: int) -> None:
        if self.progress is not None:
            done = len(self.known)
            self.progress(done, done + 1, f"{what} {self.growth.named(value)}")


def _answer(growth: Growth, search: _Search, found: Edge) -> Fit:
    if not search.known:
        raise UsageError(next(iter(search.refused.values())))
    best, beyond = (found.holds, found.fails) if growth.sense == "largest" else (found.fails, found.holds)
    if best is None:
        assert beyond is not None  # something was tried
        raise InfeasibleError(f"not even {growth.named(beyond)} fits: {search.known[beyond].miss}")
    search.known[best] = search.complete(best)
    return Fit(
        grown=growth.name,
        sense=growth.sense,
        best=search.known[best],
        beyond=None if beyond is None else search.known[beyond],
        tried=tuple(search.known[value] for value in sorted(search.known)),
        refused=search.refused,
    )
