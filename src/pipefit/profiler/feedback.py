"""Values that a forward reads and changes: reasons for which a second forward could differ.

Some layers compute with a buffer that they change: spectral norm, moving averages that feed back, observers
that quantize by earlier values. Their second forward starts from copies of these buffers, made before the
first. Batch norm in training does not feed back: it changes its statistics, and computes with those of the
batch. A layer may also change state that is not copied (a plain attribute, a parameter), or draw from its own
generator. Such a layer is reported and not recomputed.

One forward over fake tensors finds this: every value is traced back to the buffers that it was computed from.
Tensors in one storage count as one. A forward that reads a number, as every condition on a tensor does, may
behave differently for another number: an observer takes its first microbatch as it is and averages over later
ones. Since the buffers that it would then use are unknown, all of them count as fed back.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from pipefit.capture import (
    Refusal,
    Sample,
    Task,
    built,
    check_samples,
    evaluated,
    is_chain,
    is_empty,
    named_constants,
    reads_a_number,
    rows,
    samples_of,
    storage_key,
)
from pipefit.capture.plain_training import draws
from pipefit.capture.sample import sample
from pipefit.errors import PipefitError
from pipefit.measure import threads_of
from pipefit.measure.kernels import tensors
from pipefit.runtime import SMALLEST, free_bytes, host_bytes, host_seconds, left_out, rounding
from pipefit.schema.profile import Measurement, ModelProfile
from pipefit.torch_internals import TorchDispatchMode, pytree

# ---- Detection of coupled samples: a local batch then gives other numbers than its rows in the whole
# microbatch.
#
# Replicas of a stage compute local batches, so such a model trains to other numbers on replicas than on one
# device. Known operators are detected while each kind of layer runs over fake tensors: batch norm with batch
# statistics, random draws, and losses with class weights. All other cases, such as in-batch negatives, a sum
# over samples, or a mean over the words that count, show in numbers: real microbatches, and their halves, run
# forward through a copy of the module on one core. If that would need more than `LONGEST_SECONDS` or
# `MOST_BYTES`, random outputs run through the loss alone; the rest is then compared when the trainer starts
# (`runtime.checks.comparison`).

LONGEST_SECONDS = 1.0
MOST_BYTES, MOST_LOGITS_BYTES = 1 << 30, 1 << 28
_SAMPLES, _SEEDS = 4, (0, 1)
_NORMALIZES = "normalizes over the batch"
_WEIGHS = "divides by the weights of the targets in a local batch"
_APART = "differs between a microbatch and the mean of its halves"
_TRAINING = ("train", "training")  # names of arguments
_WEIGHING = "aten::nll_loss_forward", "aten::nll_loss2d_forward"
_LEAVES_OUT = "is a mean over targets, of which samples ignore different numbers"
_MEAN = 1  # the number of the reduction "mean" in torch


def coupling(func: Any, given: Mapping[str, Any]) -> str:
    """Return why an operator call couples samples, as a phrase to follow a layer's name, or "".

    `given` are the call's arguments by name.
    """
    name = func._schema.name
    if "batch_norm" in name and "backward" not in name:
        spreads = given["input"].shape[0] > 1  # an instance norm passes one row to this kernel
        return _NORMALIZES if spreads and (_trains(given) or "with_update" in name) else ""
    if name in _WEIGHING and given.get("weight") is not None and given.get("reduction") == _MEAN:
        return _WEIGHS
    return ""


def _trains(given: Mapping[str, Any]) -> bool:
    return any(given.get(flag) is True for flag in _TRAINING)


def with_coupling(profile: ModelProfile, reason: str) -> ModelProfile:
    """Return the profile, with its loss marked as coupled if `measured_coupling` returned a `reason`."""
    if not reason:
        return profile
    measurements = (
        replace(measurement, loss=replace(measurement.loss, coupled=reason))
        for measurement in profile.measurements
    )
    return replace(profile, measurements=tuple(measurements))


def measured_coupling(task: Task, profile: ModelProfile) -> str:
    """Return why the loss of a microbatch is not the mean of the losses of its halves, or "".

    Also returns "" if layers are already known to be coupled, or if the comparison is impossible: batches or
    kernels fail, or it would take too long.
    """
    largest = max(profile.measurements, key=lambda measurement: measurement.microbatch_size)
    if profile.coupled:
        return ""
    every = (*largest.costs, largest.loss)
    trains = not any(
        cost.alone or cost.draws for cost in every
    )  # otherwise two forwards are equal in evaluation only
    tried = _through_the_module(task) if _is_cheap(largest) else _through_the_loss(task, largest)
    # On one thread, so that a process forked later does not lack threads
    with threads_of(1), warnings.catch_warnings(), suppress(PipefitError):
        warnings.simplefilter("ignore")
        if left_out(
            [leaf for leaf in pytree.tree_leaves(sample(task, _SAMPLES)) if isinstance(leaf, Tensor)],
            _SAMPLES,
        ):
            return _LEAVES_OUT
        return next((_APART for whole, batch in tried if _is_apart(whole, batch, training=trains)), "")
    return ""


def _through_the_module(task: Task) -> Iterator[tuple[Task, Sample]]:
    """Yield the task with its module built, and small batches."""
    whole = built(task)
    for seed in _SEEDS:
        batch = sample(whole, _SAMPLES, seed=seed)
        check_samples(batch, _SAMPLES, whole.name)
        yield whole, batch


def _through_the_loss(task: Task, measurement: Measurement) -> Iterator[tuple[Task, Sample]]:
    """Yield a task that consists of the loss, and random tensors like the module's outputs."""
    samples, (last, *others) = measurement.microbatch_size, measurement.costs[-1].outputs
    nbytes = last.nbytes * _SAMPLES // samples
    if task.loss is None or others or last.shape[:1] != (samples,) or nbytes > MOST_LOGITS_BYTES:
        return
    alone = replace(task, module=nn.Identity())
    for seed in _SEEDS:
        generator = torch.Generator().manual_seed(seed)
        outputs = task.cast(torch.randn(_SAMPLES, *last.shape[1:], generator=generator))
        yield alone, (outputs, sample(task, _SAMPLES, seed=seed)[1])


