"""A plan: which layers go on which devices, what is recomputed or moved away, and what a step should cost.

A plan contains the profile, the cluster and the training that it was made for, so that it can be simulated, explained,
certified and run from one file. You may also write one: `Plan(profile=..., cluster=..., training=..., stages=...)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

from pipefit.alternatives import Alternative, paragraph
from pipefit.cluster import Cluster
from pipefit.compactions import table
from pipefit.decisions import Decision, What
from pipefit.errors import UsageError
from pipefit.fingerprints import samples
from pipefit.grids import Stage, dividing, told_sharing
from pipefit.predictions import Prediction, fullness, reserves
from pipefit.profiles import Measurement, ModelProfile, told_copies
from pipefit.provenance import Provenance
from pipefit.rows import Division, dimensions
from pipefit.tables import Shown, Table
from pipefit.texts import counted, numbered
from pipefit.training import Training
from pipefit.units import format_bytes, format_number, format_seconds
from pipefit.validation import check_types

_BAR = 20  # characters
_SIZES = "parameters", "peak", "of budget", "full", ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Shown):
    """Stages in pipeline order over the devices of a cluster, and decisions about their memory.

    A device may hold several stages; two stages share either all of their devices or none.

    Raises:
        UsageError: stages, decisions or a prediction that do not match the profile and the cluster, another precision
            than the profile's, or a microbatch size that was not profiled.
    """

    __pydantic_config__ = {"extra": "forbid"}

    profile: ModelProfile
    cluster: Cluster
    training: Training
    stages: tuple[Stage, ...]
    decisions: tuple[Decision, ...] = ()
    prediction: Prediction | None = None
    provenance: Provenance | None = None
    alternatives: tuple[Alternative, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        edges = [0, *(stage.stop for stage in self.stages)]
        if [stage.start for stage in self.stages] != edges[:-1] or edges[-1] != len(self.profile.layers):
            raise UsageError(
                f"the stages must hold layers 0 to {len(self.profile.layers) - 1} once each and in order, "
                f"not {', '.join(f'{s.start}-{s.stop - 1}' for s in self.stages) or 'none'}"
            )
        self._check_devices()
        for decision in self.decisions:
            _check_decision(decision, self.stages, self.cluster)
        if self.prediction is not None and len(self.prediction.peak_bytes) != len(self.cluster.devices):
            raise UsageError(
                f"the prediction names {len(self.prediction.peak_bytes)} peaks, but cluster {self.cluster.name!r} has "
                f"{len(self.cluster.devices)} devices"
            )
        if self.training.precision != self.profile.assumptions.precision:
            raise UsageError(
                f"the plan would train in {self.training.precision}, but {self.profile.model} was profiled in "
                f"{self.profile.assumptions.precision}: profile it again with --precision {self.training.precision}, "
                f"or plan for Training(..., precision={self.profile.assumptions.precision!r})"
            )
        self.profile.at(self.training.microbatch_size)
        self._check_slices()

    def _check_slices(self) -> None:
        """Check that replicas can divide a microbatch, and that the profile knows what a slice costs."""
        size, known = self.training.microbatch_size, {m.microbatch_size for m in self.profile.measurements}
        for number, stage in enumerate(self.stages):
            data = stage.grid.data
            if size % data:
                raise UsageError(
                    f"the {data} replicas of stage {number} cannot divide a microbatch of {counted(size, 'sample')} "
                    f"equally: use {dividing(size, data, self.training.batch_size)}, or another number of replicas"
                )
            if size // data not in known:
                raise UsageError(
                    f"the {data} replicas of stage {number} compute slices of {counted(size // data, 'sample')}, and "
                    f"{self.profile.model} was profiled at {', '.join(map(str, sorted(known)))}: profile it at all "
                    f"sizes of the plan, as profile(task, microbatch_size=({size}, {size // data})) does"
                )
            self.measured(number)  # refuses ranks that the profile does not know

    def _check_devices(self) -> None:
        """Check that every device exists, and that two stages share all of their devices or none."""
        grids = dict.fromkeys(stage.devices for stage in self.stages)
        used = [device for devices in grids for device in devices]
        device, times = Counter(used).most_common(1)[0]
        if times > 1:
            shares = [list(devices) for devices in grids if device in devices]
            raise UsageError(
                f"device {device} is in the grids {', '.join(map(str, shares))}: two stages share either all of their "
                "devices or none"
            )
        for number, stage in enumerate(self.stages):
            if max(stage.devices) >= len(self.cluster.devices):
                raise UsageError(
                    f"stage {number} is on device {max(stage.devices)}; cluster {self.cluster.name!r} has "
                    f"{len(self.cluster.devices)} devices"
                )

    @property
    def measurement(self) -> Measurement:
        """The layer costs at this plan's microbatch size."""
        return self.profile.at(self.training.microbatch_size)

    def measured(self, stage: int) -> Measurement:
        """The layer costs on a device of a stage.

        They are for a slice of a microbatch, where replicas divide it, and of layers that tensor-parallel ranks divide.
        """
        grid = self.stages[stage].grid
        size = self.training.microbatch_size // grid.data
        return self.profile.at(size, grid.tensor, sequences=grid.sequences)

    def division(self, stage: int) -> Division:
        """How the values between the stage before and `stage` are divided.

        Raises:
            UsageError: they cannot be; names the boundary, and says what would work.
        """
        front, behind = (self.stages[number].grid.data for number in (stage - 1, stage))
        one, other = self.measured(stage - 1), self.measured(stage)
        sizes, layer = (one.microbatch_size, other.microbatch_size), self.stages[stage].start
        sent, received = (measurement.costs[layer].inputs for measurement in (one, other))
        if front == behind:
            return Division((None,) * len(sent), front, behind)
        try:
            found = dimensions(sent, received, sizes, gathers=front < behind)
        except UsageError as error:
            raise UsageError(
                f"{front} replicas of stage {stage - 1} cannot divide what they send among {behind} of stage {stage}: "
                f"{error}; use as many replicas on both sides, or end the stage at another layer"
            ) from error
        return Division(found, front, behind)

    @property
    def is_sliced(self) -> bool:
        """Whether a stage has several replicas, which divide every microbatch."""
        return any(stage.grid.data > 1 for stage in self.stages)

    @property
    def names_rows(self) -> bool:
        """Whether its programs say which rows of a microbatch are sent: where a stage is on several devices."""
        return any(len(stage.devices) > 1 for stage in self.stages)

    @property
    def workers(self) -> tuple[int, ...]:
        """The devices in use, rank by rank, and within a rank as its grid names them: worker w runs the w-th."""
        return tuple(device for stages in self.ranks for device in self.stages[stages[0]].devices)

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages that a device holds."""
        return tuple(number for number, stage in enumerate(self.stages) if device in stage.devices)

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The devices of every stage."""
        return tuple(stage.devices for stage in self.stages)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank. A rank is one grid of devices; ranks are in the order of their first stages."""
        grids: dict[tuple[int, ...], list[int]] = {}
        for number, stage in enumerate(self.stages):
            grids.setdefault(stage.devices, []).append(number)
        return tuple(map(tuple, grids.values()))

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The stages that have a copy of each shared parameter."""
        return tuple(
            tuple(n for n, s in enumerate(self.stages) if any(s.start <= user < s.stop for user in shared.users))
            for shared in self.measurement.shared
        )

    @property
    def summed(self) -> dict[int, tuple[int, ...]]:
        """The stages that add up the gradients of a shared parameter, by its number. A frozen one has no gradients."""
        shared = zip(self.measurement.shared, self.holders, strict=True)
        return {n: stages for n, (one, stages) in enumerate(shared) if one.gradient_bytes and len(stages) > 1}

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first layer of every stage but the first."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def split(self) -> tuple[int, ...]:
        """Layers per stage."""
        return tuple(stage.stop - stage.start for stage in self.stages)

    def decisions_of(self, stage: int, what: What) -> tuple[Decision, ...]:
        """The decisions of one kind about one stage."""
        return tuple(d for d in self.decisions if d.stage == stage and d.what is what)

    @property
    def holds_for(self) -> str:
        """The machine whose kernels were measured for the peaks, in a sentence; empty where no CPU's kernels were."""
        made = self.profile.assumptions
        if not made.cpu:
            return ""
        threads = f"{made.threads} thread{'s' * (made.threads > 1)}"
        return (
            f"Peaks are those of {made.cpu} with {made.capability}, torch {made.torch} and {threads}: elsewhere "
            "kernels may take more or less."
        )

    @property
    def stage_table(self) -> Table:
        """A row for each stage: device, blocks, parameters, and the predicted peak as a part of the device's budget.

        Where there are no blocks, or a stage ends inside one, all rows tell layers.
        """
        edges = frozenset(self.profile.edges)
        whole = bool(self.profile.blocks) and all({stage.start, stage.stop} <= edges for stage in self.stages)
        rows = tuple(_row(self, number, stage, whole=whole) for number, stage in enumerate(self.stages))
        return Table(
            ("stage", "device", "blocks" if whole else "layers", "count", *_SIZES),
            rows,
            spare=("", "count", "of budget"),
        )

    @property
    def explanation(self) -> list[Table | str]:
        """Its stages and peaks, what limits it, how it was found, how fast it is, and where that holds."""
        copies = told_copies([self.measured(n).copy_bytes(s.start, s.stop) for n, s in enumerate(self.stages)])
        told = [*told_sharing(self.stages), _limit(self), *copies, *_planner(self), *_time(self), *_caveats(self)]
        text = "\n".join(told)
        step = self.prediction.step_seconds if self.prediction else 0.0
        freed = table(self.prediction.compactions, step) if self.prediction else ()
        return [_head(self), self.stage_table, *freed, text, *paragraph(self.alternatives, step)]

    def __repr__(self) -> str:
        """A line: of what, in how many stages, on what; a plan of everything that is in it would be thousands."""
        return f"<Plan: {_head(self).splitlines()[0]}>"


