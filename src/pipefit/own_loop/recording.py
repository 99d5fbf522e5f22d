"""One dry run of the plain loop, as data: calls of submodules, lives of storages, and who saves them.

The loop runs three times over fake tensors. The first run finds the steps after which all repeats. The
second is as in training, and dates the death of every storage. In the third, the graph holds no storages (a
saved tensor is made anew when backward asks for it), which dates their natural deaths: from there on only the
graph keeps them. Times are numbers of operations, which are equal in the last two runs.
"""

from __future__ import annotations

import functools
import pickle
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipefit.capture import READINGS, NumberReads, reading
from pipefit.fake_cuda.target import FakeTarget
from pipefit.measure import Kernels, Meter, Tracked
from pipefit.own_loop.installing import FORWARD
from pipefit.own_loop.loop import (
    GENERATORS,
    GLOBAL_GENERATORS,
    Loop,
    Updates,
    UsedVariable,
    hooks_of,
    variables_of,
)
from pipefit.profiler import PassMeter, statistics_written
from pipefit.schema.devices import DeviceKind
from pipefit.schema.layer_costs import Alike, Kernel, KernelMemory, Work
from pipefit.texts import counted, kind_of
from pipefit.timing import seconds
from pipefit.torch_internals import backward_id, pytree


@dataclass(slots=True, kw_only=True)
class Storage:
    """A storage's life, operations `born` to `died - 1`; `natural` is `died` if no graph held it."""

    nbytes: int
    born: int
    died: int
    natural: int
    lasting: bool  # parameter, buffer, gradient or optimizer state
    writes: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Saved:
    """A tensor that autograd saved: its storage, its number in each open call, and its last use."""

    storage: int
    numbers: tuple[tuple[int, int], ...]  # (call, number), outermost call first
    used: int | None = None


@dataclass(slots=True, kw_only=True)
class ModuleCall:
    """A call of a submodule: operations `enter` to `exit - 1`, and its backward `back` to `done - 1`."""

    name: str
    path: tuple[int, ...]  # calls around it and itself, outermost first
    enter: int
    args: tuple[int, ...]  # storages of its arguments
    exit: int = 0
    back: int | None = None
    done: int = 0
    refusal: str = ""  # why it cannot run a second time
    buffers: tuple[tuple[str, int], ...] = ()  # written buffers, and their bytes
    reads: tuple[tuple[str, int], ...] = ()  # other buffers, and their storages


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRecording:
    """The plain loop."""

    storages: list[Storage]
    saved: list[Saved]
    calls: list[ModuleCall]
    before: np.ndarray[Any, np.dtype[np.int64]]  # bytes before each operation
    high: np.ndarray[Any, np.dtype[np.int64]]  # most bytes during each operation
    seconds: np.ndarray[Any, np.dtype[np.float64]]  # of each operation
    ends: tuple[int, ...]  # of the steps
    state_bytes: int  # of a generator's state, if it counts
    gap: str  # memory in kernels that could not be measured
    has_conditions: bool  # whether unknown values decide what runs

    @property
    def later_seconds(self) -> float:
        """Seconds of a later step."""
        return float(self.seconds[self.ends[0] :].sum()) / (len(self.ends) - 1)

    @property
    def peaks(self) -> tuple[int, int]:
        """Peaks of the first step and of later ones."""
        first = self.ends[0]
        return int(self.high[:first].max()), int(self.high[first:].max())


