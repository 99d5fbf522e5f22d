"""A decoder's plan for other tools: an embedding, equal blocks and a head, in stages of equal grids.

Tools for language models support only this: all stages have the same numbers of replicas and shards, without
offloading and without pipefit's own schedules. Everything that a tool cannot do is refused, in one sentence,
so that a file never trains differently from the plan, except for recomputation: tools recompute whole blocks,
for all microbatches, so a partly recomputed block is recomputed whole.
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
    """The blocks of each stage, and the recomputed blocks among them."""

    blocks: tuple[int, ...]
    recomputed: tuple[int, ...]
    sequence: int
    bounds: tuple[int, ...]  # of stages, in pipefit's blocks, including embedding and head
    norm: int  # the stage with the first block after the equal ones: the norm before the head, or both
    tied: bool  # whether embedding and head share their weights
    grid: Grid  # of the first stage; all others are equal

    def each(self, samples: int) -> int:
        """Return the local batch of a replica, from `samples`."""
        return samples // self.grid.data

    @property
    def layers(self) -> int:
        """The total number of blocks."""
        return sum(self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The abilities of a tool: its name, and values of `pipefit plan`'s options."""

    tool: str
    schedules: Collection[str]
    precisions: Collection[str]
    shards: Collection[str]  # state that replicas may divide
    tensor: bool  # whether layers may be divided


def decoder_of(plan: Plan, able: Abilities) -> Decoder:
    """Convert the plan to stages of decoder blocks, for a tool with these abilities.

    Raises:
        UsageError: the tool does not support the plan, or its model is not a decoder of equal blocks; says
            why, and what to plan instead.
    """
    tool = able.tool
    _check(plan, able)
    edges = plan.profile.edges
    if not {stage.start for stage in plan.stages} <= set(edges):
        raise UsageError(
            f"a stage starts inside a block, which {tool} does not split: plan with granularity blocks"
        )
    first, last = _equal(plan, tool)
    bounds = tuple(edges.index(layer) for layer in (*(stage.start for stage in plan.stages), edges[-1]))
    touched = {
        layer for decision in plan.decisions for layer in range(decision.layers[0], decision.layers[-1] + 1)
    }
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
    """Check that samples are sequences of tokens, which a tool's own embedding needs.

    Raises:
        UsageError: they are something else, such as pictures.
    """
    if not plan.profile.fingerprint.lengths:
        raise UsageError(
            f"{plan.profile.model} reads {' and '.join(plan.profile.fingerprint.inputs) or 'no tokens'}, "
            f"but {tool} trains only models of token sequences"
        )


def _check(plan: Plan, able: Abilities) -> None:
    """Check that the tool supports the plan outside of the model's layers; reports all obstacles at once.

    Raises:
        UsageError: it does not; names the obstacles, and the options to plan with.
    """
    result = dict(_impossible(plan, able))
    if result:
        raise UsageError(
            f"{able.tool} does not support {', or '.join(result.values())}: plan with {' '.join(result)}"
        )


def _impossible(plan: Plan, able: Abilities) -> Iterator[tuple[str, str]]:
    """Yield the options to plan with, and the description, of each obstacle."""
    if plan.training.schedule not in able.schedules:
        yield f"--schedule {' or '.join(able.schedules)}", f"schedule {plan.training.schedule}"
    if plan.training.precision not in able.precisions:
        yield f"--precision {' or '.join(able.precisions)}", f"precision {plan.training.precision}"
    grids = Counter((stage.grid.data, stage.grid.tensor) for stage in plan.stages)
    ((data, tensor), _), *others = grids.most_common()
    if others or (tensor > 1 and not able.tensor):
        what = (
            "replicas or shards that differ from stage to stage"
            if others
            else "tensor shards in its pipelines"
        )
        yield f"--data {data} --tensor {tensor if able.tensor else 1}", what
    shards = {stage.grid.shard for stage in plan.stages if stage.grid.data > 1}
    if len(shards) > 1 or not shards <= {*able.shards}:
        yield f"--shard {' or '.join(able.shards)}", f"replicas that shard {' or '.join(sorted(shards))}"
    if len(plan.workers) < sum(len(stage.devices) for stage in plan.stages):
        yield "--stages N, one for each device", "several stages on a device"
    if moved := next((decision for decision in plan.decisions if decision.what is not What.RECOMPUTE), None):
        yield "--planner exact (and --recompute always if that does not fit)", f"offloaded tensors ({moved})"


def _tied(plan: Plan, tool: str, first: int, last: int) -> bool:
    """Return whether embedding and head share parameters; the blocks are layers `first` to `last - 1`.

    Raises:
        UsageError: other layers share one.
    """
    for shared in plan.measurement.shared:
        if any(first <= user < last for user in shared.users):
            raise UsageError(
                f"layers share {shared.name}, but {tool} can only share the weights of embedding and head"
            )
    return bool(plan.measurement.shared)


def _equal(plan: Plan, tool: str) -> tuple[int, int]:
    """Return the half-open range of the model's equal blocks.

    Raises:
        UsageError: they are not consecutive, with other blocks before and after them.
    """
    kinds = plan.measurement.layers
    blocks = [kinds[start:stop] for start, stop in pairwise(plan.profile.edges)]
    kind, count = Counter(blocks).most_common(1)[0]
    first = blocks.index(kind)
    if first == 0 or first + count == len(blocks) or set(blocks[first : first + count]) != {kind}:
        raise UsageError(
            f"{plan.profile.model} is not a decoder in the form that {tool} needs: an embedding, "
            "consecutive equal blocks, and a head"
        )
    return first, first + count