def _is_apart(whole: Task, batch: Sample, *, training: bool) -> bool:
    """Return whether a batch's loss differs from the mean of its halves; False if that cannot be
    determined.
    """
    assert isinstance(whole.module, nn.Module)
    half = samples_of(batch) // 2
    asked = [batch, batch, rows(batch, 0, half), rows(batch, half, 2 * half)]
    one, again, *parts = evaluated(whole, asked, traced=not is_chain(whole.module), training=training)
    mean = sum(parts) / len(parts)
    largest = max(abs(one), abs(mean), SMALLEST)
    return (
        one == again and isfinite(mean) and abs(mean - one) > rounding(whole.precision or "float32") * largest
    )


def _is_cheap(measurement: Measurement) -> bool:
    """Return whether a comparison is cheap, judged by the costs of this microbatch in training."""
    share = len(_SEEDS) * _SAMPLES / measurement.microbatch_size
    needed = host_bytes(measurement) * max(1, _SAMPLES // measurement.microbatch_size)
    return share * host_seconds(measurement) <= LONGEST_SECONDS and needed <= min(
        MOST_BYTES, free_bytes() // 2
    )


# ---- State in which a forward may count: numbers, strings, flags, containers of these, random generators
#
# Such state is in attributes of a module, of its class or of another object, in closures of functions that
# these hold, in globals that a class or function names, and in `requires_grad` of parameters. A forward that
# changes it may compute something else on its next run. Not seen: state deeper than `_DEPTH` levels, in
# objects of C extensions, and in globals of functions that a forward calls. Takes microseconds for each
# attribute.

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, deque, set, frozenset)
_OPAQUE = (type, ModuleType, nn.Module)
_LIBRARIES = ("torch", "pipefit", "builtins")  # whose classes and functions do not count
_REGISTERED = ("_parameters", "_buffers", "_modules")
_DEPTH = 6  # levels of nested containers and objects

Plain = Mapping[str, object]


class _Same:
    """Equal for one object only; holds the object, so that no other is created at its address."""

    __slots__ = ("item",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, item: object) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.item is self.item


