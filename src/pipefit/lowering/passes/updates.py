"""The pass that makes updates explicit: the end of a step, and the moves of optimizer state for it.

Gradient reductions over a stage's replicas (`lowering.passes.collectives`) are joined; shared parameters'
gradients are all-reduced over the devices that have a copy; the stages agree, and every stage is updated. If
replicas divide the optimizer state, each updates the layers that it owns, and an UNSHARD gathers their
parameters on all. If a stage's optimizer state is away between steps, it is updated run by run, in the order
of its layers; runs also end at the ends of moved parameters or gradients.

    RELOAD[5.optimizer] WAIT_RELOAD STEP[5:6] OFFLOAD[5.optimizer] ... STEP[6:9] ... WAIT_OFFLOAD[5.optimizer]

With `ahead` n, a run's RELOAD starts before the n-th STEP before its own; with `behind` n, its OFFLOAD is
joined after the n-th STEP after it. So `ahead=1, behind=0` keeps the state of two runs on the device: the
next one arrives while this one is updated.

Layers that a host updates send it their gradients, one run after the other. The host updates a run while the
gradients of the next run and the parameters of the previous run are in transfer:

    OFFLOAD[5.gradients] OFFLOAD[6.gradients]
    WAIT_OFFLOAD[5.gradients] STEP[5:6]@host
    WAIT_OFFLOAD[6.gradients] STEP[6:7]@host WAIT_STEP[5:6]@host RELOAD[5.parameters]
    WAIT_STEP[6:7]@host RELOAD[6.parameters] WAIT_RELOAD[5.parameters] WAIT_RELOAD[6.parameters]

Under an asynchronous schedule all of this replaces every STEP (`update_of`), so no part of an update is in
progress when a step ends. (ZeRO-Offload, Ren et al., USENIX ATC 2021, updates on the CPU.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.lowering.passes.collectives import sums_of
from pipefit.lowering.passes.offload import Bundles, named, of_layers, state_edges
from pipefit.schema.actions import Action, Kind, Subject
from pipefit.schema.decisions import Decision, State, StateKind, What
from pipefit.schema.plan import Plan

# ---- Weights that a forward changes: they must not have another copy, which would miss the change
#
# `nn.Embedding(max_norm=...)` scales rows of its weight down as it reads them. The change must reach the
# weights that the next forward reads and the next update starts from, so they are one tensor on one device.


def check_changed_weights(plan: Plan, ranks: Iterable[int]) -> None:
    """Check that no parameter that a forward of these ranks changes has another copy.

    Raises:
        UsageError: one has; says where, and what to do.
    """
    of_ranks = plan.ranks
    for number in sorted(stage for rank in ranks for stage in of_ranks[rank]):
        stage, measured = plan.stages[number], plan.measured(number)
        for layer, kind in enumerate(measured.layers[stage.start : stage.stop], start=stage.start):
            shared = any(layer in one.users and one.copying for one in measured.shared)
            for parameter in measured.kinds[kind].changed_parameters:
                copied = bool(shared or parameter.copy_bytes)
                for where, instead in _elsewhere(
                    plan, number, layer, is_trained=parameter.trainable, copied=copied
                ):
                    raise UsageError(
                        f"layer {plan.profile.layers[layer]} changes its parameter {parameter.name!r} in "
                        f"its forward, like nn.Embedding(max_norm=...), but {where}, which would miss the "
                        f"change: {instead}"
                    )


def _elsewhere(
    plan: Plan, number: int, layer: int, *, is_trained: bool, copied: bool
) -> Iterator[tuple[str, str]]:
    """Yield the causes of another copy of a layer's parameter in stage `number`, each with a remedy.

    With `copied`, autocast computes with a copy of it, which has the weight's values from before the forward.
    """
    training, moved = plan.training, list(_moved(plan, number, layer))
    for decision in moved if is_trained else [one for one in moved if one.what is What.OFFLOAD]:
        yield (
            f"the plan keeps it elsewhere too ({decision})",
            "keep the parameters of this layer on its device",
        )
    if is_trained and training.endless:
        yield f"schedule {training.schedule} has several versions of it", "use schedule 1f1b"
    if is_trained and training.precision.startswith("master-"):
        instead = f"use precision {training.precision.replace('master', 'mixed')}, or float32"
        yield f"precision {training.precision} updates a float32 copy of it", instead
    if copied:
        yield (
            f"precision {training.precision} computes with a half-precision copy of it",
            "use precision float32",
        )


def _moved(plan: Plan, number: int, layer: int) -> Iterator[Decision]:
    """Yield the decisions that put a layer's parameters at another place: updates there, or offloads between
    passes.
    """
    for decision in plan.decisions:
        state = decision.subject
        if decision.stage != number or not isinstance(state, State) or not state.start <= layer < state.stop:
            continue
        if decision.what is What.UPDATE or state.kind == "parameters":
            yield decision


# ---- Updates


class _Run(NamedTuple):
    """Layers `start` to `stop - 1`, which are updated together, and the decision about them."""

    start: int
    stop: int
    decision: Decision | None


def updated(stages: Sequence[int], plan: Plan, bundles: Bundles) -> Iterator[Action]:
    """Yield the end of a rank's step: gradient reductions, the agreement, and the updates.

    Raises:
        UsageError: a state is moved that cannot be, or two decisions are about one layer.
    """
    shared = [
        Action(Kind.REDUCE, stage, subject=Subject(number, "shared"))
        for stage in stages
        for number, members in plan.summed.items()
        if stage in members
    ]
    yield from shared
    yield from (reduce.join for stage in stages for reduce in sums_of(plan, stage))
    yield from (reduce.join for reduce in shared)
    if plan.training.agrees:
        yield Action(Kind.AGREE, stages[0])
        yield Action(Kind.AGREE, stages[0]).join
    for stage in stages:
        yield from update_of(Action(Kind.STEP, stage), plan, bundles)
    yield from unshards_of(plan, stages)


def unshards_of(plan: Plan, stages: Sequence[int], microbatch: int | None = None) -> list[Action]:
    """Return the gathers after the updates of these stages, of `microbatch` if a step has several updates.

    If each layer is updated by one replica only, they send its parameters to the others, which keep them.
    """
    owned = [stage for stage in stages if plan.stages[stage].grid.shard in ("optimizer", "gradients")]
    unshards = [Action(Kind.UNSHARD, stage, microbatch) for stage in owned]
    return [*unshards, *(unshard.join for unshard in unshards)]


def update_of(step: Action, plan: Plan, bundles: Bundles, *, stash: Action | None = None) -> Iterator[Action]:
    """Yield the expansion of a whole stage's update: updates of runs, and the moves around them.

    Those of a host begin first and are joined last, with the device's own updates between. A `stash` copies
    the weights of every run just before its update; those of a host's runs first.

    Raises:
        UsageError: as `runs_of`.
    """
    runs = runs_of(plan, step.stage)
    away = [run for run in runs if run.decision is not None and run.decision.what is What.UPDATE]
    yield from (_of_run(stash, run, plan) for run in away if stash is not None)
    here = _here([run for run in runs if run not in away], plan, step, bundles, stash)
    yield from _updates_elsewhere(away, plan, step, bundles, between=here)


def run_by_run(action: Action, plan: Plan) -> Iterator[Action]:
    """Yield an action of a whole stage once for each run of layers that is updated separately."""
    return (_of_run(action, run, plan) for run in runs_of(plan, action.stage))


def _here(
    runs: Sequence[_Run], plan: Plan, step: Action, bundles: Bundles, stash: Action | None
) -> Iterator[Action]:
    """Yield the device's own updates, with copies of optimizer state around them."""
    before, behind = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
    for number, run in enumerate(runs):
        if run.decision is not None:
            offload = _copy(Kind.OFFLOAD, run, "optimizer", step, bundles)
            reload = offload._replace(kind=Kind.RELOAD)
            before[max(number - run.decision.ahead, 0)].append(reload)
            behind[number].append(offload)
            behind[min(number + run.decision.behind, len(runs) - 1)].append(offload.join)
    for number, run in enumerate(runs):
        yield from before[number]
        if run.decision is not None:
            yield _copy(Kind.RELOAD, run, "optimizer", step, bundles).join
        yield from () if stash is None else (_of_run(stash, run, plan),)
        yield _step(run, plan, step)
        yield from behind[number]


