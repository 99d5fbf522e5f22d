"""Model specialized to microbatches that differ from the plan's: smaller ones, and those of an evaluation.

Layers that are modules accept any batch size and obey `train()` and `eval()`; only the shapes at their
boundaries change. Traced layers, and layers of tensor-parallel ranks, hold for one batch size and one mode:
for another, the model is traced again over fake tensors, once for all devices of the process, and the new
layers get the parameters and buffers of the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipefit.capture import Chain, ChainLayer, Task, Values, casting_for
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.fake_cuda.chain import fake_chain, layers_again
from pipefit.fake_cuda.target import FakeTarget
from pipefit.runtime.engine.in_flight import Loss
from pipefit.runtime.engine.replicas import RankShards
from pipefit.schema.grids import Stage
from pipefit.schema.layer_costs import Value
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.tensor_parallel import RankLoss, ShardedChain, shard_chain
from pipefit.texts import counted

Boundaries = tuple[tuple[Value, ...], ...]  # values before every layer, and after the last


class Specialized(NamedTuple):
    """The layers of a stage, and the loss after the last, for one microbatch size and mode.

    `shards` describes the tensor shards of the layers of a tensor-parallel rank.
    """

    layers: tuple[ChainLayer, ...]
    loss: Loss
    shards: RankShards | None = None


@dataclass(frozen=True, slots=True)
class Specialization:
    """The stages of a device for one microbatch size and mode, by their numbers.

    `boundaries` are the values at all boundaries of the model in the stage's local batch, and `samples` is
    the size of the local batch.
    """

    stages: Mapping[int, Specialized]
    boundaries: Mapping[int, Boundaries]
    samples: Mapping[int, int]

    @staticmethod
    def usual(plan: Plan, stages: Mapping[int, Specialized]) -> Specialization:
        """Return the specialization to the plan's microbatches."""
        measured = {number: plan.measured(number) for number in stages}
        samples = {number: measurement.microbatch_size for number, measurement in measured.items()}
        return Specialization(stages, {number: boundaries(one) for number, one in measured.items()}, samples)


class _Made(NamedTuple):
    """The model for local batches of one size.

    It has the values at all boundaries, and the stages that differ from the usual ones.
    """

    boundaries: Boundaries
    stages: Mapping[int, Specialized]


class _Retraced(NamedTuple):
    """The model traced for `like`, over tensors of `fake`, and its divisions, by those of the usual chains.

    Stages get copies of the layers.
    """

    chain: Chain
    fake: FakeTarget
    values: Values
    targets: Values
    boundaries: Boundaries
    divided: dict[ShardedChain, ShardedChain]

    def layers(self, place: Stage) -> tuple[ChainLayer, ...]:
        """Return new layers of a stage."""
        return layers_again(self.chain.layers[place.start : place.stop], self.fake)

    def divided_like(self, known: ShardedChain) -> ShardedChain:
        """Return the model, divided as in `known`."""
        if known not in self.divided:
            self.divided[known] = shard_chain(
                self.chain, known.ranks, self.values, self.targets, sequences=known.sequences, like=known
            )
        return self.divided[known]


class Retracing:
    """The model traced again, once for each number of samples and mode, for all devices of a process."""

    def __init__(self, task: Task, plan: Plan) -> None:
        self.task, self.plan = task, plan
        self._known: dict[tuple[int, bool], _Retraced] = {}

    def of(self, size: int, *, training: bool) -> _Retraced:
        """Return the model for local batches of `size` samples.

        Raises:
            UsageError: it has other layers than in the plan.
        """
        key = size, training
        if key not in self._known:
            self._known[key] = self._trace(size, training=training)
        return self._known[key]

    def _trace(self, size: int, *, training: bool) -> _Retraced:
        inputs, targets = like = sample(self.task, size)
        target, fake = self.plan.cluster.target, FakeTarget("cpu")
        with casting_for(target), fake:
            chain = fake_chain(self.task, fake, like, training=training, target=target)
            self._check(chain, size, training=training)
            chain = chain.measured(self.plan.measurement)
            values = tuple(map(fake.fake, chain.flatten(inputs)))
            tensors = _run(chain, values)
            wanted = tuple(map(fake.fake, chain.flatten_targets(targets)))
        shapes = tuple(
            tuple(_shaped(value, tensor) for value, tensor in zip(known, made, strict=True))
            for known, made in zip(boundaries(self.plan.measurement), tensors, strict=True)
        )
        return _Retraced(chain, fake, values, wanted, shapes, {})

    def _check(self, chain: Chain, size: int, *, training: bool) -> None:
        """Check that a chain's layers are the plan's."""
        if tuple(layer.name for layer in chain.layers) != self.plan.profile.layers:
            mode, way = (
                ("training", "use batches that divide into the plan's microbatches")
                if training
                else ("evaluation", "evaluate with a separate module that loads trainer.state_dict()")
            )
            raise UsageError(
                f"{self.task.name} traced for {mode} with {counted(size, 'sample')} has other layers than "
                f"the plan: {way}"
            )


