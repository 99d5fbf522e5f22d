"""The pass that makes recomputation explicit: the recomputed runs of layers, and the time.

If layers 3 to 5 of a stage with layers 0 to 8 are recomputed, its F and B become

    F[0:3] N[3:6] F[6:9]              the forward in pieces; an N keeps nothing but its inputs
    B[6:9] R[3:6] B[3:6] B[0:3]       the run is recomputed just before its backward

If the whole stage is recomputed, they become N and R B. With `ahead` n, a decision's R precedes the n-th
compute action before the backward, so that it may fill a bubble. (Chen et al., 2016; the place of the
recomputation: Mario, PPoPP 2025, and Lynx, 2024.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Literal

from pipefit.errors import UsageError
from pipefit.lowering.passes.collectives import cut_for_sums
from pipefit.lowering.passes.offload import state_edges
from pipefit.lowering.schedules import Order
from pipefit.schema.actions import Action, Kind
from pipefit.schema.decisions import ALL_MICROBATCHES, Decision, Microbatches, Run, State, What
from pipefit.schema.grids import Stage
from pipefit.schema.plan import Plan

# ---- Recompute settings, and the decisions that each makes
#
#     never         recompute nothing
#     always        recompute every block separately, for all microbatches: activation checkpointing per block
#     stages        recompute every stage as a whole, for all microbatches: it keeps only its inputs
#     except_last   as `stages`, for all microbatches of a step but the last, as in GPipe and torchgpipe
#     except_one    as `stages`, for all but the one whose backward comes first, which is the cheapest to keep

Recompute = Literal["never", "always", "stages", "except_last", "except_one"]
RECOMPUTE: tuple[Recompute, ...] = ("never", "always", "stages", "except_last", "except_one")

_FROM_THE_LAST = frozenset({"torchgpipe"})  # schedules whose backwards begin with the last microbatch


def recomputed_microbatches(recompute: Recompute, schedule: str, microbatches: int) -> Microbatches | None:
    """Return the microbatches of a step that are recomputed; None if none is.

    Raises:
        UsageError: no such setting; lists the known ones.
    """
    if recompute not in RECOMPUTE:
        raise UsageError(f"recompute must be one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    if recompute in ("always", "stages"):
        return ALL_MICROBATCHES
    if recompute == "never" or microbatches == 1:
        return None
    first = recompute == "except_one" and schedule not in _FROM_THE_LAST
    return Microbatches(taken=microbatches - 1, every=microbatches, first=int(first))


def recompute_decisions(
    stages: Sequence[Stage],
    edges: Sequence[int],
    recompute: Recompute,
    schedule: str,
    microbatches: int,
) -> tuple[Decision, ...]:
    """Return the decisions of a recompute setting for these stages.

    Args:
        stages: the stages.
        edges: the first layer of every block, and the number of layers.
        recompute: the setting.
        schedule: the schedule, which orders the backwards.
        microbatches: of a step.

    Raises:
        UsageError: no such setting.
    """
    which = recomputed_microbatches(recompute, schedule, microbatches)
    return tuple(
        Decision(
            stage=number,
            subject=run,
            what=What.RECOMPUTE,
            microbatches=which,
            why=f"requested by recompute={recompute}",
        )
        for number, stage in enumerate(stages)
        if which is not None
        for run in _runs(stage, edges if recompute == "always" else ())
    )


def _runs(stage: Stage, edges: Sequence[int]) -> Iterator[Run]:
    """Yield the runs of layers of a stage that are recomputed separately."""
    for start, stop in pairwise(cuts(edges, stage.start, stage.stop)):
        yield Run(start=start, stop=stop)


def cuts(edges: Sequence[int], start: int, stop: int) -> list[int]:
    """Return the edges at which layers `start` to `stop - 1` are cut, both ends included."""
    return [start, *(edge for edge in edges if start < edge < stop), stop]


# ---- Orders with recomputation

Pass = tuple[int, int | None]  # a stage and a microbatch
Piece = tuple[int, int, Decision | None]  # layers start to stop - 1, and the decision to recompute them


def recomputed(orders: Sequence[Order], plan: Plan, *, sums: bool = False) -> list[Order]:
    """Return the orders with every decision to recompute carried out.

    With `sums`, the last microbatch that goes backward in a stage does so in the buckets of gradient
    reductions; with ZeRO 2, all microbatches do.

    Raises:
        UsageError: two decisions recompute one layer for one microbatch, or a layer would compute something
        else when
            it runs again.
    """
    result = (
        recomputed_units(order, plan, summed=_last_backwards(order) if sums else ()) for order in orders
    )
    return [[action for unit in units for action in unit] for units in result]


def _last_backwards(order: Order) -> Collection[Pass]:
    """Return the microbatch that goes backward last in every stage of an order."""
    return {action.stage: action.microbatch for action in order if action.kind is Kind.BACKWARD}.items()


def recomputed_units(order: Order, plan: Plan, *, summed: Collection[Pass] = ()) -> list[list[Action]]:
    """Return the expansion of every action of one rank's order, with the recomputations before it.

    Gradients are reduced after the backwards of the stages and microbatches `summed`.

    Raises:
        UsageError: as `recomputed`.
    """
    cutting = any(
        decision.what is What.RECOMPUTE or isinstance(decision.subject, State) for decision in plan.decisions
    )
    buckets = any(stage.grid.buckets > 1 for stage in plan.stages)
    if not cutting and not buckets:
        return [[action] for action in order]
    units: list[list[Action]] = []
    early: list[list[Action]] = [[] for _ in order]  # recomputations before the unit of this number
    passes: list[int] = []  # positions of the forwards and backwards so far
    forward_of: dict[tuple[int, int | None], int] = {}  # number of passes before a microbatch's forward
    pieces_of = _Pieces(plan, summed)
    for number, action in enumerate(order):
        if action.kind not in (Kind.FORWARD, Kind.BACKWARD):
            units.append([action])
            continue
        here = len(passes)
        passes.append(number)
        stage, unit = plan.stages[action.stage], list[Action]()
        pieces = pieces_of(action.stage, action.microbatch)
        if action.kind is Kind.FORWARD:
            forward_of[action.stage, action.microbatch] = here
            unit += [_piece(action, stage, p, Kind.FORWARD_ONLY if p[2] else Kind.FORWARD) for p in pieces]
        for piece in reversed(pieces) if action.kind is Kind.BACKWARD else ():
            if piece[2] is not None:
                place = max(here - piece[2].ahead, forward_of.get((action.stage, action.microbatch), -1) + 1)
                (early[passes[place]] if place < here else unit).append(
                    _piece(action, stage, piece, Kind.RECOMPUTE)
                )
            unit.append(_piece(action, stage, piece, Kind.BACKWARD))
        units.append(unit)
    return [[*before, *unit] for before, unit in zip(early, units, strict=True)]


class _Pieces:
    """The pieces of every stage; cached for all microbatches with the same decisions.

    `summed` has the stages and microbatches after whose backward the gradients of the stage are reduced.
    """

    def __init__(self, plan: Plan, summed: Collection[Pass]) -> None:
        self._plan, self._summed = plan, summed
        self._runs: dict[int, tuple[Decision, ...]] = {}
        self._known: dict[tuple[int, tuple[bool, ...], bool], list[Piece]] = {}

    def __call__(self, stage: int, microbatch: int | None) -> list[Piece]:
        """Return the layers of a stage, cut into pieces.

        Cuts are the ends of recomputed runs of this microbatch, of moved states and of gradient buckets.

        Raises:
            UsageError: as `_divided`.
        """
        if stage not in self._runs:
            self._runs[stage] = tuple(sorted(self._plan.decisions_of(stage, What.RECOMPUTE), key=_start))
        runs = self._runs[stage]
        taken = tuple(microbatch in decision.microbatches for decision in runs)
        is_last = (stage, microbatch) in self._summed
        if (stage, taken, is_last) not in self._known:
            here = [decision for decision, is_taken in zip(runs, taken, strict=True) if is_taken]
            edges = {*state_edges(self._plan, stage), *cut_for_sums(self._plan, stage, is_last=is_last)}
            self._known[stage, taken, is_last] = _divided(self._plan, stage, here, microbatch, sorted(edges))
        return self._known[stage, taken, is_last]


def _divided(
    plan: Plan, stage: int, runs: Sequence[Decision], microbatch: int | None, edges: Sequence[int]
) -> list[Piece]:
    """Return the layers of a stage, cut at the ends of these ordered runs, and at other `edges`.

    Raises:
        UsageError: two decisions recompute one layer, or a layer computes something else when it runs again.
    """
    place = plan.stages[stage]
    pieces: list[Piece] = []
    at = place.start
    for decision in runs:
        assert isinstance(decision.subject, Run)
        start, stop = decision.subject.start, decision.subject.stop
        if start < at:
            raise UsageError(f"{decision}: layer {start} is already recomputed for microbatch {microbatch}")
        pieces += [(at, start, None)] if at < start else []
        pieces.append((start, stop, decision))
        at = stop
    pieces += [(at, place.stop, None)] if at < place.stop else []
    pieces = [cut for piece in pieces for cut in _cut(piece, edges)]
    _check_repeatable(plan, stage, pieces)
    return pieces


def _cut(piece: Piece, edges: Sequence[int]) -> list[Piece]:
    """Cut a piece at the ends of moved parameters, gradients or weight versions.

    Raises:
        UsageError: such an end is within a run that is recomputed as a whole.
    """
    start, stop, decision = piece
    inside = [edge for edge in edges if start < edge < stop]
    if inside and decision is not None:
        raise UsageError(
            f"{decision}: offloaded state starts or ends at layer {inside[0]}, within this run: offload the "
            "state of runs that contain all of these layers or none, or recompute in two runs"
        )
    cuts = [start, *inside, stop]
    return [(one, other, decision) for one, other in pairwise(cuts)]


def _start(decision: Decision) -> int:
    assert isinstance(decision.subject, Run)
    return decision.subject.start


def _check_repeatable(plan: Plan, stage: int, pieces: Sequence[Piece]) -> None:
    """Check that every recomputed layer computes the same again, and so does the loss.

    Raises:
        UsageError: one does not.
    """
    measured, count = plan.measurement, len(plan.profile.layers)
    for start, stop, decision in pieces:
        for layer in range(start, stop + (stop == count)) if decision is not None else ():
            is_loss = layer == count  # the loss is recomputed with the last layer
            why = (measured.loss if is_loss else measured.kinds[measured.layers[layer]]).unrepeatable
            if why:
                what = "the loss" if is_loss else f"layer {layer} ({plan.profile.layers[layer]})"
                raise UsageError(
                    f"stage {stage} cannot recompute {what}, which {why}, because a second forward may "
                    "differ from the first: recompute other runs of layers, or none; or keep state that a "
                    "forward changes in buffers, and draw from torch's default generator"
                )


def _piece(action: Action, stage: Stage, piece: Piece, kind: Kind) -> Action:
    """Return the action for one piece, without layers if the piece is the whole stage."""
    layers = piece[:2]
    return Action(
        kind, action.stage, action.microbatch, None if layers == (stage.start, stage.stop) else layers
    )
