"""The stages of one rank as `PipelineStage`s: their modules, their metadata, and the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from pipefit.capture import ChainLayer, Task, Values, constants
from pipefit.errors import UsageError
from pipefit.lowering import moves_of_stage
from pipefit.memory import StageStorages
from pipefit.own_loop import HostTensors
from pipefit.runtime import (
    WeightCopies,
    apart,
    check_elementwise,
    cut,
    fed_back_copies,
    layer_seeds,
    may_be_absent,
    naming_changes,
    using,
    working_copies,
)
from pipefit.schema.decisions import Run, What
from pipefit.schema.layer_costs import Value
from pipefit.schema.plan import Plan
from pipefit.tensor_parallel import Loan, TensorShard
from pipefit.torch_internals import without_dispatch_modes
from pipefit.torch_internals.pipelining import wait_for

_NOTHING = nullcontext()


@dataclass(slots=True, kw_only=True)
class Draws:
    """Seeds of random draws: one for each layer of each local batch of each step, as in pipefit's runtime."""

    device: torch.device
    seed: int
    replicas: int
    replica: int
    step: int = 0

    def of(self, microbatch: int) -> Callable[[int], None]:
        """Return the function that seeds the device's generator for a layer, or for the loss."""
        return layer_seeds(self.device, self.seed, self.step, microbatch * self.replicas + self.replica)


class StageModule(nn.Module):
    """The layers of one stage: tensors of the stage before, or inputs of the model, to a tensor or several.

    Carries out the plan's decisions: it recomputes runs of layers, and moves saved tensors to the host. All
    microbatches share `copies` of weights for autocast, unless replicas divide the weights.

    Args:
        layers: the layers, on the device.
        plan: the plan.
        stage: the number of the stage.
        draws: seeds of random draws.
        host: host memory for saved tensors.
    """

    def __init__(
        self, layers: Sequence[ChainLayer], plan: Plan, stage: int, *, draws: Draws, host: HostTensors
    ) -> None:
        super().__init__()
        place, self._costs = plan.stages[stage], plan.measured(stage).costs
        self.start, self.stop = place.start, place.stop
        self.parts = nn.ModuleList(layer.module for layer in layers)
        self.chain_layers, self._draws, self._host = tuple(layers), draws, host
        self._anchor = torch.empty(0, device=draws.device, requires_grad=True)
        self._divides = place.grid.divides_gradients
        whole = [] if self._divides else layers  # FSDP2 replaces the weights in each pass
        self.copies = WeightCopies(whole, self._costs[self.start : self.stop], self.start)
        self._calls = [
            (number, layer.caller(), layer.autocast, cost.mutates_inputs, cost.unused_outputs)
            for number, (layer, cost) in enumerate(
                zip(layers, self._costs[self.start : self.stop], strict=True), start=self.start
            )
        ]
        self._runs = [
            (decision.subject, decision.microbatches)
            for decision in plan.decisions_of(stage, What.RECOMPUTE)
            if isinstance(decision.subject, Run)
        ]
        microbatches = range(plan.training.microbatches)
        self._pieces = [tuple(self._pieces_of(microbatch)) for microbatch in microbatches]
        self._moves: list[dict[int, set[int]]] = [{} for _ in microbatches]  # saved tensors by layer
        storages = StageStorages.of(plan, stage)
        for moves, own in zip(self._moves, moves_of_stage(plan, stage), strict=True):
            for subject in (subject for subjects, _ in own for subject in subjects):
                same = storages.named_in[subject.layer][storages.storage(subject)]
                moves.setdefault(subject.layer, set()).update(int(one.what) for one in same)
        changing = [self._costs[number].mutates_inputs for number in range(self.start, self.stop)]
        if is_last := stage == len(plan.stages) - 1:
            changing.append(plan.measured(stage).loss.mutates_inputs)
        self._aliases = any(changing)
        outputs = self._costs[self.stop - 1].outputs
        cuts = not is_last and not all(value.has_gradient for value in outputs)
        self._cut = outputs if cuts else ()
        self.microbatch = -1

    def begin_step(self) -> None:
        """Count microbatches from 0 again, with the weights of this step."""
        self.microbatch = -1
        self.copies.outdate()

    def forward(self, *values: Tensor) -> Tensor | Values:
        self.microbatch += 1
        if self._aliases:
            values = tuple(map(_alias, values))
        for start, stop, recomputes in self._pieces[self.microbatch]:
            if recomputes:
                values = self._recomputed(start, stop, values)
            else:
                box = [values]  # which `_run` empties, to free values that no layer has saved
                del values
                values = self._run(start, stop, self.microbatch, box)
        outputs = tuple(map(_cut, values, self._cut)) if self._cut else values
        return outputs[0] if len(outputs) == 1 else outputs  # torch's engine is faster with a single tensor

    def _pieces_of(self, microbatch: int) -> Iterator[tuple[int, int, bool]]:
        """Yield runs of layers in order, each with whether this microbatch recomputes it."""
        layer = self.start
        for run in sorted(
            (run for run, which in self._runs if microbatch in which), key=lambda run: run.start
        ):
            if layer < run.start:
                yield layer, run.start, False
            yield run.start, run.stop, True
            layer = run.stop
        if layer < self.stop:
            yield layer, self.stop, False

    def _run(self, start: int, stop: int, microbatch: int, box: list[Values]) -> Values:
        values = box.pop()
        moves, begin = self._moves[microbatch], self._draws.of(microbatch)
        for number, layer, dtype, changes, unused in self._calls[start - self.start : stop - self.start]:
            if changes:
                values = apart(values)
            begin(number)
            moving = self._moving(number, moves[number]) if number in moves else _NOTHING
            with moving, using(self.copies.of(number), dtype, values):
                values = layer(values)
            if unused:
                name, divides = self.chain_layers[number - self.start].name, self._divides
                values = cut(values, unused, self._anchor, name, zeros=divides)
        return values

    def _recomputed(self, start: int, stop: int, values: Values) -> Values:
        """Run layers that keep only their inputs and run again in the backward.

        Raises:
            UsageError: a layer changed the inputs in place, although the recomputation needs them.
        """
        microbatch, step = self.microbatch, self._draws.step
        layers = self.chain_layers[start - self.start : stop - self.start]
        copies = fed_back_copies(layers, self._costs[start:stop])
        changes = self._costs[start].mutates_inputs
        versions = [value._version for value in values]

        def run(*given: Tensor) -> Values:
            assert step == self._draws.step
            box = [tuple(value.clone() for value in given) if changes else given]
            return self._run(start, stop, microbatch, box)

        result: Values = checkpoint(
            run,
            *values,
            use_reentrant=False,
            preserve_rng_state=False,  # every layer seeds its draws
            context_fn=lambda: (nullcontext(), working_copies(layers, copies)),
        )
        if versions != [value._version for value in values]:
            raise UsageError(
                f"{layers[0].name} changes its inputs in place, so its forward cannot be recomputed: keep "
                "its activations, or use layers with inplace=False"
            )
        return result

    def _moving(self, layer: int, numbers: set[int]) -> AbstractContextManager[None]:
        """Return a context that moves these saved tensors of a layer to the host."""
        module = self.chain_layers[layer - self.start].module

        @cache
        def held() -> set[int]:  # asked during the forward, when divided parameters are gathered
            tensors = (*module.parameters(), *module.buffers(), *constants(module))
            return {t.untyped_storage()._cdata for t in tensors}

        return self._host.saving(numbers, lambda tensor: tensor.untyped_storage()._cdata in held())


