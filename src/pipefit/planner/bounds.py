"""Lower bounds of the seconds of a step, over all splits, devices, and decisions about saved tensors and state.

    step_bound(question)

No plan that fits takes less. With f, b, r and n of stage k (seconds forward, backward and recomputing; microbatches
in flight before its first backward), S the sum of all f and b, and M microbatches, a synchronous step takes at least,
for every k,

    sum over s < k of (f_s + b_s)  +  M (f + b + r)      the stage works on all microbatches once the first is there
    S + (M - 1) b + (M - n) (f + r)                      what it has to do after its first backward
    S + (M - 1) f + (M - n) (b + r)                      what it has to do before its last forward
    S + (M - 1) (f + b)                                  under GPipe, where n = M

and the update of the first block, unless a host can do it. An endless schedule takes M (f + b + r) and the updates of
the slowest stage, less what a host may do of them in a step.

How much a stage must recompute follows from its bytes when its first backward begins, and after every n more: n
microbatches keep so much there, less what its device has, what the host's link carries in a whole step, and what all
peers have beside parameters. Gradients and parameters that are away then must be back for the backward, so that they
take of the link what tensors do. Every term is on the side that lowers the bound: layers take as long
as on the fastest kind of device, the largest budget is everybody's, links are not shared, copies need no memory, and
the layers whose bytes cost the fewest seconds are recomputed, in fractions. So the bound holds for any plan, and the
gap to it is the most that a better plan could gain. Alpa's sum + (M - 1) x maximum is no bound of 1F1B.

Costs: P L^2 numbers for L blocks in P stages, for some ten tries at the step's seconds: a third of a second for 128
blocks in 8 stages.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.actions import Kind
from pipefit.cluster import Cluster
from pipefit.cost.time import host_update_seconds
from pipefit.devices import Host
from pipefit.errors import UsageError
from pipefit.places import Member, MemberKind
from pipefit.planner.prices import Floats, Prices, ranges
from pipefit.planner.question import Question
from pipefit.schedule import schedule_named
from pipefit.training import Training

_CLOSE = 1e-4  # the part of the bound to which the bisection comes close
_INFINITE = float("inf")


class Position(NamedTuple):
    """What a stage's place in the schedule says about its work."""

    microbatches: int
    in_flight: int  # forwards before its first backward
    before_last: int  # backwards before its last forward
    apart: bool  # all stages compute all forwards before their first backward, as under GPipe

    @property
    def windows(self) -> int:
        """How many sets of microbatches, none of them in two sets, are in flight together in a step."""
        return self.microbatches // self.in_flight

    @property
    def late_windows(self) -> int:
        """The same of those that go forward after the first backward."""
        return self.windows - 1


class Work(NamedTuple):
    """Seconds for one microbatch: of a stage, forward and backward; of all stages before it; and of all together.

    `recomputed` are those of a stage's recomputation for all microbatches, `late` those for the ones that go forward
    after its first backward.
    """

    forward: Floats
    backward: Floats
    before: Floats
    whole: float
    recomputed: Floats
    late: Floats


@cache
def position_of(schedule: str, stage: int, stages: int, microbatches: int) -> Position:
    """The position of `stage` under a synchronous schedule.

    Raises:
        UsageError: no such schedule.
    """
    own, end = (
        [compute.kind for compute in schedule_named(schedule)(number, stages, 1, microbatches)]
        for number in (stage, stages - 1)
    )
    last = len(own) - 1 - own[::-1].index(Kind.FORWARD)
    held, at_end = own.index(Kind.BACKWARD), end.index(Kind.BACKWARD)
    return Position(microbatches, held, own[:last].count(Kind.BACKWARD), at_end == microbatches)


def in_flight(training: Training, stage: int, stages: int) -> int:
    """The microbatches that a stage holds at once."""
    if training.endless:
        return stages - stage
    return position_of(training.schedule, stage, stages, training.microbatches).in_flight


def highest_line(at: Position, work: Work) -> Floats:
    """The highest of a stage's lines under a synchronous schedule."""
    m, f, b = at.microbatches, work.forward, work.backward
    found = [
        work.before + m * (f + b) + work.recomputed,
        work.whole + (m - 1) * b + (m - at.in_flight) * f + work.late,
        work.whole + (m - 1) * f + at.before_last * b + work.late,
    ]
    if at.apart:
        found.append(work.whole + (m - 1) * (f + b))
    highest: Floats = np.maximum.reduce(found)
    return highest


def step_bound(question: Question) -> float:
    """Seconds that a step of any plan takes at least; infinity if no plan fits, whatever is moved or recomputed."""
    return _Bound(question).seconds()


def simple_bound(question: Question) -> float:
    """A lower bound that knows of no memory and no layers: the work of all blocks, divided as well as it could be.

    Of P stages with c seconds for one microbatch, stage k takes at least sum over s < k of c_s, and M c. The division
    in which all take as long has the fewest seconds, S / (1 - (1 - 1 / M)^P); an endless schedule takes M S / P.
    """
    prices, how = Prices(question), question.training
    whole = float(prices.forward[-1] + prices.backward[-1])
    if how.endless:
        return how.microbatches * whole / question.stages
    return whole / float(1 - (1 - 1 / how.microbatches) ** question.stages)


