"""An exported program as one flat list of operations, without nested graphs, checks and dead code.

`torch.export` puts operations under `torch.no_grad()` or `torch.autocast` into nested graphs. Here these are
inlined, and every operation records its contexts, so that a cut may be anywhere: each layer enters the
contexts again. Takes time linear in the number of operations and computes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from pipefit.capture.refusals import (
    SHAPE,
    SPARSE,
    TRANSFORM,
    refuse_node,
    refuse_object,
    refuse_operation,
)
from pipefit.capture.storages import storage_key
from pipefit.capture.whole_modules import call_whole
from pipefit.torch_internals import HigherOrderOperator, OpOverload, is_functorch_tensor, pytree

# ---- Values that share memory, and operations that write into it
#
# Views of one tensor that cross a cut become separate tensors, so after an operation writes into one, the
# other would not change. A cut must therefore not lie between a change in place and a value that shares its
# memory. Both are found from operator schemas and the storages of the traced values, in one pass.

_NORMS = (
    torch.ops.aten.batch_norm.default,
    torch.ops.aten.instance_norm.default,
)  # arguments 3 and 4: statistics


_DROPOUTS = (  # they return their input if they drop nothing; traces show that since torch 2.14
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
)


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the values that `node` writes into, running statistics of norms in training included."""
    if node.target is call_whole:
        return list(node.args[2])  # type: ignore[arg-type]
    if not isinstance(node.target, OpOverload):
        return []
    if node.target in _NORMS and node.args[5]:  # in training
        return [item for item in node.args[3:5] if isinstance(item, fx.Node)]
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    named = ((a, node.kwargs[a.name]) for a in node.target._schema.arguments if a.name in node.kwargs)
    return [
        item
        for argument, item in (*arguments, *named)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(item, fx.Node)
    ]


def groups(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each node the first node whose memory it may share, or the node itself."""
    first: dict[fx.Node, fx.Node] = {}
    storages: dict[int, fx.Node] = {}
    for node in graph.nodes:
        candidates = [first[source] for source in sources(node)]
        for storage in _storages(node.meta.get("val")):
            candidates.append(storages.setdefault(storage, candidates[0] if candidates else node))
        root = candidates[0] if candidates else node
        for other in {
            candidate for candidate in candidates if candidate is not root and candidate is not node
        }:
            for known in [n for n, r in first.items() if r is other]:
                first[known] = root
            for storage in [s for s, r in storages.items() if r is other]:
                storages[storage] = root
        first[node] = root
    return first


def sources(node: fx.Node) -> Iterable[fx.Node]:
    """Yield the arguments that the result may be a view of."""
    if node.op != "call_function":
        return
    if node.target is call_whole:  # a view of an argument, not of the module's tensors
        yield from (leaf for leaf in pytree.tree_leaves(node.args[3:5]) if isinstance(leaf, fx.Node))
        return
    if not isinstance(node.target, OpOverload):
        yield from node.all_input_nodes  # getitem
        return
    if node.target in _DROPOUTS and not (node.args[1] and node.args[2]):
        yield node.args[0]  # type: ignore[misc]
        return
    if not any(result.alias_info is not None for result in node.target._schema.returns):
        return
    for argument, item in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(item, fx.Node):
            yield item


def _storages(item: Any) -> list[int]:
    if isinstance(item, Tensor):
        return [storage_key(item)]
    if isinstance(item, tuple | list):
        return [storage for part in item for storage in _storages(part)]
    return []


# ---- Flattening

Context = tuple[
    tuple[Any, ...], ...
]  # ("grad", enabled) or ("autocast", device type, dtype, enabled, cached)

_CHECKS = (
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
)
_SCALARS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


@dataclass(frozen=True, slots=True)
class Role:
    """Meaning of a placeholder: a parameter, buffer, constant or module of this name, or input leaf
    `index`.
    """

    kind: Literal["parameter", "buffer", "constant", "module", "input"]
    name: str
    index: int = -1


def flatten(program: ExportedProgram, name: str, *, autocasts: bool = False) -> fx.Graph:
    """Return the program's operations in order, with metadata read by `role`, `stack`, `context` and `value`.

    `autocasts` says that the layers will run under autocast, which parts of the model may turn off.

    Raises:
        UsageError: an operation cannot be flattened (`torch.cond`) or reads a tensor into Python, or an
            object that is not a tensor is computed with.
    """
    graph = _Inliner(program, name, autocasts=autocasts).graph
    _settle_buffers(graph)
    sweep(graph)
    return graph


def role(node: fx.Node) -> Role | None:
    """Return the meaning of a placeholder; None for an operation."""
    result: Role | None = node.meta.get("role")
    return result


def stack(node: fx.Node) -> tuple[str, ...]:
    """Return the paths of the modules around an operation, root ("") first; `block@1` for a second call."""
    result: tuple[str, ...] = node.meta.get("stack", ())
    return result


def context(node: fx.Node) -> Context:
    """Return the contexts that the operation runs under, outermost first."""
    result: Context = node.meta.get("context", ())
    return result


def value(node: fx.Node) -> Any:
    """Return a fake tensor (or structure) like the operation's result."""
    return node.meta.get("val")


def nbytes(node: fx.Node) -> int:
    """Return the bytes of the operation's result, as if sent; 0 if it is not a tensor."""
    result = value(node)
    return result.numel() * result.element_size() if isinstance(result, Tensor) else 0


def draws(node: fx.Node) -> bool:
    """Return whether the operation may draw from torch's default generator; a whole module counts as
    drawing.
    """
    return node.target is call_whole or (
        isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    )


def operator_name(node: fx.Node) -> str:
    """Return the operator's name without overload, such as `add`; for a plain function, the node's name."""
    target = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, OpOverload) else node.name