def _cut(value: Tensor, planned: Value) -> Tensor:
    """Return an output of a stage without its graph if no gradient will arrive for it."""
    return value if planned.has_gradient else value.detach()


def _alias(value: Tensor) -> Tensor:
    """Return a received value as one that layers may change in place.

    A leaf that requires a gradient may not be changed, and any other one would become part of the graph of
    that microbatch, although torch's engine receives later values into it.
    """
    return apart((value.view_as(value),))[0] if value.requires_grad else value.detach()


class Loss:
    """The loss of a microbatch, times its weight in the step and the loss scale; keeps the unweighted losses.

    Args:
        loss: computes the loss from the values of the last stage.
        plan: the plan.
        module: the last stage, which has just run the microbatch.
        draws: seeds of random draws.
    """

    def __init__(
        self, loss: Callable[[Values, Values], Tensor], plan: Plan, module: StageModule, draws: Draws
    ) -> None:
        measurement = plan.measured(len(plan.stages) - 1)
        self._loss, self._module, self._draws = loss, module, draws
        self._changes = measurement.loss.mutates_inputs
        self.weight = 1.0 / (plan.training.microbatches * draws.replicas)
        self.scale = 1.0
        self.losses = torch.zeros(
            plan.training.microbatches, dtype=getattr(torch, measurement.loss_dtype), device=draws.device
        )
        self._kept = self.losses.unbind()

    def __call__(self, outputs: Tensor | Values, targets: Values) -> Tensor:
        microbatch, values = self._module.microbatch, outputs if isinstance(outputs, tuple) else (outputs,)
        self._draws.of(microbatch)(self._module.stop)
        loss = self._loss(apart(values) if self._changes else values, targets)
        self._kept[microbatch].copy_(loss.detach())
        return loss * (self.weight * self.scale)