def plain_attributes(owner: object) -> Plain:
    """Return the attributes of a module and its parts, or of another object, by path, as comparable values.

    For a method, these are the attributes of its object.
    """
    owner = owner.__self__ if isinstance(owner, MethodType) else owner
    parts = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
    return {
        f"{path}.{name}".removeprefix("."): item for path, part in parts for name, item in _attributes(part)
    }


def _attributes(part: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of one module, object or function, with its class's and the globals that it
    names.
    """
    own = getattr(part, "__dict__", {})
    classes = [each for each in type(part).__mro__ if not _of_a_library(each)]
    functions = [part, *(item for each in classes for item in vars(each).values())]
    for name, item in (
        *_countable((n, i) for each in classes for n, i in vars(each).items()),
        *_globals(functions),
    ):
        yield name, comparable(item)
    yield from ((name, comparable(item)) for name, item in own.items() if name not in _REGISTERED)
    if isinstance(part, nn.Module):
        yield from (
            (f"{name}.requires_grad", p.requires_grad) for name, p in part.named_parameters(recurse=False)
        )
    if isinstance(part, FunctionType):
        yield from ((name, comparable(item)) for name, item in _closure(part))


def _globals(functions: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Yield the globals in which functions may count, by name."""
    for function in functions:
        if isinstance(function, FunctionType) and not _of_a_library(function):
            names = _names(function.__code__)
            yield from _countable((n, function.__globals__[n]) for n in names if n in function.__globals__)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function, and the functions inside it, look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _countable(items: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Yield the items that are numbers, strings, flags or containers, without dunder names."""
    return (
        (n, i) for n, i in items if isinstance(i, (*_PLAIN, *_CONTAINERS, Mapping)) and not n.startswith("__")
    )


def _closure(function: FunctionType) -> list[tuple[str, object]]:
    """Return the variables of a function's closure that have a value, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, cell.cell_contents) for name, cell in cells if not is_empty(cell)]


def _of_a_library(item: Any) -> bool:
    return str(getattr(item, "__module__", None)).partition(".")[0] in _LIBRARIES


def comparable(item: Any, depth: int = _DEPTH) -> object:
    """Return a value that is equal while `item` and its contents, `depth` levels deep, are unchanged."""
    match item:
        case Tensor():
            return Tensor
        case random.Random():
            return item.getstate()
        case np.random.Generator():
            return comparable(item.bit_generator.state)
        case np.random.RandomState():
            return comparable(item.get_state())
        case np.ndarray():
            return item.shape, item.tobytes()
    if isinstance(item, _PLAIN):
        return type(item), item
    if depth == 0 or isinstance(item, _OPAQUE):
        return _Same(item)
    if isinstance(item, Mapping):
        return tuple(
            (comparable(key, depth - 1), comparable(value, depth - 1)) for key, value in item.items()
        )
    if isinstance(item, _CONTAINERS):
        return type(item), tuple(comparable(part, depth - 1) for part in item)
    return _Same(item), comparable(_inside(item), depth - 1)


def _inside(item: Any) -> Mapping[str, object]:
    """Return the attributes of an object, or the objects that a function holds, by name."""
    match item:
        case MethodType():
            return {"self": item.__self__}
        case partial():
            return {"func": item.func, "args": item.args, "keywords": item.keywords}
        case FunctionType():
            return {} if _of_a_library(item) else dict(_closure(item))
    result: Mapping[str, object] = getattr(item, "__dict__", {})
    return result


def changed_name(before: Plain, after: Plain) -> str | None:
    """Return the first attribute that was changed, added or removed."""
    names = dict.fromkeys((*before, *after))
    return next((name for name in names if before.get(name, ...) != after.get(name, ...)), None)


# ---- Autograd graphs


def nodes(values: Sequence[Tensor]) -> set[Any]:
    """Return every node of the graph of `values`."""
    result: set[Any] = {value.grad_fn for value in values if value.grad_fn is not None}
    pending = list(result)
    while pending:
        later = {node for node, _ in pending.pop().next_functions if node is not None} - result
        result |= later
        pending += later
    return result


# ---- Storages that an operation takes, and those that its schema changes, through any alias such as `x.data`


def changed_arguments(func: Any) -> set[str]:
    """Return the names of the arguments that an operation changes in place."""
    return {
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }


def written_storages(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the storages of tensors that a call of `func` changes in place."""
    if not func._schema.is_mutable:
        return set()
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    leaves = pytree.tree_leaves([given.get(name) for name in changed_arguments(func)])
    return {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def updates_statistics(func: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a normalization with these arguments changes its statistics, which its schema may not
    say.
    """
    return any(given.get(name) for name in _TRAINING_FLAGS) or "with_update" in str(func)


def statistics_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the storages of the statistics that a call of `func` changes."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if not updates_statistics(func, given):
        return set()
    return {storage_key(given[name]) for name in _STATISTICS if isinstance(given.get(name), Tensor)}


def given_storages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the storages of all tensors among the arguments of an operation."""
    return {storage_key(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}


def changed_inputs(inputs: Sequence[Tensor], versions: Sequence[int], written: Set[int]) -> frozenset[int]:
    """Return the numbers of the inputs that a forward changed, by their version counters before it.

    Raises:
        Refusal: the forward `written` to an input's storage without a change of its version.
    """
    changed = frozenset(number for number, value in enumerate(inputs) if value._version != versions[number])
    if any(storage_key(value) in written for number, value in enumerate(inputs) if number not in changed):
        raise Refusal(
            "its forward changes its input without autograd's knowledge (x.data), so saved tensors of the "
            "layer before would stay unchanged if a stage ended between them",
            "change it under torch.no_grad(), or compute with a clone",
        )
    return changed


# ---- Feedback of a forward

_STATISTICS = ("running_mean", "running_var")
_TRAINING_FLAGS = ("training", "train", "use_input_stats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Reasons for which a second forward differs from the first: fed-back buffers, unrepeatable changes."""

    changed: frozenset[str]  # buffers that the forward changes
    fed_back: tuple[str, ...]  # changed buffers that it computes with; all its buffers if it reads numbers
    fed_back_bytes: int
    unrepeatable: str  # in words; empty if copies of buffers suffice
    parameters: frozenset[str]  # parameters that it changes
    unseen: tuple[str, ...]  # tensors that it changes unseen by autograd, as by `x.data`
    coupled: str  # why it couples the samples of a microbatch, in words, or empty
    draws: bool  # whether it draws random numbers


def feedback(
    forward: Callable[[], Sequence[Tensor]], module: nn.Module, owner: object, before: Plain
) -> Feedback:
    """Return what `forward`, which runs `module`, changes and computes with. Replaced buffers are restored.

    Args:
        owner: the object whose plain attributes may change: the module or, for a loss, the function.
        before: these attributes before any forward, because a first one may differ from the others.
    """
    buffers = [_Seen.now(name, b) for name, b in module.named_buffers(remove_duplicate=False)]
    others = [_Seen.now(name, p) for name, p in module.named_parameters(remove_duplicate=False)]
    others += [_Seen.now(name, constant) for name, constant in named_constants(module)]
    plain = plain_attributes(owner)
    with BufferSources([seen.tensor for seen in (*buffers, *others)]) as sources:
        outputs = forward()
        read = frozenset[int]().union(*map(sources.of, (*outputs, *_kept_by_custom_functions(outputs))))
    now = dict(module.named_buffers(remove_duplicate=False))
    changed = [b for b in buffers if now.get(b.name) is not b.tensor or b.is_changed(sources.written)]
    _put_back(module, buffers)
    after = plain_attributes(owner)
    written = sources.in_place | (sources.written & read)
    written |= {b.storage for b in buffers} if _toggles(plain, after) else set()
    held = [*(b for b in buffers if now.get(b.name) is b.tensor), *others]
    fed_back = [b for b in buffers if b.storage in read and b.storage in {one.storage for one in changed}]
    fed_back = buffers if sources.reads_numbers else fed_back
    names = [other.name for other in others if other.is_changed(sources.written)]
    parameters = frozenset(names) & {name for name, _ in module.named_parameters()}
    names += filter(None, (changed_name(before, plain), changed_name(plain, after)))
    return Feedback(
        changed=frozenset(buffer.name for buffer in changed),
        fed_back=tuple(buffer.name for buffer in fed_back),
        fed_back_bytes=sum({b.storage: b.tensor.untyped_storage().nbytes() for b in fed_back}.values()),
        unrepeatable=_unrepeatable(names, draws=sources.draws),
        parameters=parameters,
        unseen=tuple(one.name for one in held if one.is_unseen(written)),
        coupled=sources.coupled,
        draws=sources.draws_any,
    )


def _toggles(before: Plain, after: Plain) -> bool:
    """Return whether a `training` attribute changed: the next forward may change statistics read here."""
    return any(before[name] != after.get(name) for name in before if name.rpartition(".")[2] == "training")


def _unrepeatable(changed: Sequence[str], *, draws: bool) -> str:
    if changed:
        return f"changes {changed[0]!r}, which is not a buffer"
    return "draws from a private generator" if draws else ""


class _Seen(NamedTuple):
    """A tensor's storage and version before a forward."""

    name: str
    tensor: Tensor
    storage: int
    version: int

    @staticmethod
    def now(name: str, tensor: Tensor) -> _Seen:
        """Return the current storage and version of a tensor."""
        return _Seen(name, tensor, storage_key(tensor), tensor._version)

    def is_changed(self, written: Set[int]) -> bool:
        """Return whether the tensor has changed since, given the storages that were written to."""
        now = storage_key(self.tensor), self.tensor._version
        return self.storage in written or now != (self.storage, self.version)

    def is_in_place(self, written: Set[int]) -> bool:
        """Return whether its values were written to, or its storage replaced (`x.data = ...`)."""
        return self.storage in written or storage_key(self.tensor) != self.storage

    def is_unseen(self, written: Set[int]) -> bool:
        """Return whether it was changed in place without a change of its version counter."""
        return self.is_in_place(written) and self.tensor._version == self.version


def _put_back(module: nn.Module, buffers: Iterable[_Seen]) -> None:
    for buffer in buffers:
        path, _, name = buffer.name.rpartition(".")
        module.get_submodule(path)._buffers[name] = buffer.tensor


class BufferSources(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that tracks, for every storage, the buffers' storages from which its content was computed.

    - `taken` are the storages that operations took, `written` those that were written to, and `in_place`
      those of the latter that are not statistics of a norm.
    - `draws` says that random numbers came from another generator than torch's default, `draws_any` that
      there were any.
    - `reads_numbers` says that a number of unknown value was read.
    - `coupled` is the reason for which samples are coupled (`profiler.feedback`).
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._met: list[Any] = [
            t.untyped_storage() for t in tensors
        ]  # kept alive, so that no address is reused
        self._known = {storage._cdata: frozenset((storage._cdata,)) for storage in self._met}
        self.taken, self.written, self.in_place = set[int](), set[int](), set[int]()
        self.draws = self.reads_numbers = False
        self.coupled, self.draws_any = "", False

    def of(self, tensor: Tensor) -> frozenset[int]:
        """Return the storages of the buffers from which `tensor` was computed."""
        return self._known.get(storage_key(tensor), frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (
            kwargs or {}
        )
        changed = changed_arguments(func)
        read = given
        if updates_statistics(func, given):
            changed |= set(_STATISTICS)
            read = {name: item for name, item in given.items() if name not in _STATISTICS}
        self.reads_numbers |= reads_a_number(func, args)
        self.coupled = self.coupled or coupling(func, given)
        self.draws_any |= draws(func, args, kwargs or {})
        self.draws |= given.get("generator") not in (None, torch.default_generator)
        self.taken |= set(map(storage_key, tensors(given)))
        sources = frozenset[int]().union(*map(self.of, tensors(read)))
        out = func(*args, **(kwargs or {}))
        written = tensors([given.get(name) for name in changed])
        self.written |= set(map(storage_key, written))
        self.in_place |= set(
            map(storage_key, tensors([given.get(name) for name in changed.difference(_STATISTICS)]))
        )
        for tensor in (*tensors(out), *written):
            storage = tensor.untyped_storage()
            self._met.append(storage)
            self._known[storage._cdata] = self._known.get(storage._cdata, frozenset()) | sources
        return out


def _kept_by_custom_functions(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that custom functions keep for a backward, which their results may not depend on."""
    for node in nodes(outputs):
        if isinstance(node, BackwardCFunction):
            yield from tensors([node.saved_tensors, list(vars(node).values())])