def _updates_elsewhere(
    runs: Sequence[_Run], plan: Plan, step: Action, bundles: Bundles, *, between: Iterator[Action]
) -> Iterator[Action]:
    """Yield the updates of a host; `between` are the device's own updates while the last one runs."""
    gradients = [_copy(Kind.OFFLOAD, run, "gradients", step, bundles) for run in runs]
    parameters = [_copy(Kind.RELOAD, run, "parameters", step, bundles) for run in runs]
    steps = [_step(run, plan, step) for run in runs]
    yield from gradients
    for number, (offload, begun) in enumerate(zip(gradients, steps, strict=True)):
        yield offload.join
        yield begun
        yield from (steps[number - 1].join, parameters[number - 1]) if number else ()
    yield from between
    yield from (steps[-1].join, parameters[-1]) if runs else ()
    yield from (reload.join for reload in parameters)


def _step(run: _Run, plan: Plan, step: Action) -> Action:
    """Return the update of a run."""
    place = run.decision.place if run.decision is not None and run.decision.what is What.UPDATE else None
    return _of_run(step, run, plan)._replace(place=place)


def _of_run(action: Action, run: _Run, plan: Plan) -> Action:
    """Return the action for the layers of a run, without layers if it is the whole stage."""
    stage = plan.stages[action.stage]
    whole = (run.start, run.stop) == (stage.start, stage.stop)
    return action._replace(layers=None if whole else (run.start, run.stop))