class _Bound:
    """Tables over ranges of blocks, as `Prices` has them."""

    def __init__(self, question: Question) -> None:
        self.question, self.count = question, question.blocks
        self.microbatches, self.endless = question.training.microbatches, question.training.endless
        self.prices = Prices(question)
        self.forward, self.backward, self.update = self.prices.forward, self.prices.backward, self.prices.update
        owned, gradients = question.ranges.owned()
        owned = owned - question.ranges.state[np.array(question.edges)]  # the host may have it
        self.owned, self.gradients = owned.astype(float), gradients.astype(float)

    # ---------------------------------------------------------------- bisection

    def seconds(self) -> float:
        """The bound: the fewest seconds T such that some split's stages have no line above T."""
        low = high = self._lowest(_INFINITE)
        if high == _INFINITE or self._lowest(high) <= high:  # what links carry is enough, or does not matter
            return high
        while self._lowest(high) > high:
            low, high = high, 2 * high
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._lowest(middle) <= middle else (middle, high)
        return low

    def _lowest(self, step: float) -> float:
        """The lowest possible highest line of a split, where links carry what they can in a step of these seconds."""
        reached = np.full(self.count + 1, _INFINITE)
        reached[0] = 0.0
        for stage in range(self.question.stages):
            reached = np.maximum(reached[:-1, None], self._lines(stage, step)).min(axis=0)
        return float(reached[-1]) + (0.0 if self.endless or self._updating else float(self.update[1]))

    def _lines(self, stage: int, step: float) -> Floats:
        """The highest line of every range of blocks as this stage."""
        found = self._endless_line(stage, step) if self.endless else self._line(stage, step)
        return np.where(self._valid & self._fits, found, _INFINITE)

    def _line(self, stage: int, step: float) -> Floats:
        at = position_of(self.question.training.schedule, stage, self.question.stages, self.microbatches)
        every = at.windows * self._recomputed(at.in_flight, at.windows, 1, step)
        late = at.late_windows * self._recomputed(at.in_flight, max(1, at.late_windows), 0, step)
        before, whole = self.forward + self.backward, float(self.forward[-1] + self.backward[-1])
        work = Work(ranges(self.forward), ranges(self.backward), before[:-1, None], whole, every, late)
        return highest_line(at, work)

    def _endless_line(self, stage: int, step: float) -> Floats:
        """The work of a stage in a step that never ends: its passes and its updates. It may have no gradients yet."""
        updates = self.microbatches if self.question.training.schedule == "pipedream" else 1
        held = in_flight(self.question.training, stage, self.question.stages)
        windows = self.microbatches / held
        recomputed = windows * self._recomputed(held, windows, windows, step)
        passes = self.microbatches * ranges(self.forward + self.backward)
        return passes + recomputed + updates * ranges(self.update) * (1 - self._elsewhere(updates, step))

    def _elsewhere(self, updates: int, step: float) -> Floats:
        """The part of the updates of every range that the fastest host may do in a step, if it did nothing else."""
        if not self._updating:
            return np.zeros_like(ranges(self.update))
        fastest = max(self._updating, key=lambda host: host.memory_bandwidth or 0.0)
        times = [host_update_seconds(cost, fastest) for cost in self.question.measurement.costs]
        sums = np.concatenate([[0.0], np.cumsum(times)])[np.array(self.question.edges)]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.minimum(1.0, np.nan_to_num(step / (updates * np.maximum(ranges(sums), 0.0)), nan=1.0, posinf=1.0))

    @cached_property
    def _updating(self) -> list[Host]:
        """The hosts that may update layers."""
        hosts = self.question.cluster.hosts if self.question.means.host and self._host_rate else ()
        return [host for host in hosts if host.memory_bandwidth is not None]

    @cached_property
    def _valid(self) -> NDArray[np.bool_]:
        """Ranges of a block or more."""
        return np.arange(self.count)[:, None] < np.arange(self.count + 1)

    @cached_property
    def _fits(self) -> NDArray[np.bool_]:
        """Ranges whose parameters fit the largest device, unless they may be away between passes."""
        means = self.question.means
        if means.host and means.spill and self._host_rate:
            return self._valid
        return ranges(self.owned) <= max(self.question.cluster.budgets)

    # ---------------------------------------------------------------- recomputation

    def _recomputed(self, held: int, windows: float, without_gradients: float, step: float) -> Floats:
        """Seconds of recomputation for each of so many windows, on an average; the stage holds `held` microbatches.

        In `without_gradients` of the windows the stage has no gradients yet.
        """
        owned, gradients = ranges(self.owned), ranges(self.gradients)
        room = max(self.question.cluster.budgets) - owned - gradients * (1 - without_gradients / windows)
        away = self._peers + (self._host_rate * step / windows if self._host_rate else 0.0)
        return self.prices.seconds(held * self._kept - room - away, held)

    @cached_property
    def _kept(self) -> Floats:
        return self.prices.kept

    @cached_property
    def _host_rate(self) -> float:
        """Bytes per second that the fastest links of a device carry to all that are no devices."""
        cluster = self.question.cluster
        there = [Member.host(n) for n in range(len(cluster.hosts))]
        there += [Member(MemberKind.DISK, n) for n, host in enumerate(cluster.hosts) if host.disk_bytes]
        devices = map(Member.device, range(len(cluster.devices)))
        return max(sum(_rate(cluster, device, member) for member in there) for device in devices)

    @cached_property
    def _peers(self) -> float:
        """Bytes that all devices but one have beside parameters, if that one holds the most."""
        budgets = sorted(self.question.cluster.budgets)
        held = min(float(self.owned[-1]), float(budgets[-1]))
        return max(0.0, sum(budgets[:-1]) - (float(self.owned[-1]) - held))


def _rate(cluster: Cluster, one: Member, other: Member) -> float:
    """Bytes per second between two members; zero where nothing joins them."""
    try:
        return cluster.route(one, other).bytes_per_second
    except UsageError:
        return 0.0
