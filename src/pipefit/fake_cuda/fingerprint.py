"""The fingerprint of a task, from the task and its chain.

Written layers are described by class and settings, traced layers by operations, and the loss by the functions
that one forward over fake tensors calls. Numbers in traced operations may depend on the microbatch size, such
as lengths and means over samples, so they are kept separately as `sizes`, which belong to a measurement. No
values of tensors are read; a hundred layers take milliseconds.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from pipefit.capture import (
    Chain,
    ChainLayer,
    GraphLayer,
    Task,
    layout,
    left_as_found,
    module_key,
    module_settings,
    registered_tensors,
    wholes,
)
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.fake_cuda.target import FakeTarget
from pipefit.schema.profile import Fingerprint, Measurement, digest
from pipefit.schema.training import Precision
from pipefit.texts import dtype_name, kind_of
from pipefit.torch_internals import pytree

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:e[+-]?\d+)?")
_DIGITS = 12  # digits of a layer's digest
_DEEPEST = 3  # levels of nested objects in a module's settings


class Fingerprinted(NamedTuple):
    """A fingerprint, and a digest of the numbers in operations at the microbatch size of the chain."""

    fingerprint: Fingerprint
    sizes: str


def fingerprint(task: Task, chain: Chain) -> Fingerprinted:
    """Return the fingerprint of `task` with the chain `chain`, without the loss.

    Make it before any layer runs, because some layers count their calls.

    Raises:
        UsageError: the model computes in an unknown precision.
    """
    known: dict[object, tuple[object, str]] = {}  # by key, which most layers share with others
    described = [_settings_and_tensors(layer.module, known) for layer in chain.layers]
    layers = [_operations(layer, what) for layer, (what, _) in zip(chain.layers, described, strict=True)]
    optimizer = _optimizer(task)
    result = Fingerprint(
        layers=tuple(digest(operations, _DIGITS) for operations, _ in layers),
        parameters=tuple(tensors for _, tensors in described),
        shared=tuple(_shared(chain)),
        inputs=tuple(sorted(chain.inputs.texts)),
        targets=() if chain.targets is None else tuple(sorted(chain.targets.texts)),
        loss="",
        precision=precision_of(task, chain),
        optimizer=type(optimizer).__qualname__,
        options=options(optimizer.defaults),
        groups="" if task.groups is None else digest(repr(list(_groups(task, chain))), _DIGITS),
        lengths=chain.inputs.lengths,
    )
    return Fingerprinted(result, digest(repr([sizes for _, sizes in layers])))


def with_loss(fingerprinted: Fingerprinted, chain: Chain, measurement: Measurement) -> Fingerprinted:
    """Return `fingerprinted` with the loss, run once over fake tensors like its inputs in `measurement`.

    Raises:
        UsageError: the loss fails on them.
    """
    loss, sizes = _loss(chain, measurement)
    return Fingerprinted(
        replace(fingerprinted.fingerprint, loss=digest(loss, _DIGITS)),
        digest(repr((fingerprinted.sizes, sizes))),
    )


def precision_of(task: Task, chain: Chain) -> Precision:
    """Return the task's precision; by default the dtype of most elements of parameters.

    Raises:
        UsageError: an unknown precision.
    """
    if task.precision is not None:
        return task.precision
    elements = Counter[str]()
    for parameter in nn.ModuleList(layer.module for layer in chain.layers).parameters():
        elements[dtype_name(parameter.dtype)] += parameter.numel()
    dtypes = [dtype for dtype, _ in elements.most_common()] or ["float32"]
    known = [dtype for dtype in dtypes if dtype in get_args(Precision)]
    if not known:
        raise UsageError(
            f"{chain.name} computes in {dtypes[0]}; pipefit supports {', '.join(get_args(Precision))}"
        )
    return cast(Precision, known[0])


def options(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return optimizer options in words, as far as they affect its bytes or kernels.

    The learning rate does not, and of other numbers only whether they are zero.
    """
    wanted = {name: value for name, value in values.items() if name != "lr" or isinstance(value, Tensor)}
    return tuple(f"{name}={_option(value)}" for name, value in sorted(wanted.items()))


# ---------------------------------------------------------------- the model


def _settings_and_tensors(module: nn.Module, known: dict[object, tuple[object, str]]) -> tuple[object, str]:
    """Return the settings of a layer, or of a traced one's whole modules, and a digest of its tensors.

    `known` has them for layers so far, by their keys.
    """
    if isinstance(module, GraphLayer):
        parts = tuple(_plain(module_settings(part, _described)) for part in wholes(module))
        return parts, digest(_tensors(module), _DIGITS)
    key = module_key(module)
    if key not in known:
        known[key] = _plain(module_settings(module, _described)), digest(_tensors(module), _DIGITS)
    return known[key]


def _operations(layer: ChainLayer, what: Any) -> tuple[str, list[str]]:
    """Return the operations of a layer without the numbers in traced operations, and these numbers."""
    module, sizes = layer.module, list[str]()
    if isinstance(module, GraphLayer):
        operations = _without_numbers(module.pipefit_code.operations, sizes)
        what = (type(module).__qualname__, operations, *what)
    return repr((layer.name, _plain(layer.autocast), what)), sizes


def _without_numbers(code: str, taken: list[str]) -> str:
    """Replace all numbers in `code`, and add them to `taken`; `0.0`, the rate of disabled dropout, stays."""

    def replaced(found: re.Match[str]) -> str:
        taken.append(found.group())
        is_nothing = not found.group().isdigit() and float(found.group()) == 0
        return found.group() if is_nothing else "#"

    return _NUMBER.sub(replaced, code)


