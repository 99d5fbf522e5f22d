"""Chains from which a run takes its stages, for the size of a stage's local batches and for each device.

Replicas start equal: all but the first get copies of the module's tensors. A stage takes its layers from a
chain that was captured with the size of its local batches, because traced layers hold for one number of
samples. If a stage is divided into tensor shards, a device has the chain of its tensor-parallel rank, with
separate memory; the module's tensors stay unchanged. `RankShards` converts between whole tensors and the
parts of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipefit.capture import (
    Chain,
    ChainLayer,
    Sample,
    Shared,
    Task,
    Values,
    capture,
    casting_for,
    copy_of,
    give_own_copies,
    named_constants,
    stored_entries,
)
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.fake_cuda.chain import fake_chain, layers_again
from pipefit.fake_cuda.target import FakeTarget
from pipefit.runtime.checks.plan_check import check_model
from pipefit.runtime.engine.in_flight import Loss
from pipefit.runtime.engine.tensor_groups import TensorGroups
from pipefit.schema.grids import Stage
from pipefit.schema.layer_costs import Value
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.tensor_parallel import Collectives, RankLoss, ShardedChain, TensorShard, assembled, shard_chain
from pipefit.texts import counted

# ---- Tensor shards
# Checkpoints, state dicts and other plans hold whole tensors only, under the names of the original module.
# Optimizer tensors are divided like the parameters whose shapes they have.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShards:
    """Tensor shards of the ranks of a tensor group; this rank is `group.rank`.

    Args:
        divided: the chain, divided among the ranks; smaller microbatches are divided in the same way.
        shards: shards of all ranks, by the name of a parameter or buffer in the model; a buffer that is in no
            state dict has its layer's name and its local name.
        constants: by layer name, the plain-attribute tensors of the whole layer, by such names; no forward
            changes them.
        criterion: the rank's loss; None if the last layer returns it.
    """

    group: Collectives
    divided: ShardedChain
    shards: Mapping[str, tuple[TensorShard, ...]]
    constants: Mapping[str, Mapping[str, Tensor]]
    criterion: nn.Module | None

    @staticmethod
    def of(divided: ShardedChain, chain: Chain, group: Collectives) -> RankShards:
        """Return the shards of a divided chain; `chain` is the rank's part of it."""
        ranks, layers = range(divided.ranks), divided.chain.layers
        of_ranks = [divided.shards(rank) for rank in ranks]
        shards = {name: tuple(own[name] for own in of_ranks) for name in of_ranks[0]}
        for layer in layers:
            for name, buffer in unstored_buffers(layer):
                form = divided.stage.form(buffer)
                shards[name] = tuple(
                    TensorShard.of(name, buffer.shape, form, rank, len(ranks)) for rank in ranks
                )
        constants = {
            layer.name: {f"{layer.name}.{local}": tensor for local, tensor in named_constants(layer.module)}
            for layer in layers
        }
        criterion = chain.criterion.module if isinstance(chain.criterion, RankLoss) else None
        return RankShards(
            group=group, divided=divided, shards=shards, constants=constants, criterion=criterion
        )

    @property
    def own(self) -> dict[str, TensorShard]:
        """Shards of this rank, by the same names."""
        return {name: of_ranks[self.group.rank] for name, of_ranks in self.shards.items()}

    def is_divided(self, name: str) -> bool:
        """Return whether ranks hold parts of the tensor, instead of the whole tensor each."""
        return self.shards[name][0].dim is not None

    def is_part(self, name: str, tensor: Tensor) -> bool:
        """Return whether `tensor` is a part: of the named parameter, or an optimizer tensor of its shape."""
        return self.is_divided(name) and tuple(tensor.shape) == self._own(name).local_shape

    def whole_shape(self, name: str, tensor: Tensor) -> torch.Size:
        """Return the shape of the whole tensor of this rank's `tensor`."""
        return torch.Size(self._own(name).global_shape) if self.is_part(name, tensor) else tensor.shape

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        return self._own(name).local(whole)

    def part_of_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the optimizer state of a whole parameter.

        Raises:
            UsageError: the state has a tensor of another shape than the parameter's.
        """
        return self._own(name).local_state(state)

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of all ranks to the whole tensor, on the host."""
        return assembled(self.shards[name], [part.detach().cpu() for part in parts])

    def _own(self, name: str) -> TensorShard:
        return self.shards[name][self.group.rank]


def unstored_buffers(layer: ChainLayer) -> list[tuple[str, Tensor]]:
    """Return the buffers of a layer that are in no state dict, named after the layer and the buffer."""
    known = stored_entries(layer.module).keys()
    return [
        (f"{layer.name}.{name}", buffer) for name, buffer in layer.module.named_buffers() if name not in known
    ]


# ---- Sources of stages

Held = Callable[[ShardedChain, Sample], None]  # compares a divided chain with the whole one


class Wanted(NamedTuple):
    """Request for a stage's chain: number of samples, replica, and rank in a tensor group.

    `group` has the devices of the replica's shards, in order of rank; `rank` is that of the device. With
    `sequences`, shards divide positions too.
    """

    samples: int
    replica: int
    group: tuple[int, ...]
    rank: int
    sequences: bool


class Source(NamedTuple):
    """A chain, and the parameters that its layers shared before stages got their own copies.

    `shards` describes the tensor shards of a rank; None without tensor parallelism.
    """

    chain: Chain
    shared: Sequence[Shared]
    shards: RankShards | None = None

    @staticmethod
    def of(chain: Chain, shards: RankShards | None = None) -> Source:
        """Return the source of a chain whose stages are still without copies."""
        return Source(chain, chain.shared, shards)