class Specializations:
    """The specializations of the stages of one device, each made at its first use.

    Args:
        retracing: the model for other sizes and modes, shared by the devices of a process.
        usual: the stages for the plan's microbatches.
        traced: whether the model was traced.
    """

    def __init__(self, retracing: Retracing, usual: Specialization, *, traced: bool) -> None:
        self.plan, self._retracing, self._usual = retracing.plan, retracing, usual
        self._fixed = {
            number: traced or specialized.shards is not None for number, specialized in usual.stages.items()
        }
        self._known = {(self.plan.training.microbatch_size, True): usual}
        self._made: dict[tuple[int, bool], _Made] = {}

    def of_all(self, sizes: Sequence[int], training: bool) -> list[Specialization]:
        """Return the specializations to microbatches of these sizes."""
        return [self.of(size, training=training) for size in sizes]

    def of(self, size: int, *, training: bool) -> Specialization:
        """Return the specialization to microbatches of `size` samples.

        Raises:
            UsageError: traced for this size or mode, the model has other layers than in the plan.
        """
        mode = training or not any(self._fixed.values())  # layers that are modules obey train() and eval()
        key = size, mode
        if key not in self._known:
            samples = {number: size // self.plan.stages[number].grid.data for number in self._usual.stages}
            made = {number: self._of_slices(count, training=mode) for number, count in samples.items()}
            self._known[key] = Specialization(
                {number: one.stages.get(number, self._usual.stages[number]) for number, one in made.items()},
                {number: one.boundaries for number, one in made.items()},
                samples,
            )
        return self._known[key]

    def _of_slices(self, size: int, *, training: bool) -> _Made:
        """Return the model for local batches of `size` samples, made once."""
        key = size, training
        if key not in self._made:
            self._made[key] = self._make(size, training=training)
        return self._made[key]

    def _make(self, size: int, *, training: bool) -> _Made:
        # An evaluation may run in inference mode; and a GPU that trains stays untouched.
        with torch.inference_mode(mode=False):
            model = self._retracing.of(size, training=training)
            with casting_for(self.plan.cluster.target), model.fake:
                stages = {n: self._respecialized(n, model) for n, fixed in self._fixed.items() if fixed}
        return _Made(model.boundaries, stages)

    def _respecialized(self, stage: int, model: _Retraced) -> Specialized:
        """Return a stage of the new model, or a rank's part, with the stage's parameters and buffers."""
        place, usual = self.plan.stages[stage], self._usual.stages[stage]
        shards, loss = usual.shards, usual.loss
        if shards is None:
            made = model.layers(place)
        else:
            chain = model.divided_like(shards.divided).rank(shards.group)
            made, loss = chain.layers[place.start : place.stop], self._loss(stage, chain, shards)
        pairs = zip(made, usual.layers, strict=True)
        layers = tuple(replace(new, module=_rebind(new, old, usual.layers)) for new, old in pairs)
        return usual._replace(layers=layers, loss=loss)

    def _loss(self, stage: int, chain: Chain, shards: RankShards) -> Loss:
        """Return the loss of a rank's new chain, with the constants of the old one's."""
        if isinstance(chain.criterion, RankLoss) and shards.criterion is not None:
            new, old = (
                ChainLayer("the loss", module) for module in (chain.criterion.module, shards.criterion)
            )
            _rebind(new, old, (old,))
        return replace(chain.measured(self.plan.measured(stage)), layers=()).loss


def boundaries(measurement: Measurement) -> Boundaries:
    """Return the values before every layer, and after the last."""
    costs = measurement.costs
    return (*(cost.inputs for cost in costs), costs[-1].outputs)


def _run(chain: Chain, values: Values) -> list[Values]:
    result = [values]
    for layer in chain.layers:
        values = layer(values)
        result.append(values)
    return result


def _shaped(value: Value, tensor: Tensor) -> Value:
    return replace(value, shape=tuple(tensor.shape), nbytes=tensor.numel() * tensor.element_size())


def _rebind(new: ChainLayer, old: ChainLayer, stage: Sequence[ChainLayer]) -> nn.Module:
    """Give the new layer's module the parameters and buffers of the old layer, or of its stage.

    The layer that reads a tensor may differ between modes. Tensors that no layer reads in this mode may be in
    another stage, and are removed.

    Raises:
        UsageError: the new module needs a tensor that the stage does not have, or has in another shape.
    """
    local = _tensors(old)
    original = {
        layer.originals[name]: tensor
        for layer in (*stage, old)
        for name, tensor in _tensors(layer).items()
        if name in layer.originals
    }
    for name, own in _tensors(new).items():
        path, _, attribute = name.rpartition(".")
        part = new.module.get_submodule(path)
        tensor = original.get(new.originals.get(name, ""), local.get(name))
        place = part._parameters if attribute in part._parameters else part._buffers
        if tensor is not None and tensor.shape == own.shape:
            place[attribute] = tensor  # type: ignore[assignment]
        elif name in new.unread:
            del place[attribute]
        else:
            raise UsageError(
                f"{new.name} needs {name} in this mode, which its stage does not hold in training: evaluate "
                "with a separate module"
            )
    return new.module


def _tensors(layer: ChainLayer) -> dict[str, Tensor]:
    """Return the parameters and buffers of a layer, each under all its names."""
    module = layer.module
    named = (module.named_parameters, module.named_buffers)
    return {name: tensor for each in named for name, tensor in each(remove_duplicate=False)}
