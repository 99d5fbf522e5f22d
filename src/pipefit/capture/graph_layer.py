"""A layer made of traced operations: an ordinary module whose forward is generated code.

Every value is dropped at its last use, so the layer needs the memory of the eager module. The code names no
device: it runs on the device of its inputs. Layers of equal code, parameter shapes and buffer shapes are
profiled once.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pipefit.capture.chain import ChainLayer, own_module, stored_entries
from pipefit.capture.data_flow import Flow
from pipefit.capture.flat_graph import Context, Role, context, plain, role, value
from pipefit.capture.storages import dense_order
from pipefit.capture.structure import Values
from pipefit.capture.whole_modules import call_whole
from pipefit.torch_internals.fake_tensors import FakeTensor

# ---- Names of a model's parameters and buffers in its layers
#
# The layer `transformer.h.3` calls its weight `attn.c_attn.weight`, without the layer's prefix, so equal
# blocks have equal names and are profiled once. A parameter of another module, such as a tied embedding,
# keeps its full name; the layers that use it hold the same object.


class Binding:
    """Registers tensors and modules of `module` in layers; `constants` are tensors that the program holds."""

    def __init__(self, module: nn.Module, constants: Mapping[str, Any]) -> None:
        self.module, self.constants = module, constants
        self.tensors: dict[str, Tensor] = dict(
            (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        )
        self.kept = stored_entries(module)
        self.aliases: dict[int, list[str]] = {}
        self._met = set[int]()  # ids of the modules that stay whole in layers, and of their parameters
        self._of_constants: dict[int, Tensor] = {}  # so layers that use one constant hold the same tensor
        for name, tensor in self.tensors.items():
            self.aliases.setdefault(id(tensor), []).append(name)

    def names(self, layer: str, needed: Sequence[Role]) -> dict[str, str]:
        """Return local names for the tensors and modules that a layer needs."""
        prefix = f"{plain(layer)}."
        result = {item.name: _local(item.name, layer) for item in needed if item.kind == "module"}
        prefixes = [*((f"{path}.", f"{local}.") for path, local in result.items()), (prefix, "")]
        for item in needed:
            if item.kind == "module":
                continue
            if item.name not in self.tensors:
                result[item.name] = f"constant{len(result)}"
                continue
            names = self.aliases[id(self.tensors[item.name])]
            local = (
                own + name.removeprefix(p) for p, own in prefixes for name in names if name.startswith(p)
            )
            result[item.name] = next(local, item.name)
        if len(set(result.values())) < len(result):
            return {item.name: item.name for item in needed}
        return result

    def fill(self, layer: nn.Module, needed: Sequence[Role], names: Mapping[str, str]) -> dict[str, str]:
        """Register needed tensors and modules in `layer`; return the original names of its state dict."""
        originals = {}
        for item in needed:
            if item.kind == "module":
                originals.update(self._give_module(layer, item.name, names[item.name]))
        for item in needed:
            if item.kind == "module":
                continue
            tensor, local = self.tensor(item.name), names[item.name]
            original = self._original(tensor, local, item.name)
            register(layer, local, tensor, persistent=original in self.kept)
            if original in self.kept:
                originals[local] = original
        return originals

    def _give_module(self, layer: nn.Module, path: str, local: str) -> dict[str, str]:
        """Put a module that stays whole into a layer; return the original names of its state dict's
        entries.
        """
        part = own_module(self.module.get_submodule(path), self._met)
        *owners, last = local.split(".")
        _owner(layer, owners).add_module(last, part)
        return {
            f"{local}.{name}": f"{path}.{name}"
            for name in stored_entries(part)
            if f"{path}.{name}" in self.kept
        }

    def with_the_rest(self, layers: Sequence[ChainLayer]) -> list[ChainLayer]:
        """Give tensors without a layer to the nearest layer by name: unused parameters, names of tied
        ones.
        """
        unread: dict[str, list[str]] = {layer.name: [] for layer in layers}
        held = {
            id(t): layer
            for layer in reversed(layers)
            for t in (*layer.module.parameters(), *layer.module.buffers())
        }
        named = {original for layer in layers for original in layer.originals.values()}
        for name, tensor in self.tensors.items():
            if name in named or name not in self.kept:
                continue
            layer = held.get(id(tensor)) or max(layers, key=lambda layer: _nearness(layer.name, name))
            held[id(tensor)] = layer
            local = _free(layer.module, name)
            register(layer.module, local, tensor, persistent=True)
            layer.originals[local] = name  # type: ignore[index]
            unread[layer.name].append(local)
        return [replace(layer, unread=frozenset(unread[layer.name])) for layer in layers]

    def tensor(self, name: str) -> Tensor:
        """Return the parameter, buffer or constant with this name in the program."""
        if name in self.tensors:
            return self.tensors[name]
        owner, _, attribute = name.rpartition(".")
        result = getattr(self._part(owner), attribute, None)
        if not isinstance(result, Tensor):
            result = cast(Tensor, self.constants[name])
            if id(result) in self.aliases:
                return result
        if id(result) not in self._of_constants:
            self._of_constants[id(result)] = self._constant(result)
        return self._of_constants[id(result)]

    def _constant(self, tensor: Tensor) -> Tensor:
        """Return a constant of the program on the device of the model's tensors, fake if they are."""
        place = next(iter(self.tensors.values()), torch.empty(0))
        if isinstance(place, FakeTensor) and not (
            isinstance(tensor, FakeTensor) and tensor.fake_mode is place.fake_mode
        ):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place.device)
        return tensor if isinstance(tensor, FakeTensor) else tensor.detach().to(place.device)

    def _part(self, path: str) -> nn.Module | None:
        return dict(self.module.named_modules()).get(path)

    def _original(self, tensor: Tensor, local: str, name: str) -> str:
        """Return the tensor's name that matches the local one."""
        names = self.aliases.get(id(tensor), [name])
        return next((alias for alias in names if alias == local or alias.endswith(f".{local}")), name)


