"""A plan of a decoder as other tools have it: an embedding, equal blocks, and a head, in stages of one device each.

Tools for language models divide nothing else, and know neither tensors that move nor schedules of pipefit's own. What
they cannot do is refused, so that a file never trains another way than the plan says, but for recomputation: they
recompute whole blocks, for all microbatches, so that a block of which the plan recomputes a part is recomputed whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from pipefit.decisions import What
from pipefit.errors import UsageError
from pipefit.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """How many blocks each stage has, and how many of these are recomputed."""

    blocks: tuple[int, ...]
    recomputed: tuple[int, ...]
    sequence: int
    bounds: tuple[int, ...]  # of stages, in blocks of pipefit: embedding and head count
    norm: int  # the stage that has what follows the last block, which is the norm before the head, or both
    tied: bool  # embedding and head share their weights

    @property
    def layers(self) -> int:
        """Blocks in all."""
        return sum(self.blocks)


def decoder_of(plan: Plan, tool: str, schedules: Collection[str], precisions: Collection[str]) -> Decoder:
    """The plan as stages of decoder blocks, for a tool with these schedules and precisions, in pipefit's words.

    Raises:
        UsageError: the plan does what `tool` cannot, or its model is no decoder of equal blocks; says what, and what to
            plan instead.
    """
    _check(plan, tool, schedules, precisions)
    edges = plan.profile.edges
    if not {stage.start for stage in plan.stages} <= set(edges):
        raise UsageError(f"a stage begins inside a block, which {tool} does not divide: plan with granularity blocks")
    first, last = _equal(plan, tool)
    bounds = tuple(edges.index(layer) for layer in (*(stage.start for stage in plan.stages), edges[-1]))
    touched = {layer for decision in plan.decisions for layer in range(decision.layers[0], decision.layers[-1] + 1)}
    whole = [bool(touched & set(range(*pair))) for pair in pairwise(edges)]
    inside = [range(max(start, first), min(stop, last)) for start, stop in pairwise(bounds)]
    return Decoder(
        blocks=tuple(map(len, inside)),
        recomputed=tuple(sum(whole[block] for block in blocks) for blocks in inside),
        sequence=max(plan.profile.fingerprint.lengths, default=0),
        bounds=bounds,
        norm=max(stage for stage, start in enumerate(bounds[:-1]) if start <= last),
        tied=_tied(plan, tool, edges[first], edges[last]),
    )


def check_tokens(plan: Plan, tool: str) -> None:
    """Check that samples are sequences of tokens: a tool that brings its own embedding reads nothing else.

    Raises:
        UsageError: they are something else, such as pictures.
    """
    if not plan.profile.fingerprint.lengths:
        raise UsageError(
            f"{plan.profile.model} reads {' and '.join(plan.profile.fingerprint.inputs) or 'no tokens'}: {tool} trains "
            "models of sequences of tokens only"
        )


def _check(plan: Plan, tool: str, schedules: Collection[str], precisions: Collection[str]) -> None:
    for what, asked, known in (("schedule", plan.training.schedule, schedules),
                               ("precision", plan.training.precision, precisions)):  # fmt: skip
        if asked not in known:
            raise UsageError(f"{tool} has no {what} {asked}: plan with --{what} {' or '.join(known)}")
    if any(len(stage.devices) > 1 for stage in plan.stages) or len(set(plan.placement)) < len(plan.stages):
        raise UsageError(f"{tool} takes stages of one device each, in their order: plan with --data 1 --tensor 1")
    moved = [decision for decision in plan.decisions if decision.what is not What.RECOMPUTE]
    if moved:
        raise UsageError(
            f"{moved[0]}: {tool} does not move tensors as plans say: plan with --planner exact, and --recompute always "
            "if that does not fit"
        )


def _tied(plan: Plan, tool: str, first: int, last: int) -> bool:
    """Whether embedding and head share parameters; the blocks are layers `first` to `last - 1`.

    Raises:
        UsageError: other layers share one.
    """
    for shared in plan.measurement.shared:
        if any(first <= user < last for user in shared.users):
            raise UsageError(f"layers share {shared.name}: {tool} shares nothing but the weights of embedding and head")
    return bool(plan.measurement.shared)


def _equal(plan: Plan, tool: str) -> tuple[int, int]:
    """The first of the model's equal blocks, and the one behind the last.

    Raises:
        UsageError: they do not follow each other with something before and behind them.
    """
    kinds = plan.measurement.layers
    blocks = [kinds[start:stop] for start, stop in pairwise(plan.profile.edges)]
    kind, count = Counter(blocks).most_common(1)[0]
    first = blocks.index(kind)
    if first == 0 or first + count == len(blocks) or set(blocks[first : first + count]) != {kind}:
        raise UsageError(
            f"{plan.profile.model} is no decoder as {tool} has them: an embedding, equal blocks one behind the other, "
            "and a head"
        )
    return first, first + count