def _check_decision(decision: Decision, stages: tuple[Stage, ...], cluster: Cluster) -> None:
    """Check that the decision is about layers and places that exist.

    Raises:
        UsageError: no such stage, layers outside it, or a place that the cluster does not have.
    """
    if not 0 <= decision.stage < len(stages):
        raise UsageError(f"{decision}: the plan has {counted(len(stages), 'stage')}")
    stage = stages[decision.stage]
    if any(not stage.start <= layer < stage.stop for layer in decision.layers):
        raise UsageError(f"{decision}: the stage holds layers {stage.start} to {stage.stop - 1}")
    for member in () if decision.place is None else decision.place.members:
        cluster.check(member.at(cluster.devices[stage.devices[0]].host), str(decision))


# -------------------------------------------------------------------- text


def _head(plan: Plan) -> str:
    training = plan.training
    return (
        f"{plan.profile.model}: {plan.profile.parts} in {counted(len(plan.stages), 'stage')} on {plan.cluster}\n"
        f"{training.phrases[0]}, a batch of {training.batch_size} in {counted(training.microbatches, 'microbatch')} of "
        f"{samples(training.microbatch_size, plan.profile.fingerprint.lengths)}, {training.precision}"
    )


def _row(plan: Plan, number: int, stage: Stage, *, whole: bool) -> tuple[str, ...]:
    """The row of a stage, by its blocks if all stages are of `whole` ones, otherwise by its layers."""
    names = plan.profile.span(stage.start, stage.stop) if whole else plan.profile.layers[stage.start : stage.stop]
    span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
    parameters = sum(cost.parameter_bytes for cost in plan.measured(number).costs[stage.start : stage.stop])
    fullest, full = _fullest(plan, stage), _fullness(plan, stage)
    budget = plan.cluster.budgets[fullest]
    peak = format_bytes(plan.prediction.peak_bytes[fullest]) if plan.prediction else "-"
    tight = plan.prediction is not None and plan.prediction.is_tight(plan.cluster, fullest)
    part = ("-", "") if full is None else (fullness(full, tight=tight), _bar(full))
    named = str(number), numbered(stage.devices), span, str(len(names))
    return (*named, format_bytes(parameters), peak, format_bytes(budget), *part)


