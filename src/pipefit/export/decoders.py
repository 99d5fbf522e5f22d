"""A plan of a decoder as other tools have it: an embedding, equal blocks, and a head, in stages of equal grids.

Tools for language models divide nothing else: all stages have as many replicas, of as many shards. They know neither
tensors that move nor schedules of pipefit's own. What they cannot do is refused, all of it in one sentence, so that a
file never trains another way than the plan says, but for recomputation: they recompute whole blocks, for all
microbatches, so that a block of which the plan recomputes a part is recomputed whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

from pipefit.errors import UsageError
from pipefit.schema.decisions import What
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """How many blocks each stage has, and how many of these are recomputed."""

    blocks: tuple[int, ...]
    recomputed: tuple[int, ...]
    sequence: int
    bounds: tuple[int, ...]  # of stages, in blocks of pipefit: embedding and head count
    norm: int  # the stage that has what follows the last block, which is the norm before the head, or both
    tied: bool  # embedding and head share their weights
    grid: Grid  # that of the first stage; all others are like it

    def each(self, samples: int) -> int:
        """What a replica computes of so many samples."""
        return samples // self.grid.data

    @property
    def layers(self) -> int:
        """Blocks in all."""
        return sum(self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a tool can do, in pipefit's words: its name, and values of options of `pipefit plan`."""

    tool: str
    schedules: Collection[str]
    precisions: Collection[str]
    shards: Collection[str]  # what replicas may divide
    tensor: bool  # whether layers may be divided


def decoder_of(plan: Plan, able: Abilities) -> Decoder:
    """The plan as stages of decoder blocks, for a tool that is able to do this.

    Raises:
        UsageError: the plan does what `tool` cannot, or its model is no decoder of equal blocks; says what, and what to
            plan instead.
    """
    tool = able.tool
    _check(plan, able)
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
        grid=plan.stages[0].grid,
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


def _check(plan: Plan, able: Abilities) -> None:
    """Check that the tool can do what the plan does outside of the model's layers; all that it cannot is told at once.

    Raises:
        UsageError: it cannot; names what, and the options to plan with.
    """
    found = dict(_impossible(plan, able))
    if found:
        raise UsageError(f"{able.tool} has no {', nor '.join(found.values())}: plan with {' '.join(found)}")


def _impossible(plan: Plan, able: Abilities) -> Iterator[tuple[str, str]]:
    """For each thing that the tool has not: the options to plan with, and what it is."""
    if plan.training.schedule not in able.schedules:
        yield f"--schedule {' or '.join(able.schedules)}", f"schedule {plan.training.schedule}"
    if plan.training.precision not in able.precisions:
        yield f"--precision {' or '.join(able.precisions)}", f"precision {plan.training.precision}"
    grids = Counter((stage.grid.data, stage.grid.tensor) for stage in plan.stages)
    ((data, tensor), _), *others = grids.most_common()
    if others or (tensor > 1 and not able.tensor):
        what = "replicas or shards that differ from stage to stage" if others else "tensor shards in its pipelines"
        yield f"--data {data} --tensor {tensor if able.tensor else 1}", what
    shards = {stage.grid.shard for stage in plan.stages if stage.grid.data > 1}
    if len(shards) > 1 or not shards <= {*able.shards}:
        yield f"--shard {' or '.join(able.shards)}", f"replicas that divide {' or '.join(sorted(shards))}"
    if len(plan.workers) < sum(len(stage.devices) for stage in plan.stages):
        yield "--stages N, one for each device", "device with several stages"
    if moved := next((one for one in plan.decisions if one.what is not What.RECOMPUTE), None):
        yield "--planner exact (and --recompute always if that does not fit)", f"tensors that move ({moved})"


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
