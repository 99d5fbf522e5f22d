"""The chains from which a run takes its stages: each for the size of the stage's slices, and its own for each replica.

Replicas start equal: all but the first get copies of the module's tensors. A stage takes its layers from a chain that
was captured for the samples that it computes, because traced layers hold for one number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from pipefit.capture.chain import Chain
from pipefit.capture.model import capture
from pipefit.capture.refused_modules import copy_of
from pipefit.capture.sample import sample
from pipefit.capture.shared import Shared
from pipefit.capture.task import Task
from pipefit.plans import Plan
from pipefit.runtime.plan_check import check_model

MakeChain = Callable[[int, int], Chain]  # for so many samples, and for a replica


class Source(NamedTuple):
    """A chain, and the parameters that its layers shared before stages got copies of their own."""

    chain: Chain
    shared: Sequence[Shared]

    @staticmethod
    def of(chain: Chain) -> Source:
        """A chain whose stages have no copies yet."""
        return Source(chain, chain.shared)


class Sources:
    """The chains of a run's stages.

    Args:
        whole: that of the first replica for the plan's microbatches.
        make: makes the others, when a stage needs one.
    """

    def __init__(self, plan: Plan, whole: Source, make: MakeChain) -> None:
        self._plan, self._make = plan, make
        self._known = {(plan.training.microbatch_size, 0): whole}

    def of(self, stage: int, device: int) -> Source:
        """The chain of a stage on a device, as it was measured for the stage's slices."""
        samples, replica = self._plan.measured(stage).microbatch_size, self._plan.stages[stage].grid.replica_of(device)
        if (samples, replica) not in self._known:
            self._known[samples, replica] = Source.of(self._make(samples, replica))
        return self._known[samples, replica]


def trained_sources(plan: Plan, built: Task, whole: Chain, *, copies: bool) -> Sources:
    """The chains of a training of the module of `built`, of which `whole` is the chain for the plan's microbatches.

    With `copies`, replicas other than the first get copies of the module: where one process runs them all.
    """
    target = plan.cluster.target

    def make(samples: int, replica: int) -> Chain:
        task = replace(built, module=_copy(built)) if copies and replica else built
        chain = capture(task, *sample(built, samples), target=target)
        check_model(plan, built, chain, samples)
        return chain

    return Sources(plan, Source.of(whole), make)


def _copy(built: Task) -> nn.Module:
    assert isinstance(built.module, nn.Module)
    return copy_of(built.module, built.name, lambda tensor: tensor.detach().clone())