class _Stage(PipelineStage):
    """A stage whose backward names layers and microbatch if a saved tensor has been changed in place.

    It frees the graph, in which custom functions may keep tensors: the schedule holds the loss to the end of
    the step.
    """

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> None:
        assert isinstance(self.submod, StageModule)
        outputs = self.fwd_cache[bwd_chunk_id][0] if self.is_first and self.is_last else ()
        with naming_changes(bwd_chunk_id, self.submod.start, self.submod.stop):
            super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        for tensor in (*outputs, *([] if loss is None else [loss])):
            if tensor.grad_fn is not None and not tensor._is_view():
                tensor.detach_()


def pipeline_stage(
    module: StageModule, plan: Plan, stage: int, *, device: torch.device, group: dist.ProcessGroup
) -> PipelineStage:
    """Return torch's stage, with the shapes of its values by the plan's profile."""
    costs = plan.measured(stage).costs
    place, is_first, is_last = plan.stages[stage], stage == 0, stage == len(plan.stages) - 1
    inputs, outputs = costs[place.start].inputs, costs[place.stop - 1].outputs
    return _Stage(
        module,
        stage,
        len(plan.stages),
        device,
        input_args=_examples(inputs),
        output_args=_examples(outputs),
        input_grads=None if is_first else _gradients(inputs),
        output_grads=None if is_last else _gradients(outputs),
        group=group,
    )


def _examples(values: Sequence[Value]) -> Values:
    return tuple(
        torch.empty(v.shape, dtype=getattr(torch, v.dtype), device="meta", requires_grad=v.has_gradient)
        for v in values
    )


def _gradients(values: Sequence[Value]) -> tuple[Tensor | None, ...]:
    return tuple(
        torch.empty(v.shape, dtype=getattr(torch, v.dtype), device="meta") if v.has_gradient else None
        for v in values
    )


# ---- State that replicas divide
#
# FSDP2 shards the parameters of a stage over its replicas, layer by layer. torch's engine keeps gradients
# whole, and parameters gathered, from a stage's backward to its next forward: it reduces gradients after the
# stage's last backward. So replicas that divide gradients gather parameters once in a step, and those that
# divide parameters gather them for every forward.


class _Gather:
    """An all-gather over gloo in the memory of its output, without the copy that gloo's own one makes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        loan = Loan([output_tensor])  # the input is a part of it
        wait_for(
            [
                dist.broadcast(
                    loan.tensors[0].view(group.size(), -1)[rank], group=group, group_src=rank, async_op=True
                )
                for rank in range(group.size())
            ]
        )
        loan.settle()


class _ReduceScatter(_Gather):
    """A reduce-scatter over gloo that sums in its input: gloo's own one sums in a copy."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        loan = Loan([input_tensor])
        wait_for([group.allreduce(loan.tensors)])
        loan.settle()
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def divide(
    module: StageModule,
    plan: Plan,
    stage: int,
    task: Task,
    *,
    replicas: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Let replicas divide the parameters of a stage. Layers that share parameters are gathered together.

    Raises:
        UsageError: replicas cannot divide a parameter, or the optimizer cannot update parts of it.
    """
    with without_dispatch_modes():
        mesh = DeviceMesh.from_group(replicas, device.type)
    _check_parts(task, plan, module.chain_layers)
    users = Counter(id(p) for layer in module.chain_layers for p in layer.module.parameters())
    alone = [
        layer.module
        for layer in module.chain_layers
        if (own := [users[id(p)] for p in layer.module.parameters()]) and max(own) == 1
    ]
    again = plan.stages[stage].grid.shard == "parameters"
    for part in (*alone, module):
        sharded: Any = fully_shard(part, mesh=mesh, reshard_after_forward=again)
        sharded.set_gradient_divide_factor(1.0)  # the loss is divided
        sharded.set_force_sum_reduction_for_comms(True)
        if device.type == "cpu":
            sharded.set_custom_all_gather(_Gather())
            sharded.set_custom_reduce_scatter(_ReduceScatter())


def _check_parts(task: Task, plan: Plan, layers: Sequence[ChainLayer]) -> None:
    """Check that replicas can divide the parameters of these layers.

    Raises:
        UsageError: they cannot, or the optimizer cannot update parts of them.
    """
    if may_be_absent(plan.profile):
        raise UsageError(
            f"replicas cannot divide gradients of {task.name}, in which values decide what has a gradient: "
            + _INSTEAD
        )
    for layer in layers:
        for name, parameter in layer.named_parameters:
            if not parameter.is_contiguous():
                have = f"strides {parameter.stride()}"
                raise UsageError(f"replicas cannot divide parameter {name}, which has {have}: {_INSTEAD}")
    rows = {
        name: TensorShard(name=name, dim=0, ranges=(), global_shape=())
        for layer in layers
        for name in layer.originals.values()
    }
    check_elementwise(task, layers, rows, torch.device("cpu"), instead=_INSTEAD)


_INSTEAD = 'divide optimizer state only (shard="optimizer"), whose layers stay whole'