class StageSources:
    """The chains of a run's stages.

    Args:
        whole: the chain of the first replica, for microbatches or local batches of `samples` samples.
        make: makes another chain when a stage needs it.
    """

    def __init__(self, plan: Plan, whole: Source, samples: int, make: Callable[[Wanted], Source]) -> None:
        self._plan, self._whole, self._samples, self._make = plan, whole, samples, cache(make)
        self._own: dict[tuple[int, int], dict[int, nn.Parameter]] = {}  # by stage and device

    def of(self, stage: int, device: int) -> Source:
        """Return the chain of a stage on a device, for the size of the stage's local batches."""
        grid, samples = self._plan.stages[stage].grid, self._plan.measured(stage).microbatch_size
        replica, is_divided = grid.replica_of(device), grid.tensor > 1
        if samples == self._samples and not is_divided and not replica:
            return self._whole
        group = grid.group_of(device) if is_divided else ()
        return self._make(Wanted(samples, replica, group, grid.shard_of(device), grid.sequences))

    def own_shared(self, stage: int, device: int) -> dict[int, nn.Parameter]:
        """Return a stage's copies of the shared parameters that its layers use, by number in the profile.

        They are made in the first call; the first stage that uses a parameter has the original.
        """
        if (stage, device) not in self._own:
            plan, (chain, shared, _) = self._plan, self.of(stage, device)
            place, modules, own = plan.stages[stage], [layer.module for layer in chain.layers], {}
            for number, (result, holders) in enumerate(zip(shared, plan.holders, strict=True)):
                if stage in holders:
                    users = [user for user in result.users if place.start <= user < place.stop]
                    own[number] = (
                        result.parameter if stage == holders[0] else give_own_copies(modules, result, users)
                    )
            self._own[stage, device] = own
        return self._own[stage, device]


def trained_sources(
    plan: Plan, built: Task, whole: Chain, groups: TensorGroups, *, copies: bool, held: Held
) -> StageSources:
    """Return the chains for training the module of `built`; `whole` is its chain for the plan's microbatches.

    With `copies`, for a single process that runs all replicas, replicas other than the first get copies of
    the module. All copies, those of shared parameters included, are made at once, because a stage may then
    free tensors it does not keep. `held` compares each divided chain with the whole one, on a batch, at the
    first device that needs it.
    """
    target = plan.cluster.target
    first = {m.way: s.devices[0] for s, m in reversed(_measured(plan))}

    def captured(samples: int, replica: int) -> Chain:
        if samples == plan.training.microbatch_size and not replica:
            return whole
        task = replace(built, module=_copy(built)) if copies and replica else built
        chain = capture(task, *sample(built, samples), target=target)
        check_model(plan, built, chain, samples)
        return chain

    @cache
    def sharded(samples: int, ranks: int, sequences: bool) -> ShardedChain:
        inputs, targets = sample(built, samples)
        chain = captured(samples, 0)
        return shard_chain(
            chain, ranks, chain.flatten(inputs), chain.flatten_targets(targets), sequences=sequences
        )

    def make(wanted: Wanted) -> Source:
        if not wanted.group:
            return Source.of(captured(wanted.samples, wanted.replica))
        group = groups(wanted.group, wanted.rank)
        divided = sharded(wanted.samples, len(wanted.group), wanted.sequences)
        check_as_profiled(plan, wanted, divided)
        if not wanted.rank and first[wanted.samples, divided.ranks, wanted.sequences] == wanted.group[0]:
            held(divided, sample(built, wanted.samples))
        chain = divided.rank(group)
        return Source.of(chain, RankShards.of(divided, chain, group))

    sources = StageSources(plan, Source.of(whole), plan.training.microbatch_size, make)
    for device in plan.workers if copies else ():
        for stage in plan.stages_of(device):
            sources.own_shared(stage, device)
    return sources


def _measured(plan: Plan) -> list[tuple[Stage, Measurement]]:
    """Return every stage with its measurement."""
    return [(stage, plan.measured(number)) for number, stage in enumerate(plan.stages)]


def check_as_profiled(plan: Plan, wanted: Wanted, divided: ShardedChain) -> None:
    """Check that ranks divide the model as in its profile, and therefore on all workers in the same way.

    Raises:
        UsageError: they do not.
    """
    ranks = len(wanted.group)
    if plan.profile.at(wanted.samples, ranks, sequences=wanted.sequences).forms != divided.digest:
        raise UsageError(
            f"{ranks} tensor-parallel ranks would shard {plan.profile.model} differently than in its "
            "profile, which was made with another release of torch or pipefit: profile and plan it again "
            "here"
        )


def _copy(built: Task) -> nn.Module:
    assert isinstance(built.module, nn.Module)
    return copy_of(built.module, built.name, lambda tensor: tensor.detach().clone())


# ---- Models specialized to other microbatches than the plan's: smaller ones, and those of an evaluation
#
# Layers that are modules accept any batch size and obey `train()` and `eval()`; only the shapes at their
# boundaries change. Traced layers, and layers of tensor-parallel ranks, hold for one batch size and one
# mode: for another, the model is traced again over fake tensors, once for all devices of the process, and
# the new layers get the parameters and buffers of the old ones.

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
