"""The model specialized to microbatches that differ from the plan's: smaller ones, and those of an evaluation.

Layers that were written as modules accept any batch size and obey `train()` and `eval()`; only the shapes at their
boundaries change. Layers that were traced hold for one batch size and one mode: for another, the model is traced again
over fake tensors, and the new layers get the parameters and buffers of the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.cuda_autocast import casting_for
from pipefit.capture.sample import sample
from pipefit.capture.structure import Values
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.fake.chain import fake_chain
from pipefit.fake.target import FakeTarget
from pipefit.layer_costs import Value
from pipefit.plans import Plan
from pipefit.profiles import Measurement

Boundaries = tuple[tuple[Value, ...], ...]  # the values before every layer, and after the last
Layers = tuple[ChainLayer, ...]


@dataclass(frozen=True, slots=True)
class Specialization:
    """The stages of this process for one microbatch size and mode, by their numbers.

    `layers` are those of a stage, `boundaries` the values at all boundaries of the model in the stage's slice of a
    microbatch, and `samples` the size of the slice.
    """

    layers: Mapping[int, Layers]
    boundaries: Mapping[int, Boundaries]
    samples: Mapping[int, int]

    @staticmethod
    def usual(plan: Plan, layers: Mapping[int, Layers]) -> Specialization:
        """The specialization to the microbatches of the plan."""
        measured = {number: plan.measured(number) for number in layers}
        samples = {number: one.microbatch_size for number, one in measured.items()}
        return Specialization(layers, {number: boundaries(one) for number, one in measured.items()}, samples)


class _Made(NamedTuple):
    """The model for slices of one size: the values at all boundaries, and layers of the stages if they were traced."""

    boundaries: Boundaries
    layers: Mapping[int, Layers]


class Specializations:
    """The specializations of the stages of one device, each made when it is first needed."""

    def __init__(self, task: Task, plan: Plan, layers: Mapping[int, Layers], *, traced: bool) -> None:
        self.task, self.plan, self.traced = task, plan, traced
        self._usual = Specialization.usual(plan, layers)
        self._known = {(plan.training.microbatch_size, True): self._usual}
        self._made: dict[tuple[int, bool], _Made] = {}

    def of_all(self, sizes: Sequence[int], training: bool) -> list[Specialization]:
        """The specializations to microbatches of these sizes."""
        return [self.of(size, training=training) for size in sizes]

    def of(self, size: int, *, training: bool) -> Specialization:
        """The specialization to microbatches of `size` samples.

        Raises:
            UsageError: traced for this size or mode, the model has other layers than in the plan.
        """
        mode = training or not self.traced  # layers that are modules obey train() and eval()
        key = size, mode
        if key not in self._known:
            samples = {number: size // self.plan.stages[number].grid.data for number in self._usual.layers}
            made = {number: self._of_slices(count, training=mode) for number, count in samples.items()}
            self._known[key] = Specialization(
                {number: one.layers.get(number, self._usual.layers[number]) for number, one in made.items()},
                {number: one.boundaries for number, one in made.items()},
                samples,
            )
        return self._known[key]

    def _of_slices(self, size: int, *, training: bool) -> _Made:
        """The model for slices of so many samples."""
        key = size, training
        if key not in self._made:
            self._made[key] = self._make(size, training=training)
        return self._made[key]

    def _make(self, size: int, *, training: bool) -> _Made:
        like = sample(self.task, size)
        target = self.plan.cluster.target
        with torch.inference_mode(mode=False), casting_for(target), FakeTarget("cpu") as fake:
            # An evaluation may run in inference mode; and a GPU that trains is left alone.
            chain = fake_chain(self.task, fake, like, training=training, target=target)
            self._check(chain, size, training=training)
            found = _run(chain.measured(self.plan.measurement), tuple(map(fake.fake, chain.flatten(like[0]))))
        values = tuple(
            tuple(_shaped(value, tensor) for value, tensor in zip(known, tensors, strict=True))
            for known, tensors in zip(boundaries(self.plan.measurement), found, strict=True)
        )
        return _Made(values, self._rebound(chain) if self.traced else {})

    def _check(self, chain: Chain, size: int, *, training: bool) -> None:
        """Refuse a chain whose layers are not the plan's."""
        if tuple(layer.name for layer in chain.layers) != self.plan.profile.layers:
            mode = "training" if training else "evaluation"
            raise UsageError(
                f"{self.task.name} has other layers than the plan when it is traced for {mode} with {size} samples: "
                "use batches that divide into the plan's microbatches, and evaluate with a module of your own"
            )

    def _rebound(self, chain: Chain) -> dict[int, Layers]:
        """The new layers of the device's stages, with the parameters and buffers of the old ones."""
        return {
            stage: tuple(
                replace(new, module=_rebind(new, old))
                for new, old in zip(chain.layers[place.start : place.stop], self._usual.layers[stage], strict=True)
            )
            for stage, place in enumerate(self.plan.stages)
            if stage in self._usual.layers
        }


def boundaries(measurement: Measurement) -> Boundaries:
    """The values before every layer, and after the last."""
    costs = measurement.costs
    return (*(cost.inputs for cost in costs), costs[-1].outputs)


def _run(chain: Chain, values: Values) -> list[Values]:
    found = [values]
    for layer in chain.layers:
        values = layer(values)
        found.append(values)
    return found


def _shaped(value: Value, tensor: Tensor) -> Value:
    return replace(value, shape=tuple(tensor.shape), nbytes=tensor.numel() * tensor.element_size())


def _rebind(new: ChainLayer, old: ChainLayer) -> nn.Module:
    """The new layer's module with the parameters and buffers of the old one's.

    Raises:
        UsageError: the new module needs a tensor that the old one does not have.
    """
    local: dict[str, Tensor] = {**dict(old.module.named_parameters()), **dict(old.module.named_buffers())}
    original = {old.originals[name]: tensor for name, tensor in local.items() if name in old.originals}
    for name in [n for n, _ in (*new.module.named_parameters(), *new.module.named_buffers())]:
        path, _, attribute = name.rpartition(".")
        part = new.module.get_submodule(path)
        tensor = original.get(new.originals.get(name, ""), local.get(name))
        if tensor is None:
            raise UsageError(
                f"{new.name} needs {name} in this mode, which it does not have in training: evaluate with a module of "
                "your own"
            )
        place = part._parameters if attribute in part._parameters else part._buffers
        place[attribute] = tensor  # type: ignore[assignment]
    return new.module