def register(layer: nn.Module, name: str, tensor: Tensor, *, persistent: bool) -> None:
    """Put `tensor` into `layer` under a dotted name, making the modules on the way."""
    *path, last = name.split(".")
    layer = _owner(layer, path)
    if isinstance(tensor, nn.Parameter):
        layer.register_parameter(last, tensor)
    else:
        layer.register_buffer(last, tensor, persistent=persistent)


def _free(layer: nn.Module, name: str) -> str:
    """Return `name`, prefixed with underscores if a part of `layer` already has the name."""
    at: Any = layer
    for part in name.split("."):
        if not hasattr(at, part):
            return name
        at = getattr(at, part)
        if not isinstance(at, nn.Module):
            break
    return _free(layer, f"_{name}")


def _owner(layer: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return the part of `layer` at a path, making the modules on the way."""
    for part in path:
        if part not in layer._modules:
            layer.add_module(part, nn.Module())
        layer = layer._modules[part]  # type: ignore[assignment]
    return layer


def _local(path: str, layer: str) -> str:
    """Return the local name of the module at a path; "whole" if the module is the layer itself."""
    return "whole" if path == plain(layer) else path.removeprefix(f"{plain(layer)}.")


def _nearness(layer: str, name: str) -> int:
    """Return how many leading parts two paths share; 1 << 30 if one is a prefix of the other."""
    pairs = zip(layer.split("."), name.split("."), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), 1 << 30)


# ---- Generated code

Entered = list[AbstractContextManager[Any]]

_PERMUTE, _LAID_OUT = torch.ops.aten.permute.default, "laid_out"  # name of permutes between layers


@dataclass(frozen=True)
class Code:
    """The graph of a layer, its text as Python, and the function that the text defines.

    `operations` is the text without the permutations between layers, which may depend on the number of
    samples.
    """

    graph: fx.Graph
    text: str
    operations: str
    run: Callable[..., Values]

    @staticmethod
    def of(graph: fx.Graph) -> Code:
        """Return the code of a graph."""
        code, plain = graph.python_code("self"), _without_layouts(graph)
        operations = code if plain is graph else plain.python_code("self")
        names = dict(code.globals)
        exec(_compiled(code.src), names)  # noqa: S102 -- the text is torch.fx's own
        return Code(graph, code.src, operations.src, names["forward"])

    def __deepcopy__(self, memo: object) -> Code:
        return self

    def with_numbers(self, number: Callable[[int], int]) -> Code:
        """Return the code with each integer argument of an operation replaced by `number(argument)`."""

        def replaced(item: Any) -> Any:
            return number(item) if type(item) is int else item

        graph = copy.deepcopy(self.graph)
        for node in graph.nodes:
            node.args = map_aggregate(node.args, replaced)
            node.kwargs = map_aggregate(node.kwargs, replaced)
        return Code.of(graph)


class GraphLayer(nn.Module):
    """A piece of a traced model; takes and returns a tensor, or a tuple of several.

    Its parameters, buffers and modules have the model's names, which may be arbitrary. So all other
    attributes are named `pipefit_...` or `_pipefit_...`. The texts count as settings, which are equal for
    equal layers; the code does not, because each layer has its own.
    """

    pipefit_texts: tuple[str, str]
    _pipefit_code: Code

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.pipefit_code = Code.of(graph)

    @property
    def pipefit_code(self) -> Code:
        """The layer's code."""
        return self._pipefit_code

    @pipefit_code.setter
    def pipefit_code(self, code: Code) -> None:
        self.pipefit_texts, self._pipefit_code = (code.text, code.operations), code

    def forward(self, values: Tensor | Values) -> Tensor | Values:
        """Return the layer's outputs; a tensor if there is only one."""
        values = (values,) if isinstance(values, Tensor) else values
        entered: Entered = []
        try:
            outputs = self.pipefit_code.run(self, entered, values[0].device, *values)
        finally:
            while entered:
                leave(entered)
        return outputs[0] if len(outputs) == 1 else outputs


def wholes(layer: GraphLayer) -> list[nn.Module]:
    """Return the modules that a layer's code calls as they are."""
    inside = (part for _, part in layer.named_modules() if type(part) not in (nn.Module, type(layer)))
    result = list[nn.Module]()
    for part in inside:
        if not any(part in set(around.modules()) for around in result):
            result.append(part)
    return result


@functools.lru_cache(maxsize=1024)
def _compiled(code: str) -> CodeType:
    """Compile the code of equal layers once."""
    return compile(code, "<pipefit layer>", "exec")


@functools.cache
def layer_class(name: str) -> type[GraphLayer]:
    """Return a subclass of `GraphLayer` with the name of the original module's class, which reports show."""
    return type(name, (GraphLayer,), {"__doc__": GraphLayer.__doc__})


def write(
    flow: Flow,
    order: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    names: Mapping[str, str],
) -> fx.Graph:
    """Return the graph of a layer that applies `order` to `inputs`; `names` maps tensors to local names.

    Between layers every value is contiguous, whether it is sent or passed on: a value with other strides, as
    after a transpose, crosses as a view with its dimensions in memory order.
    """
    writer = _GraphWriter(flow, inputs, names)
    for node in order:
        writer.operation(node)
    writer.output(outputs, as_they_are=outputs == flow.outputs)
    return writer.graph


def enter(entered: Entered, device: torch.device, kind: str, *settings: Any) -> None:
    """Enter a context of the traced code."""
    manager: AbstractContextManager[Any]
    if kind == "grad":
        manager = torch.enable_grad() if settings[0] else torch.no_grad()
    else:
        name, dtype, enabled, cached = settings
        # The trace ran on the CPU, so its autocast stands for that of the layer's device.
        kind = device.type if name == "cpu" else name
        manager = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)
    manager.__enter__()
    entered.append(manager)


