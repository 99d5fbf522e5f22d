"""Plans that keep their budgets on `torch.distributed.pipelining`.

That engine holds more than pipefit's own runtime: receive buffers for all microbatches, the batch, outputs
until their backward, and sent tensors. Planners know the own runtime's bytes, and the ledger those of
torch's engine. If the fastest plan exceeds a budget there, a bisection finds how much memory must be
reserved for a plan that does not.

Replicas that divide gradients or parameters may need less there than in the own runtime, which assigns whole
layers: FSDP2 divides every layer. If the own runtime has no such plan, plans for devices with more memory are
tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from pipefit.errors import InfeasibleError, UsageError
from pipefit.lowering import check_for_torch
from pipefit.memory import most_receive_buffers
from pipefit.planner import PlanOptions
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Sharding
from pipefit.schema.plan import Plan
from pipefit.simulator import Simulation
from pipefit.texts import counted
from pipefit.units import format_bytes

ROUNDS = 5  # plans of the bisection
MORE = 0.125, 0.25, 0.5, 1.0  # additional memory of a device, as parts of its own

Make = Callable[[Cluster, PlanOptions], Plan]
Peaks = Callable[[Plan], Sequence[int]]


def options_for_torch(asked: PlanOptions) -> PlanOptions:
    """Return the options without techniques that torch's engine lacks, unless they are requested.

    Replicas keep all state, and layers have no tensor shards, unless that is requested too.
    """
    means = replace(asked.means, peers=False, spill=False, state=False)
    return replace(asked, means=means, tensor=asked.tensor or 1, shard=asked.shard or "none")


def plan_for_torch(cluster: Cluster, asked: PlanOptions, make: Make, dry: Peaks | None = None) -> Plan:
    """Return a plan of `make` that fits on torch's engine.

    Peaks are those of the simulator's ledger; a plan that fits by the ledger is verified by `dry`, if given.
    If no plan fits, replicas divide their optimizer state, then also gradients, then parameters.

    Raises:
        UsageError: torch's engine cannot run any such plan.
        InfeasibleError: no plan was found that fits there.
    """
    try:
        return _fitting(cluster, options_for_torch(asked), make, dry)
    except InfeasibleError:
        if asked.shard is not None or asked.data == 1:
            raise
        shards: tuple[Sharding, ...] = ("optimizer", "gradients", "parameters")
        for shard in shards:
            with suppress(InfeasibleError, UsageError):  # no replicas of these sizes, for example
                return _fitting(cluster, options_for_torch(replace(asked, shard=shard)), make, dry)
        raise


def _fitting(cluster: Cluster, asked: PlanOptions, make: Make, dry: Peaks | None) -> Plan:
    """Return a plan with these options that fits on torch's engine; errors are those of `plan_for_torch`."""
    trials = _Trials(cluster, asked, make, dry)
    try:
        first = trials.plan(0)
    except InfeasibleError:
        if asked.shard not in ("gradients", "parameters"):
            raise
        divided = next(filter(trials.fits, trials.with_more_memory()), None)
        if divided is None:
            raise
        return _told(divided, f"{_OWNERS}.")
    if trials.fits(first):
        return first
    short, low, high, best = trials.short, 0, trials.additional_bytes(first), None
    for _ in range(ROUNDS):
        reserve = (low + high) // 2
        try:
            plan = trials.plan(reserve)
        except InfeasibleError:
            high = reserve
            continue
        if trials.fits(plan):
            best, high = plan, reserve
        else:
            low = reserve
    if best is None:
        plan = trials.plan(0, replace(trials.asked, objective="peak", planner=None))
        best = plan if trials.fits(plan) else None
    if best is None:
        raise InfeasibleError(
            f"{short}. No plan was found that fits there, of {counted(ROUNDS + 2, 'plan')} with more and "
            "more memory reserved: plan fewer microbatches (--microbatches) or tensor-parallel ranks "
            "(--tensor), or train with pipefit's own runtime"
        )
    return _told(best, f"Planned again, because {short} in the plan for pipefit's own runtime.")