def _copy(kind: Kind, run: _Run, state: StateKind, step: Action, bundles: Bundles) -> Action:
    assert run.decision is not None
    subject = named(of_layers(run.start, run.stop, state), bundles)
    return Action(kind, step.stage, subject=subject, place=run.decision.place)


def runs_of(plan: Plan, stage: int) -> list[_Run]:
    """Return the layers of a stage, divided into runs that are updated one after the other.

    Raises:
        UsageError: two decisions are about the optimizer of one layer, or a state is moved that cannot be.
    """
    place, at, runs, edges = (
        plan.stages[stage],
        plan.stages[stage].start,
        list[_Run](),
        state_edges(plan, stage),
    )
    for start, stop, decision in sorted(_decided(plan, stage), key=lambda run: run.start):
        if start < at:
            raise UsageError(f"{decision}: the optimizer state of layer {start} is already offloaded")
        runs += _free(at, start, edges)
        runs.append(_Run(start, stop, decision))
        at = stop
    return [*runs, *_free(at, place.stop, edges)]


def _free(start: int, stop: int, edges: Sequence[int]) -> Iterator[_Run]:
    """Yield layers whose optimizer state stays, cut at the ends of moved parameters or gradients."""
    cuts = [start, *(edge for edge in edges if start < edge < stop), stop]
    yield from (_Run(one, other, None) for one, other in pairwise(cuts) if one < other)


def _decided(plan: Plan, stage: int) -> Iterator[_Run]:
    """Yield the decisions about the optimizer of a stage's layers.

    Raises:
        UsageError: a decision is about weight versions, which the schedule does not have.
    """
    for decision in (d for d in plan.decisions if d.stage == stage and isinstance(d.subject, State)):
        subject = decision.subject
        assert isinstance(subject, State)
        if subject.kind == "versions" and not plan.training.endless:
            raise UsageError(
                f"{decision}: schedule {plan.training.schedule} does not keep weight versions; use "
                "pipedream or pipedream-2bw, or omit the decision"
            )
        if subject.kind == "optimizer":
            yield _Run(subject.start, subject.stop, decision)