def record(
    loop: Loop, target: Any, kernels: Kernels | None, kind: DeviceKind, numbers: NumberReads
) -> LoopRecording:
    """Record the loop on a target; count the numbers that it reads.

    Raises:
        UsageError: the loop cannot run over fake tensors.
    """
    steps, growth = _distinct_steps(loop, target, kernels, numbers)
    loop = replace(loop, steps=steps)
    plain = _run(loop, target, kernels, kind, numbers, saves=True)
    away = _run(loop, target, kernels, kind, numbers, saves=False)
    aligned = len(plain.high) == len(away.high) and len(plain.lives) == len(away.lives)
    for number, storage in enumerate(plain.lives):
        natural = away.lives[number].died if aligned else storage.died
        storage.natural = min(max(natural, storage.born + 1), storage.died)
    counts, measured = kernels is not None, () if kernels is None else kernels.memory.kernels
    return LoopRecording(
        storages=plain.lives,
        saved=plain.saved,
        calls=plain.finished_calls(),
        before=np.array(plain.before, np.int64),
        high=np.array(plain.high, np.int64),
        seconds=np.array(plain.seconds),
        ends=tuple(plain.ends),
        state_bytes=torch.get_rng_state().nbytes if counts else 0,
        gap=_gap((*measured, *plain.assumed), _DRAWS * plain.draws, growth),
        has_conditions=plain.has_conditions,
    )


_READS = (
    "the loop reads numbers from tensors, as item() does: peaks are the higher ones of runs with every "
    "condition on them true and with every one false"
)
_DRAWS = "the loop draws from the generators of Python or NumPy: peaks are those of the draws of the dry run"


def _gap(kernels: Sequence[Kernel], *remarks: str) -> str:
    """Return what peaks assume, as a phrase; reading a number takes no memory, but conditions on it may."""
    others = tuple(kernel for kernel in kernels if kernel not in READINGS)
    reads = _READS if len(others) < len(kernels) else ""
    return "; ".join(filter(None, (KernelMemory(kernels=others).gap or reads, *remarks)))


_CONFIRMING = 3  # steps after a cycle that must equal its first ones, in turn


@dataclass(frozen=True, slots=True)
class _Step:
    """Figures by which steps are compared."""

    peak: int
    level: int  # at its end
    updates: tuple[int, ...]  # by each optimizer


def _distinct_steps(
    loop: Loop, target: Any, kernels: Kernels | None, numbers: NumberReads
) -> tuple[int, str]:
    """Return the number of steps after which all repeats; if none does, that of all, and a remark on it."""
    fake, steps, updates = FakeTarget(target), list[_Step](), Updates()
    meter, numbers.count = Meter(0, kernels=kernels, place=fake.device), 0
    with reading(numbers), loop.over_fakes(fake, meter) as run:
        meter.begin("a step")
        for now in run():
            before = (count for _, count in updates or ((name, 0) for name, _ in now))
            made = tuple(count - old for (_, count), old in zip(now, before, strict=True))
            steps.append(_Step(meter.end(0, 0.0).total_bytes, meter.total, made))
            if distinct := _before_repetition(steps):
                return distinct, ""
            updates = now
            meter.begin("a step")
    first = counted(len(steps), "step")
    remark = f"the first {first} do not repeat in memory and updates: peaks are those of these steps"
    for name in dict.fromkeys(name for name, count in updates if not count):
        remark += f"; {name} does not step in them, so its update and state are not counted"
    return len(steps), remark


def _before_repetition(steps: Sequence[_Step]) -> int:
    """Return the number of steps until the end of a cycle that all later steps repeat; 0 if none does.

    In a cycle every optimizer steps.
    """
    for length in range(1, len(steps) - _CONFIRMING + 1):
        start = len(steps) - length - _CONFIRMING
        cycle = [step.updates for step in steps[start : start + length]]
        if all(map(any, zip(*cycle, strict=True))) and steps[start:-length] == steps[start + length :]:
            while start and steps[start - 1] == steps[start - 1 + length]:
                start -= 1
            return max(2, start + length)
    return 0


def _run(
    loop: Loop, target: Any, kernels: Kernels | None, kind: DeviceKind, numbers: NumberReads, *, saves: bool
) -> _Recorder:
    fake = FakeTarget(target)
    recorder = _Recorder(kernels, fake.device, kind)
    generators, numbers.count = pickle.dumps(GLOBAL_GENERATORS), 0
    with reading(numbers), loop.over_fakes(fake, recorder) as run:
        recorder.mark_lasting()
        with (
            _watched(loop.module, recorder),
            saved_tensors_hooks(recorder.pack if saves else recorder.forget, recorder.unpack),
        ):
            for _ in run():
                recorder.ends.append(recorder.now)
            recorder.close()
            recorder.draws = pickle.dumps(GLOBAL_GENERATORS) != generators
    recorder.assumed, recorder.has_conditions = fake.unknown.kernels, numbers.conditions > 0
    return recorder