def sweep(graph: fx.Graph) -> None:
    """Remove operations that neither the output nor a mutated buffer depends on, except random draws."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (
            node.op == "output"
            or node in live
            or draws(node)
            or any(_outlives(target, live) for target in mutated_arguments(node))
        ):
            live.add(node)
            live.update(node.all_input_nodes)
    for node in reversed(list(graph.nodes)):
        if node not in live and node.op != "placeholder":
            graph.erase_node(node)


def _outlives(target: fx.Node, live: set[fx.Node]) -> bool:
    """Return whether a change of `target` matters: its storage is used later or belongs to an input."""
    while target not in live:
        if target.op == "placeholder":
            return True
        if not target.all_input_nodes:
            return False
        target = target.all_input_nodes[0]
    return True


def _settle_buffers(graph: fx.Graph) -> None:
    """Move the update of every buffer from the end of the graph to the computation of its new value."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.users:
            continue
        buffer, made = node.args[:2]
        if not isinstance(buffer, fx.Node) or role(buffer) is None or not isinstance(made, fx.Node):
            continue
        if buffer in mutated_roots(made):
            graph.erase_node(node)
            continue
        order = {other: number for number, other in enumerate(graph.nodes)}
        max((made, *(user for user in buffer.users if user is not node)), key=order.__getitem__).append(node)
        node.meta["stack"], node.meta["context"] = stack(made), (("grad", False),)


