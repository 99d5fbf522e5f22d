"""Weights that a forward changes, and what a plan may not do with them: another copy would miss the change.

`nn.Embedding(max_norm=...)` scales rows of its weight down as it reads them. The change has to reach the weights that
the next forward reads and the next update starts from. So they are one tensor, which stays on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipefit.decisions import Decision, State, What
from pipefit.errors import UsageError
from pipefit.plans import Plan


def check_changed_weights(plan: Plan, ranks: Iterable[int]) -> None:
    """Check that no parameter that a forward of these ranks changes has a copy elsewhere.

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
                for where, instead in _elsewhere(plan, number, layer, is_trained=parameter.trainable, copied=copied):
                    raise UsageError(
                        f"layer {plan.profile.layers[layer]} changes its parameter {parameter.name!r} in its forward, "
                        f"as nn.Embedding(max_norm=...) does, and {where}, which would miss the change: {instead}"
                    )


def _elsewhere(plan: Plan, number: int, layer: int, *, is_trained: bool, copied: bool) -> Iterator[tuple[str, str]]:
    """What has another copy of a parameter of a layer in stage `number`, and what to do instead.

    It is `copied` where autocast computes with a copy of it, which has the weight's values from before the forward.
    """
    training, moved = plan.training, list(_moved(plan, number, layer))
    for decision in moved if is_trained else [one for one in moved if one.what is What.OFFLOAD]:
        yield f"the plan has it elsewhere too ({decision})", "leave the parameters of this layer on its device"
    if is_trained and training.endless:
        yield f"schedule {training.schedule} has several versions of it", "use schedule 1f1b"
    if is_trained and training.precision.startswith("master-"):
        instead = f"use precision {training.precision.replace('master', 'mixed')}, or float32"
        yield f"precision {training.precision} updates a float32 copy of it", instead
    if copied:
        yield f"precision {training.precision} computes with a half-precision copy of it", "use precision float32"


def _moved(plan: Plan, number: int, layer: int) -> Iterator[Decision]:
    """The decisions by which the parameters of a layer are elsewhere too: updated there, or away between passes."""
    for decision in plan.decisions:
        state = decision.subject
        if decision.stage != number or not isinstance(state, State) or not state.start <= layer < state.stop:
            continue
        if decision.what is What.UPDATE or state.kind == "parameters":
            yield decision