# ---- The recorder


@dataclass(slots=True)
class _Form:
    """The form of a tensor, from which an equal one can be made."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Recorder(PassMeter):  # type: ignore[no-untyped-call]
    """A meter that records every operation, call and saved tensor of a loop."""

    def __init__(self, kernels: Kernels | None, place: torch.device, kind: DeviceKind) -> None:
        super().__init__(kernels, place)
        self._kind = kind
        self.lives: list[Storage] = []
        self.saved: list[Saved] = []
        self.calls: list[ModuleCall] = []
        self.before: list[int] = []
        self.high: list[int] = []
        self.seconds: list[float] = []
        self.ends: list[int] = []
        self._number: dict[int, int] = {}  # storage key -> number, of live storages
        self._open: list[int] = []
        self._saved_in: dict[int, int] = {}  # open call -> saved tensors so far
        self._writes: list[tuple[int, int]] = []  # operation, storage
        self.assumed: tuple[Kernel, ...] = ()  # operations whose results depend on values
        self.has_conditions = self.draws = False
        self._closed = False
        self._silent = False  # operations of the recorder itself

    @property
    def now(self) -> int:
        """Number of operations so far."""
        return len(self.high)

    def mark_lasting(self) -> None:
        for storage in self.lives:
            storage.lasting = True

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._silent:
            return func(*args, **kwargs)
        self._settle_numbers()
        self.before.append(self.total)
        self._peak = self.total
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is not None:
            for call in self._open:
                self.calls[call].refusal = "it draws from a generator of its own"
        out = super().operation(func, args, kwargs)
        for key in self.written | statistics_written(func, args, kwargs):
            if key in self._number:
                self.lives[self._number[key]].writes.append(self.now)
                self._writes.append((self.now, self._number[key]))
        self.written.clear()
        self.high.append(self._peak)
        work = Work.of(Alike(number, *each) for each, number in self._operations.items())
        self._operations.clear()
        self.seconds.append(seconds(work, self._kind))
        return out

    def _track(self, tensor: Tensor) -> Tracked:
        key = tensor.untyped_storage()._cdata
        if key not in self._live:
            self._number[key] = len(self.lives)
            nbytes = tensor.untyped_storage().nbytes()
            self.lives.append(Storage(nbytes=nbytes, born=self.now, died=0, natural=0, lasting=False))
        return super()._track(tensor)

    def _died(self, tracked: Tracked) -> None:
        if not self._closed:
            self.lives[self._number.pop(tracked.key)].died = self.now
        super()._died(tracked)

    def close(self) -> None:
        """End the record: storages that still exist die after the last operation."""
        for number in self._number.values():
            self.lives[number].died = self.now + 1
        self._closed = True

    # ---------------------------------------------------------------- saved tensors

    def _site(self, tensor: Tensor) -> int | None:
        number = self._number.get(tensor.untyped_storage()._cdata)
        if number is None:
            return None
        numbers = tuple((call, self._saved_in[call]) for call in self._open)
        self.saved.append(Saved(storage=number, numbers=numbers))
        return len(self.saved) - 1

    def pack(self, tensor: Tensor) -> tuple[int | None, Any]:
        site = self._site(tensor)
        self._count()
        return site, tensor if tensor.is_leaf else self._detached(tensor)

    def forget(self, tensor: Tensor) -> tuple[int | None, Any]:
        """Save the form of a tensor instead of it, unless it lasts."""
        site = self._site(tensor)
        self._count()
        if site is None or self.lives[self.saved[site].storage].lasting:
            return site, tensor if tensor.is_leaf else self._detached(tensor)
        return site, _Form(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def _count(self) -> None:
        for call in self._open:
            self._saved_in[call] += 1

    def _detached(self, tensor: Tensor) -> Tensor:
        with self._silently():
            return tensor.detach()

    def unpack(self, packed: tuple[int | None, Any]) -> Tensor:
        site, value = packed
        if site is not None:
            saved = self.saved[site]
            saved.used = self.now
            for call, _ in saved.numbers:
                own = self.calls[call]
                own.back = self.now if own.back is None else own.back
                own.done = self.now + 1
        if not isinstance(value, _Form):
            return value  # type: ignore[no-any-return]
        with self._silently():
            return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)

    @contextmanager
    def _silently(self) -> Iterator[None]:
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    # ---------------------------------------------------------------- calls

    def enter(self, name: str, args: Any) -> ModuleCall:
        """Begin a call."""
        own = len(self.calls)
        leaves = pytree.tree_leaves(args)
        numbers = [
            self._number.get(leaf.untyped_storage()._cdata) for leaf in leaves if isinstance(leaf, Tensor)
        ]
        call = ModuleCall(
            name=name,
            path=(*self._open, own),
            enter=self.now,
            args=tuple(dict.fromkeys(n for n in numbers if n is not None)),
            refusal=_refused_argument(leaves),
        )
        self.calls.append(call)
        self._open.append(own)
        self._saved_in[own] = 0
        return call

    def leave(self, call: ModuleCall, module: nn.Module) -> None:
        """End a call: find what it wrote."""
        self._open.pop()
        call.exit = self.now
        written = {number for _, number in self._writes[bisect_left(self._writes, (call.enter,)) :]}
        registered = {
            name: self._number.get(tensor.untyped_storage()._cdata)
            for name, tensor in (*module.named_buffers(), *module.named_parameters())
        }
        buffers = dict(module.named_buffers())
        call.buffers = tuple(
            (name, self.lives[n].nbytes) for name, n in registered.items() if n in written and name in buffers
        )
        call.reads = tuple(
            (name, n)
            for name, n in registered.items()
            if n is not None and n not in written and name in buffers
        )
        for name, number in registered.items():
            if number in written and name not in buffers:
                call.refusal = call.refusal or f"its forward changes its parameter {name}"
        for number in written.difference(registered.values(), call.args):
            if self.lives[number].born < call.enter:
                call.refusal = call.refusal or "its forward changes a tensor that is not one of its buffers"

    def finished_calls(self) -> list[ModuleCall]:
        """Return all calls, with the refusals that only the rest of the step shows."""
        for call in self.calls:
            until = self.now if call.back is None else call.back
            for number in call.args:
                if any(call.enter <= at < until for at in self.lives[number].writes):
                    call.refusal = call.refusal or "its input is changed in place before its backward"
            for name, number in call.reads:
                own = self.lives[number]
                if own.died < until or any(call.exit <= at < until for at in own.writes):
                    call.refusal = call.refusal or f"its buffer {name} is changed before its backward"
        return self.calls


_SIMPLE = (Tensor, int, float, complex, str, bytes, type(None), Enum, slice, range)
_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _refused_argument(leaves: Sequence[Any]) -> str:
    """Return why a second forward may get other arguments; empty if it gets the same."""
    for leaf in leaves:
        if not isinstance(leaf, (*_SIMPLE, *_TORCHS)) and not callable(leaf):
            remedy = ": set model.config.use_cache = False" if type(leaf).__name__.endswith("Cache") else ""
            return f"it is given {kind_of(leaf)}, which its forward may change{remedy}"
    return ""


# ---- Calls of submodules, watched


@contextmanager
def _watched(module: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Record every call of a submodule in the body."""
    parts = [(name, part) for name, part in module.named_modules() if name]
    before = [(part, vars(part).get(FORWARD)) for _, part in parts]
    used = {part: _Used.of(part) for _, part in parts}
    for name, part in parts:
        steps = name.split(".")
        around = [".".join(steps[:depth]) for depth in range(len(steps))]
        modules = [*part.named_modules(prefix=name), *((path, module.get_submodule(path)) for path in around)]
        inside = [used[other].by_forward for other in part.modules()]
        inside += [used[other].by_hooks for other in part.modules() if other is not part]
        variables = {(id(one.place), one.name): one for every in inside for one in every}
        vars(part)[FORWARD] = _watching(name, part, modules, list(variables.values()), recorder)
    try:
        yield
    finally:
        for part, forward in before:
            if forward is None:
                vars(part).pop(FORWARD, None)
            else:
                vars(part)[FORWARD] = forward