def _fullest(plan: Plan, stage: Stage) -> int:
    """The device of a stage with the highest predicted peak for its budget; the smallest without a prediction."""
    peaks = plan.prediction.peak_bytes if plan.prediction else (1,) * len(plan.cluster.budgets)
    return max(stage.devices, key=lambda device: peaks[device] / plan.cluster.budgets[device])


def _fullness(plan: Plan, stage: Stage) -> float | None:
    """The predicted peak as a share of the budget of the stage's fullest device; None without a prediction."""
    made, device = plan.prediction, _fullest(plan, stage)
    return None if made is None else made.peak_bytes[device] / plan.cluster.budgets[device]


def _bar(full: float) -> str:
    filled = min(_BAR, round(full * _BAR))
    return "#" * filled + "." * (_BAR - filled)


def _limit(plan: Plan) -> str:
    """The fullest device, and how much room it has or lacks."""
    if plan.prediction is None:
        return "This plan holds no predicted peaks: pipefit simulate shows them."
    number, stage = max(enumerate(plan.stages), key=lambda item: _fullness(plan, item[1]) or 0.0)
    device = _fullest(plan, stage)
    budget, peak = plan.cluster.budgets[device], plan.prediction.peak_bytes[device]
    room = (
        f"which leaves it {format_bytes(budget - peak)} free"
        if peak <= budget
        else f"{format_bytes(peak - budget)} more than it has"
    )
    return f"Device {device} limits: stage {number} needs {format_bytes(peak)}, {room}."