def _tensors(module: nn.Module) -> str:
    every = registered_tensors(module)
    return repr([(name, _plain(layout(tensor)), *[first][: first != name]) for name, tensor, first in every])


def _shared(chain: Chain) -> Iterator[str]:
    for shared in chain.shared:
        yield " = ".join(f"{chain.layers[number].name}.{name}" for number, name in shared.places)


def _plain(value: object) -> object:
    """Return settings without classes and devices: equal texts in every process, on any device."""
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.device):
        return "a device"
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value


def _described(value: Any, depth: int = 0) -> object:
    """Describe a setting that is not a plain value: functions by name, objects by class and attributes."""
    if isinstance(value, Tensor):  # without requires_grad, which changes for tensors that a forward keeps
        return _plain((tuple(value.shape), value.stride(), value.dtype))
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), repr(_inner(item, depth))) for key, item in value.items()))
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(_inner(item, depth)) for item in value))
    if isinstance(value, functools.partial):
        return _described(value.func), _inner((value.args, value.keywords), depth)
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    if (
        isinstance(value, Enum | nn.Module)
        or not hasattr(value, "__dict__")
        or callable(value)
        or depth == _DEEPEST
    ):
        return str(value) if isinstance(value, Enum) else name
    return name, _described(
        {key: item for key, item in vars(value).items() if not key.startswith("_")}, depth + 1
    )


def _inner(value: Any, depth: int) -> object:
    if isinstance(value, tuple | list):
        return tuple(_inner(item, depth) for item in value)
    if isinstance(value, int | float | str | bytes | complex | None | type | torch.dtype | torch.device):
        return _plain(value)
    return _described(value, depth + 1)


# ---------------------------------------------------------------- the loss


class _CallRecorder(TorchFunctionMode):
    """Records every call of a torch function: its name, dtypes and settings; numbers and shapes separately.

    Without named arguments torch passes None or an empty mapping, as Python called: under a profiler the
    latter. The kernels that a function runs depend on the layout of its arguments: `contiguous` copies a
    slice of each of several samples, but not that of a single one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[object] = []
        self.sizes: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = resolve_name(func) or getattr(func, "__qualname__", str(func))
        named = kwargs or {}
        self.operations.append((name, [self._argument(leaf) for leaf in pytree.tree_leaves((args, named))]))
        return func(*args, **named)

    def _argument(self, leaf: Any) -> object:
        if isinstance(leaf, Tensor):
            self.sizes.append(tuple(leaf.shape))
            return dtype_name(leaf.dtype), leaf.ndim
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            self.sizes.append(leaf)
            return "0" if leaf == 0 and isinstance(leaf, float) else "#"
        return _inner(leaf, 0)


def _loss(chain: Chain, measurement: Measurement) -> tuple[str, str]:
    """Return the operations of the loss in one forward, and their sizes.

    Raises:
        UsageError: the loss fails.
    """
    if chain.criterion is None:
        return "the model's own", ""
    count = len(measurement.costs[-1].outputs)
    with FakeTarget("cpu"):
        values = [
            torch.empty(v.shape, dtype=getattr(torch, v.dtype), requires_grad=v.requires_grad)
            for v in measurement.loss.inputs
        ]
        with (
            left_as_found(chain.criterion),
            torch.enable_grad(),
            _CallRecorder() as recorder,
        ):  # the surrounding mode is not recorded
            try:
                chain.measured(measurement).loss(tuple(values[:count]), tuple(values[count:]))
            except PipefitError:
                raise
            except Exception as error:
                raise UsageError(
                    f"the loss of {chain.name} fails on outputs of the shapes seen in profiling "
                    f"({in_one_line(error)}): give the loss of the profile, or profile the model again"
                ) from error
    return repr(recorder.operations), repr(recorder.sizes)


# ---------------------------------------------------------------- the optimizer


def _optimizer(task: Task) -> torch.optim.Optimizer:
    """Return the optimizer of one parameter without elements: a matrix, because Muon takes only matrices.

    Raises:
        UsageError: it cannot be made.
    """
    with FakeTarget("cpu"):
        try:
            optimizer = task.optimizer([{"params": [nn.Parameter(torch.empty(0, 0))]}])
        except Exception as error:
            is_outside = "convert all Tensors to FakeTensors" in str(error)
            remedy = (
                "make its tensors, such as a learning rate, inside the function that makes the optimizer"
                if is_outside
                else "give a function that accepts any parameter groups, such as its class"
            )
            raise UsageError(
                f"the optimizer of {task.name} cannot be created for a group with one parameter "
                f"({in_one_line(error)}): {remedy}"
            ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer of {task.name} is a function that returns {kind_of(optimizer)}: it must return a "
            "torch.optim optimizer of the given parameter groups"
        )
    return optimizer


def _option(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_option, value))})"
    if isinstance(value, float) or (isinstance(value, int) and value == 0 and not isinstance(value, bool)):
        return "0" if value == 0 else "nonzero"
    return "a tensor" if isinstance(value, Tensor) else str(_inner(value, 0))


def _groups(task: Task, chain: Chain) -> Iterator[tuple[int, str, int, tuple[str, ...]]]:
    """Yield for every trained parameter: layer, name, number of its group in the layer, group options."""
    assert task.groups is not None
    for number, layer in enumerate(chain.layers):
        met: list[dict[str, Any]] = []
        for (name, parameter), (called, _) in zip(
            layer.module.named_parameters(), layer.named_parameters, strict=True
        ):
            if parameter.requires_grad:
                wanted = task.groups(called, parameter)
                if wanted not in met:
                    met.append(wanted)
                yield number, name, met.index(wanted), options(wanted)