class _Trials:
    """Plans with different reserves, and whether they fit on torch's engine.

    `short` is the lack of the last plan that did not fit.
    """

    def __init__(self, cluster: Cluster, asked: PlanOptions, make: Make, dry: Peaks | None) -> None:
        self.asked, self.short = asked, ""
        self._cluster, self._make, self._dry = cluster, make, dry

    def plan(self, reserve: int, asked: PlanOptions | None = None) -> Plan:
        """Return a plan with `reserve` more bytes reserved on every device, for a device's whole budget.

        Raises:
            UsageError: torch's engine cannot run the plan.
            InfeasibleError: no plan fits pipefit's own runtime with this reserve.
        """
        devices, reserves = self._cluster.devices, self._cluster.reserves
        more = [min(r + reserve, d.memory_bytes - 1) for r, d in zip(reserves, devices, strict=True)]
        within = self._cluster.reserving(more) if reserve else self._cluster
        plan = self._make(within, asked or self.asked)
        if asked is None and self.asked.data is None and not _runs(plan):  # stages of different degrees
            self.asked = replace(self.asked, data=1)
            plan = self._make(within, self.asked)
        return self._here(plan)

    def with_more_memory(self) -> Iterator[Plan]:
        """Yield plans for devices with more and more memory."""
        for part in MORE:
            devices = (
                replace(d, memory_bytes=int(d.memory_bytes * (1 + part))) for d in self._cluster.devices
            )
            with suppress(InfeasibleError):
                yield self._here(self._make(replace(self._cluster, devices=tuple(devices)), self.asked))

    def _here(self, plan: Plan) -> Plan:
        """Return a plan with the given cluster.

        Raises:
            UsageError: torch's engine cannot run the plan.
        """
        check_for_torch(plan)
        return replace(plan, cluster=self._cluster)

    def fits(self, plan: Plan) -> bool:
        """Return whether all devices keep their budgets; a plan that does by the ledger is run dry."""
        peaks = _peaks(plan)
        if self._dry is not None and not _lacking(self._cluster, peaks):
            peaks = self._dry(plan)
        if lacking := _lacking(self._cluster, peaks):
            self.short = _shortage(plan, peaks, lacking)
        return not lacking

    def additional_bytes(self, plan: Plan) -> int:
        """Return the most bytes that a device holds at its peak beyond pipefit's own runtime."""
        own, peaks = Simulation(plan).peak_bytes, _peaks(plan)
        return max(there - here for here, there in zip(own, peaks, strict=True))


def _peaks(plan: Plan) -> Sequence[int]:
    return Simulation(plan, engine="torch").peak_bytes


def _runs(plan: Plan) -> bool:
    """Return whether torch's engine can run a plan."""
    with suppress(UsageError):
        check_for_torch(plan)
        return True
    return False


def _lacking(cluster: Cluster, peaks: Sequence[int]) -> list[int]:
    """Return the devices whose peaks exceed their budgets."""
    return [n for n, (peak, budget) in enumerate(zip(peaks, cluster.budgets, strict=True)) if peak > budget]


def _shortage(plan: Plan, peaks: Sequence[int], lacking: Sequence[int]) -> str:
    """Return the lack of the device that is over its budget by most."""
    budgets = plan.cluster.budgets
    device = max(lacking, key=lambda n: peaks[n] - budgets[n])
    need, budget, why = peaks[device], budgets[device], most_receive_buffers(plan)
    return (
        f"on torch's engine device {device} needs {format_bytes(need)}, {format_bytes(need - budget)} over "
        f"its {format_bytes(budget)}{why and f'; {why}'}"
    )


_OWNERS = (
    "Planned for devices with more memory: pipefit's own runtime, whose replicas own whole "
    "layers, needs more than torch's engine, whose replicas divide each layer"
)


def _told(plan: Plan, remark: str) -> Plan:
    """Return the plan with a remark on how it was found."""
    if plan.provenance is None:
        return plan
    return replace(plan, provenance=replace(plan.provenance, remarks=(*plan.provenance.remarks, remark)))
