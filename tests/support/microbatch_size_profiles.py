"""Made-up profiles of several microbatch sizes, with activations proportional to the samples; plans of
replicas for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import LayerCost, Origin, SavedTensor, Span, Value, Work
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement, ModelProfile
from pipefit.schema.training import Training
from support.synthetic_models import profile as profile_of


def sized(
    of: Measurement, *sizes: int, fixed: Sequence[int] = (), blocks: Sequence[int] = ()
) -> ModelProfile:
    """Return a profile at these sizes, of layers that `of` has for one sample.

    Values have their samples along the first dimension; values whose bytes are in `fixed` have no samples.
    """
    measurements = tuple(_of_samples(of, size, frozenset(fixed)) for size in sizes)
    return replace(profile_of(of, blocks=blocks), measurements=measurements)


def written(
    profile: ModelProfile,
    cluster: Cluster,
    how: Training,
    edges: Sequence[int],
    degrees: Sequence[int],
    recompute: Recompute = "never",
) -> Plan:
    """Return the plan of stages between these edges, each on consecutive devices."""
    firsts = [0, *accumulate(degrees)]
    stages = tuple(
        Stage(
            start=start, stop=stop, grid=Grid(devices=tuple(range(firsts[n], firsts[n + 1])), data=degrees[n])
        )
        for n, (start, stop) in enumerate(pairwise(edges))
    )
    decisions = recompute_decisions(stages, profile.edges, recompute, how.schedule, how.microbatches)
    return Plan(profile=profile, cluster=cluster, training=how, stages=stages, decisions=decisions)


def _of_samples(of: Measurement, samples: int, fixed: frozenset[int]) -> Measurement:
    def cost(one: LayerCost) -> LayerCost:
        return _larger(one, samples, fixed)

    return replace(of, microbatch_size=samples, kinds=tuple(map(cost, of.kinds)), loss=cost(of.loss))


def _larger(cost: LayerCost, samples: int, fixed: frozenset[int]) -> LayerCost:
    def value(one: Value) -> Value:
        if one.nbytes in fixed:
            return one
        return replace(one, shape=(samples, one.nbytes), nbytes=samples * one.nbytes)

    def saved(one: SavedTensor) -> SavedTensor:
        origin: Origin = one.origin
        if origin.kind == "input":
            return replace(one, nbytes=value(cost.inputs[origin.index]).nbytes)
        return replace(one, nbytes=samples * one.nbytes) if origin.kind == "own" else one

    def spans(ones: Sequence[Span]) -> tuple[Span, ...]:
        return tuple(replace(one, peak_bytes=samples * one.peak_bytes) for one in ones)

    def work(one: Work) -> Work:
        seconds = None if one.seconds is None else one.seconds * (1 + samples)
        return replace(one, seconds=seconds)

    return replace(
        cost,
        inputs=tuple(map(value, cost.inputs)),
        outputs=tuple(map(value, cost.outputs)),
        storages=tuple(samples * nbytes for nbytes in cost.storages),
        saved=tuple(map(saved, cost.saved)),
        forward_peak_bytes=samples * cost.forward_peak_bytes,
        checkpoint_peak_bytes=samples * cost.checkpoint_peak_bytes,
        backward_first=spans(cost.backward_first),
        backward_later=spans(cost.backward_later),
        inner_first=spans(cost.inner_first),
        inner_later=spans(cost.inner_later),
        gradient_storages=tuple(samples * nbytes for nbytes in cost.gradient_storages),
        forward=work(cost.forward),
        backward=work(cost.backward),
    )
