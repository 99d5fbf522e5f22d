"""The layers of a rank: the steps of each as generated code, over the rank's own parameters and buffers.

The code is the same on every rank; what differs are the parameters, and the rank's end of its group, which the layers
hold as `pipefit_group`. Names in a layer's state dict are those of the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pipefit.capture.binding import register
from pipefit.capture.chain import ChainLayer
from pipefit.capture.copying import copy_hooks, hooks_of
from pipefit.capture.graph_layer import Contexts, layer_class
from pipefit.capture.stand_ins import left_real
from pipefit.errors import UsageError
from pipefit.sharding.collectives import Collectives
from pipefit.sharding.forms import Form, R, Split
from pipefit.sharding.operations import GROUP
from pipefit.sharding.shards import Shard
from pipefit.sharding.steps import Key, Step, of_layer
from pipefit.sharding.tracing import TracedStage, is_stored


@dataclass(frozen=True, kw_only=True)
class LayerCode:
    """The graph of a layer, and the constants that it holds beside the layer's own tensors, by local name."""

    graph: fx.Graph
    constants: Mapping[str, fx.Node]


def write(
    stage: TracedStage, steps: Sequence[Step], layer: int, inputs: Sequence[Key], outputs: Sequence[Key]
) -> LayerCode:
    """The code of one layer, or of the loss, which takes `inputs` and returns `outputs`.

    What crosses to another block is contiguous with its dimensions as they are, as the whole layers hand it on.
    """
    module = stage.layers[layer].module if layer < len(stage.layers) else nn.Module()
    writer = _Writer(stage, module, inputs)
    for step in of_layer(steps, layer):
        writer.step(step)
    return writer.finished(outputs, ends_block=layer + 1 in stage.edges)


class _Writer:
    """Writes steps into a graph of their own."""

    def __init__(self, stage: TracedStage, module: nn.Module, inputs: Sequence[Key]) -> None:
        self.stage, self.graph = stage, fx.Graph()
        self.contexts = Contexts(self.graph)
        self.known = {key: self.graph.placeholder(f"value{number}") for number, key in enumerate(inputs)}
        self.names = {id(tensor): name for name, tensor in reversed(list(tensors_of(module)))}
        self.constants: dict[str, fx.Node] = {}
        self.group: fx.Node | None = None

    def step(self, step: Step) -> None:
        """Write one step."""
        operands = {source: self._value(key) for source, key in step.operands.items()}
        self.contexts.switch(step.context)
        args, kwargs = (
            map_aggregate(item, lambda leaf: self._argument(leaf, operands))
            for item in (step.call.args, dict(step.call.kwargs))
        )
        self.known[step.made] = self.graph.call_function(step.call.target, args, kwargs)  # type: ignore[arg-type]

    def finished(self, outputs: Sequence[Key], *, ends_block: bool) -> LayerCode:
        """The code, which returns `outputs`."""
        values = tuple(map(self._value, outputs))
        self.contexts.switch(())
        if ends_block:
            made = torch.ops.aten.contiguous.default
            values = tuple(v if v.op == "placeholder" else self.graph.call_function(made, (v,)) for v in values)
        self.graph.output(values)
        return LayerCode(graph=self.graph, constants=self.constants)

    def _value(self, key: Key) -> fx.Node:
        if key not in self.known:
            assert is_stored(key.node), f"{key} does not arrive"
            self.known[key] = self.graph.get_attr(self._name(key.node))
        return self.known[key]

    def _name(self, node: fx.Node) -> str:
        tensor = self.stage.tensor(node)
        if id(tensor) not in self.names:
            name = f"pipefit_constant{len(self.constants)}"
            self.names[id(tensor)], self.constants[name] = name, node
        return self.names[id(tensor)]

    def _argument(self, leaf: Any, operands: Mapping[fx.Node, fx.Node]) -> Any:
        if isinstance(leaf, fx.Node):
            return operands[leaf]
        if isinstance(leaf, torch.device):
            return self.contexts.device
        if isinstance(leaf, str) and leaf == GROUP:
            self.group = self.group or self.graph.get_attr("pipefit_group")
            return self.group
        return leaf


class RankTensors:
    """A rank's part of every tensor of a stage; what several layers share is one tensor here too.

    Parts are those of what `whole` says for a tensor, which has its shape.
    """

    def __init__(
        self,
        stage: TracedStage,
        home: Mapping[fx.Node, Form],
        rank: int,
        ranks: int,
        whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.stage, self.rank, self.ranks, self._whole = stage, rank, ranks, whole
        stored = [node for node in home if is_stored(node)]
        self.forms = {id(stage.tensor(node)): home[node] for node in stored}
        self._made: dict[int, Tensor] = {}

    def layer(self, layer: ChainLayer, code: LayerCode, group: Collectives) -> ChainLayer:
        """The rank's layer in the place of a whole one."""
        module = layer_class(type(layer.module).__name__)(code.graph)
        module.pipefit_group = group  # type: ignore[assignment]
        kept = layer.module.state_dict(keep_vars=True)
        for name, tensor in tensors_of(layer.module):
            register(module, name, self.part(tensor, name), persistent=name in kept)
        for name, node in code.constants.items():
            tensor = self.stage.tensor(node)
            with left_real(tensor):  # a loss may hold real ones beside fake layers
                register(module, name, self.part(tensor, name), persistent=False)
        return replace(layer, module=module.train(layer.module.training), packing="bare")

    def part(self, tensor: Tensor, name: str) -> Tensor:
        """The rank's part of a tensor, in memory of its own."""
        if id(tensor) not in self._made:
            local = self.shard(tensor, name).local(self._whole(tensor))
            self._made[id(tensor)] = _like(tensor, local) if isinstance(tensor, nn.Parameter) else local
        return self._made[id(tensor)]

    def shard(self, tensor: Tensor, name: str) -> Shard:
        """Which part it is.

        Raises:
            UsageError: ranks have parts of a parameter whose gradient hooks would see a part too.
        """
        form = self.forms.get(id(tensor), R)
        if isinstance(form, Split) and isinstance(tensor, nn.Parameter) and hooks_of(tensor):
            raise UsageError(
                f"{name} has hooks on its gradient, and {self.ranks} ranks would share it, so that a hook would see a "
                "part of the gradient: take them off, or use no tensor parallelism for its stage"
            )
        return Shard.of(name, tensor.shape, form, self.rank, self.ranks)


def _like(parameter: nn.Parameter, local: Tensor) -> nn.Parameter:
    """A rank's parameter, with the hooks of one that it has whole."""
    made = nn.Parameter(local, parameter.requires_grad)
    copy_hooks(parameter, made, {})
    return made


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module by all of their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