def _watching(
    name: str,
    module: nn.Module,
    modules: Sequence[tuple[str, nn.Module]],
    variables: Sequence[UsedVariable],
    recorder: _Recorder,
) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)
    def watching(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or backward_id() >= 0:
            return forward(*args, **kwargs)
        call, before = recorder.enter(name, (args, kwargs)), _Snapshot(modules, variables)
        try:
            return forward(*args, **kwargs)
        finally:
            recorder.leave(call, module)
            call.refusal = call.refusal or before.change(_Snapshot(modules, variables))

    return watching


@dataclass(frozen=True, slots=True)
class _Used:
    """Variables from around a module's forward, and from around its hooks, which run outside it."""

    by_forward: tuple[UsedVariable, ...]
    by_hooks: tuple[UsedVariable, ...]

    @staticmethod
    def of(module: nn.Module) -> _Used:
        hooks = hooks_of(module, "_forward_pre_hooks", "_forward_hooks")
        return _Used(
            tuple(variables_of(module.forward)), tuple(one for hook in hooks for one in _around_hook(hook))
        )


def _around_hook(hook: Any) -> Iterator[UsedVariable]:
    """Yield the variables from around a hook, and the object whose method it is, or that it is."""
    yield from variables_of(hook)
    while isinstance(hook, functools.partial):
        hook = hook.func
    if not isinstance(hook, FunctionType):
        owner = getattr(hook, "__self__", hook)
        yield UsedVariable({"": owner}, "", owner)


class _Snapshot:
    """Python state that a forward may change: attributes of some modules, outer variables, generators."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], variables: Sequence[UsedVariable]) -> None:
        self._seen: dict[int, Any] = {}  # objects, which keep their ids alive
        self._generators = {id(one): pickle.dumps(one) for one in GLOBAL_GENERATORS}
        self._contents: dict[str, Any] = {}
        for path, part in modules:
            for table in (part._buffers, part._parameters, vars(type(part)), vars(part)):
                for name, value in table.items():
                    self._contents[f"{path}.{name}".lstrip(".")] = self._content(value, 0)
        for one in variables:
            name = f"variable {one.name}" if one.name else f"the {type(one.value).__name__} of a hook"
            self._contents[name] = self._content(one.current, 0)

    def _content(self, value: Any, depth: int) -> Any:
        """Return a comparable copy of what an object holds, at most three levels deep."""
        again, self._seen[id(value)] = id(value) in self._seen, value
        if type(value) in GENERATORS:
            self._generators[id(value)] = pickle.dumps(value)
        if again or depth > 2 or isinstance(value, (Tensor, nn.Module, type, ModuleType, FunctionType)):
            return id(value)
        if isinstance(value, np.ndarray):
            return id(value), value.tobytes() if value.nbytes <= _MOST_BYTES else b""
        held = vars(value) if hasattr(value, "__dict__") else value
        if isinstance(held, Mapping):
            held = [*held.keys(), *held.values()]
        if not isinstance(held, (list, tuple, set, deque)):
            return id(value)
        if len(held) > _MOST_ITEMS:
            return id(value), len(held)
        return id(value), [self._content(item, depth + 1) for item in held]

    def change(self, after: _Snapshot) -> str:
        """Return what a forward between both has changed, as a reason; empty if nothing."""
        if any(after._generators.get(key) != state for key, state in self._generators.items()):
            return "it draws random numbers outside torch"
        for name, content in after._contents.items():
            if self._contents.get(name) != content:
                return f"its forward sets {name}"
        return ""


_MOST_ITEMS, _MOST_BYTES = 1000, 1 << 20  # of a container, and of an array, whose contents are compared