def leave(entered: Entered) -> None:
    """Leave the innermost context."""
    entered.pop().__exit__(None, None, None)


class Contexts:
    """Begins the graph of a layer, and writes where contexts are entered and left."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.entered, self.device = graph.placeholder("entered"), graph.placeholder("place")
        self.current: Context = ()

    def switch(self, wanted: Context) -> None:
        """Leave and enter contexts so that the next operation runs under `wanted`."""
        common = 0
        while common < min(len(wanted), len(self.current)) and wanted[common] == self.current[common]:
            common += 1
        for _ in self.current[common:]:
            self.graph.call_function(leave, (self.entered,))
        for entry in wanted[common:]:
            self.graph.call_function(enter, (self.entered, self.device, *entry))
        self.current = wanted


class _GraphWriter:
    """Writes a layer's operations into a new graph, each after the repeated operations that it needs."""

    def __init__(self, flow: Flow, inputs: Sequence[fx.Node], names: Mapping[str, str]) -> None:
        self.flow, self.names, self.graph = flow, names, fx.Graph()
        self._contexts = Contexts(self.graph)
        self._arrived = {node: self.graph.placeholder(f"value{number}") for number, node in enumerate(inputs)}
        self._known: dict[fx.Node, fx.Node] = {}

    def known(self, node: fx.Node) -> fx.Node:
        """Return this graph's node for a node of the model, writing it if necessary."""
        if node not in self._known:
            if node in self._arrived:
                self._known[node] = self._permuted(self._arrived[node], _back(_order(node)))
            elif (meaning := role(node)) is not None:
                self._known[node] = self.graph.get_attr(self.names[meaning.name])
            else:
                assert node in self.flow.repeated, f"{node} does not cross"
                self._repeat(node)
        return self._known[node]

    def operation(self, node: fx.Node) -> None:
        """Write one operation."""
        named = _named(node)
        fx.map_arg((named, node.kwargs), self.known)
        self._contexts.switch(context(node))
        args, kwargs = self._mapped(named), self._mapped(node.kwargs)
        self._known[node] = self.graph.create_node("call_function", node.target, args, kwargs)

    def output(self, nodes: Sequence[fx.Node], *, as_they_are: bool) -> None:
        """Write the layer's return; values that only pass through are returned as they came."""
        known = tuple(
            self.known(node)
            if as_they_are
            else self._arrived[node]
            if node in self._arrived
            else self._permuted(self.known(node), _order(node))
            for node in nodes
        )
        self._contexts.switch(())
        self.graph.output(known)

    def _permuted(self, node: fx.Node, order: tuple[int, ...]) -> fx.Node:
        if order == tuple(range(len(order))):
            return node
        return self.graph.create_node("call_function", _PERMUTE, (node, order), name=_LAID_OUT)

    def _repeat(self, node: fx.Node) -> None:
        """Write the repeated operation `node` after those it needs, iteratively: masks are long chains."""
        pending = [node]
        while pending:
            missing = [
                s for s in pending[-1].all_input_nodes if s in self.flow.repeated and s not in self._known
            ]
            if missing:
                pending += missing
            elif (ready := pending.pop()) not in self._known:
                self.operation(ready)

    def _mapped(self, item: Any) -> Any:
        if isinstance(item, fx.Node):
            return self.known(item)
        if isinstance(item, torch.device):
            return self._contexts.device
        if isinstance(item, tuple | list):
            return type(item)(map(self._mapped, item))
        if isinstance(item, dict):
            return {key: self._mapped(part) for key, part in item.items()}
        return item


def _named(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments in an operation's code; a whole module holds its parameters and buffers itself."""
    return (node.args[0], *node.args[3:]) if node.target is call_whole else node.args


def _without_layouts(graph: fx.Graph) -> fx.Graph:
    """Return `graph` without the permutations between layers; `graph` itself if it has none."""
    if not any(node.name.startswith(_LAID_OUT) for node in graph.nodes):
        return graph
    plain = copy.deepcopy(graph)
    for node in list(plain.nodes):
        if node.name.startswith(_LAID_OUT):
            node.replace_all_uses_with(node.args[0])
            plain.erase_node(node)
    return plain


def _order(node: fx.Node) -> tuple[int, ...]:
    """Return the memory order of a crossing value's dimensions; inputs of the model cross as they are."""
    tensor = value(node)
    return tuple(range(tensor.ndim)) if role(node) else dense_order(tensor) or ()


def _back(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(dimension) for dimension in range(len(order)))