def mutated_roots(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values whose in-place result `node` is, nearest first."""
    while targets := mutated_arguments(node):
        node = targets[0]
        yield node


class _Inliner:
    """Copies a program and its nested graphs into one graph."""

    def __init__(self, program: ExportedProgram, name: str, *, autocasts: bool) -> None:
        self.name, self.graph = name, fx.Graph()
        self.autocasts, self._modules = autocasts, dict[str, fx.Node]()
        self.roles = {
            spec.arg.name: Role(
                _KINDS[spec.kind],  # type: ignore[arg-type]
                spec.target or spec.arg.name,
                index,
            )
            for index, spec in _numbered(program, name)
        }
        outputs = self._copy(program.graph_module, None, ())
        self.graph.output(outputs)

    def _copy(self, module: fx.GraphModule, arguments: tuple[Any, ...] | None, around: Context) -> Any:
        """Return the outputs of `module` on `arguments`; None for the program itself, which has
        placeholders.
        """
        known: dict[fx.Node, Any] = {}
        given = iter(arguments or ())
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node] = self._placeholder(node) if arguments is None else next(given)
            elif node.op == "get_attr":
                known[node] = getattr(module, node.target)
            elif node.op == "output":
                return _through(node.args[0], known)
            else:
                known[node] = self._operation(node, known, around)
        raise AssertionError("a graph ends in its output")

    def _placeholder(self, node: fx.Node) -> fx.Node:
        copied = self.graph.placeholder(node.name)
        copied.meta = {"role": self.roles[node.name], "val": node.meta.get("val")}
        return copied

    def _operation(self, node: fx.Node, known: Mapping[fx.Node, Any], around: Context) -> Any:
        args, kwargs = _through(node.args, known), _through(node.kwargs, known)
        if node.target in _CHECKS:
            return None
        if node.target is operator.getitem and isinstance(args[0], tuple | list):
            return args[0][args[1]]
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            return self._copy(args[1], args[2:], (*around, ("grad", args[0])))
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            return self._copy(args[4], args[5:], self._autocast(around, args[:4]))
        if node.target is torch.ops.aten.detach_.default and args[0].target is torch.ops.aten.clone.default:
            return args[0]  # made by `torch.tensor(...)` in a forward
        _refuse(self.name, node)
        if node.target is call_whole:
            args = (self._module(args[0]), *args[1:])
        target = (
            node.target
            if node.target is not torch.ops.aten.lift_fresh_copy.default
            else torch.ops.aten.clone.default
        )
        copied = self.graph.create_node("call_function", target, args, kwargs)
        copied.meta = {
            "stack": tuple(dict.fromkeys(_calls(node.meta.get("nn_module_stack") or {}))),
            "context": around,
            "val": node.meta.get("val"),
            "stack_trace": node.meta.get("stack_trace"),
        }
        return copied

    def _module(self, path: str) -> fx.Node:
        """Return the placeholder of a module that stays whole."""
        if path not in self._modules:
            self._modules[path] = self.graph.placeholder(path.replace(".", "_"))
            self._modules[path].meta = {"role": Role("module", path)}
        return self._modules[path]

    def _autocast(self, around: Context, settings: tuple[Any, ...]) -> Context:
        """Return `around` with an autocast inside it; an autocast that turns nothing off is left out."""
        if not settings[2] and not self.autocasts and not any(entry[0] == "autocast" for entry in around):
            return around
        return (*around, ("autocast", *settings))


def _numbered(program: ExportedProgram, name: str) -> Iterator[tuple[int, Any]]:
    """Yield the inputs of a program; the user's inputs are numbered, others have -1."""
    leaves = 0
    for spec in program.graph_signature.input_specs:
        if spec.kind not in _KINDS:
            refuse_object(name, spec.target or spec.arg.name)
        yield (leaves if spec.kind is InputKind.USER_INPUT else -1), spec
        leaves += spec.kind is InputKind.USER_INPUT


def _calls(modules: Mapping[str, tuple[str, Any]]) -> Iterator[str]:
    """Yield the modules that an operation ran in, with the number of the call after the first."""
    for key, (path, _) in modules.items():
        _, several, number = key.rpartition("@")
        yield f"{path}@{number}" if several and path else path


def plain(call: str) -> str:
    """Return the path of the module that was called, without the number of the call."""
    return call.partition("@")[0]


def _refuse(name: str, node: fx.Node) -> None:
    """Check that the operation `node` of model `name` can be part of a layer.

    Raises:
        UsageError: its result has an unknown shape, is sparse or a Python number, or it runs under a
            transform.
    """
    made = pytree.tree_leaves(node.meta.get("val"))
    if any(map(_by_value, made)):
        refuse_node(name, node, *SHAPE)
    if node.target in _SCALARS or isinstance(node.target, HigherOrderOperator):
        refuse_operation(name, node)
    if any(map(_transformed, made)):
        refuse_node(name, node, *TRANSFORM)
    if any(isinstance(item, Tensor) and item.layout is not torch.strided for item in made):
        refuse_node(name, node, *SPARSE)


def _transformed(item: Any) -> bool:
    """Return whether `item` is a tensor inside torch.vmap or another transform of torch.func."""
    return isinstance(item, Tensor) and is_functorch_tensor(item)


def _by_value(item: Any) -> bool:
    """Return whether `item` is a tensor with a size that depends on values: a size that is not an int."""
    return isinstance(item, Tensor) and not all(isinstance(size, int) for size in item.shape)


def _through(item: Any, known: Mapping[fx.Node, Any]) -> Any:
    """Return `item` with every node replaced by its entry in `known`."""
    if isinstance(item, fx.Node):
        return known[item]
    if isinstance(item, tuple | list):
        return type(item)(_through(part, known) for part in item)
    if isinstance(item, dict):
        return {key: _through(part, known) for key, part in item.items()}
    return item