def _planner(plan: Plan) -> Iterator[str]:
    """Which planner made the plan, and how good it is proven to be."""
    made = plan.provenance
    if made is None:
        yield "This plan does not say which planner made it."
        return
    yield str(made)
    if made.proves_lowest_peak and plan.is_sliced:
        divided = "" if "shard" in made.options else ", whatever they divide"
        yield f"This holds for every split of {plan.profile.parts}, with any number of replicas of each stage{divided}."
    elif made.proves_lowest_peak:
        parts = len(plan.profile.block_names)
        splits = comb(parts - 1, len(plan.stages) - 1)
        into = f"{counted(parts, plan.profile.part)} in {counted(len(plan.stages), 'stage')}"
        yield f"This holds for all {splits:,} splits of {into}." if splits > 1 else f"It is the only split of {into}."


def _time(plan: Plan) -> Iterator[str]:
    """Step time, throughput, and how long devices wait: what a simulated step leaves of their time."""
    if plan.prediction is None or plan.prediction.step_seconds <= 0:
        return
    step, busy = plan.prediction.step_seconds, plan.prediction.utilisation
    speed = f"A step takes {format_seconds(step)}: {format_number(plan.training.batch_size / step)} samples per second."
    if not busy:
        yield speed
        return
    used = {device for stage in plan.stages for device in stage.devices}
    waiting = 1 - sum(busy[device] for device in used) / len(used)
    yield f"{speed} Devices wait {100 * max(waiting, 0.0):.0f} % of it{_bubble(plan)}."


def _bubble(plan: Plan) -> str:
    """The ideal bubble of GPipe and 1F1B, (P - 1) / (M + P - 1): what stages of equal time without messages would wait.

    It is defined for one stage on each device. Under recomputation it is not, as devices run forwards again while they
    would wait.
    """
    stages, microbatches = len(plan.stages), plan.training.microbatches
    recomputes = any(decision.what is What.RECOMPUTE for decision in plan.decisions)
    if stages == 1 or len(plan.ranks) < stages or recomputes:
        return ""
    if plan.training.endless:
        return f"; stages of equal time would not wait under {plan.training.schedule}, but for messages"
    share = (stages - 1) / (microbatches + stages - 1)
    return (
        f"; the ideal bubble of {plan.training.schedule} with {stages} stages and "
        f"{counted(microbatches, 'microbatch')} is {100 * share:.0f} %"
    )


def _seconds(plan: Plan) -> str:
    """Whether seconds of layers were measured or estimated, and by what."""
    if not plan.measurement.estimated:
        moves = len(plan.workers) > 1 or any(decision.place is not None for decision in plan.decisions)
        links = ", those of messages and copies are estimated by the links" if moves else ""
        return f"Seconds of layers were measured on {plan.profile.assumptions.device}{links}."
    used = {device for stage in plan.stages for device in stage.devices}
    kinds = {plan.cluster.devices[device].kind.key: plan.cluster.devices[device].kind for device in sorted(used)}
    by = "; ".join(f"{kind.name} by {kind.estimates(plan.training.dtype)}" for kind in kinds.values())
    return f"Seconds are estimated, not measured: {by}."


def _caveats(plan: Plan) -> Iterator[str]:
    """What ranks divide, what processes take, where seconds come from, on what machine the peaks hold, and what kernels
    they leave out.
    """
    shares = dict.fromkeys(plan.measured(number).shares for number in range(len(plan.stages)))
    yield from (f"Of the model {one.sentence}." for one in shares if one is not None)
    yield from reserves(plan.cluster, plan.workers, plan.prediction)
    if plan.prediction is not None:
        yield from filter(None, (_seconds(plan), plan.holds_for))
        if gap := plan.profile.kernels.gap:
            yield f"{gap[0].upper()}{gap[1:]}."
