"""The user's training loop, and the loop over fake tensors in their own objects.

The user's module, loss and optimizers run as they are: their tensors are replaced by fake ones in place, and
everything is put back afterwards. So closures, hooks and subclasses work as in training, and an error in the
middle changes nothing.
"""

from __future__ import annotations

import functools
import gc
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter, getclosurevars, signature
from threading import get_ident
from types import CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipefit.capture import contrary, otherwise, refusing_compiled, updating
from pipefit.errors import UsageError
from pipefit.fake_cuda.target import FakeTarget, is_fake
from pipefit.own_loop.known_values import KnownValues
from pipefit.own_loop.offloading import on_no_host
from pipefit.schema.trace import Category
from pipefit.texts import kind_of
from pipefit.torch_internals import pytree, without_dispatch_modes
from pipefit.torch_internals.data_parallel import (
    is_sharded,
    reduce_alone,
    sharding_of,
    shards_alone,
    with_local_part,
)
from pipefit.torch_internals.patches import (
    always_stepping,
    eager_branches,
    formatted_numbers,
    parameters_copied_alone,
)

# ---- Fake tensors in place of real ones

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_CACHED = type(functools.cache(len))


class FakeCopies:
    """Fake tensors for the real ones of some objects: equal tensors and storages for equal ones."""

    def __init__(self, fake: FakeTarget, values: KnownValues, *, sharded: bool) -> None:
        self._fake, self._values = fake, values
        self._sharded = (
            sharded  # whether the loop has modules of `fully_shard`, whose parameters are DTensors
        )
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the real one stays alive with its id
        self._storages: dict[int, Tensor] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """Every fake tensor so far; of a sharded one, its local part."""
        return [fake for _, fake in self._tensors.values() if not is_sharded(fake)]

    def tensor(self, real: Tensor) -> Tensor:
        """Return the fake tensor for a real one, with a fake gradient if it has a gradient.

        Raises:
            UsageError: the tensor is of a subclass, whose memory is its own affair.
        """
        if id(real) not in self._tensors:
            if self._sharded and is_sharded(real):
                tensor = with_local_part(real, self.tensor)
            elif type(real) in _PLAIN and real.layout is torch.strided:
                tensor = self._made(real)
            else:
                raise UsageError(f"a tensor of the model {_unusual(real)}")
            if isinstance(real, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=real.requires_grad)
                for hook in hooks_of(real, "_backward_hooks"):
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                for hook in hooks_of(real, "_post_accumulate_grad_hooks"):
                    tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            else:
                tensor.requires_grad_(real.requires_grad and real.is_leaf)
                self._values.know(tensor, real)
            self._tensors[id(real)] = real, tensor
            if real.is_leaf and real.grad is not None:
                tensor.grad = self.tensor(real.grad)
        return self._tensors[id(real)][1]

    def again(self, real: Tensor) -> Tensor:
        """Return a new fake tensor for a tensor of a batch."""
        tensor = self._fake.fake(real).requires_grad_(real.requires_grad)
        self._values.know(tensor, real)
        return tensor

    def _made(self, real: Tensor) -> Tensor:
        storage = real.untyped_storage()
        whole = storage.nbytes() == real.numel() * real.element_size() and not real.storage_offset()
        if storage._cdata not in self._storages:
            if whole or storage.nbytes() % real.element_size():
                return self._storages.setdefault(storage._cdata, self._fake.fake(real))
            flat = torch.empty(storage.nbytes() // real.element_size(), dtype=real.dtype, device="meta")
            self._storages[storage._cdata] = self._fake.fake(flat)
        base = self._storages[storage._cdata]
        with torch.no_grad():
            return torch.as_strided(
                base.view(real.dtype) if base.is_contiguous() else base,
                real.shape,
                real.stride(),
                int(real.storage_offset()),
            )

    def forget(self) -> list[Tensor]:
        """Let go of all fake tensors, so that replaced ones die; return those that others hold."""
        alive = [ref(tensor) for tensor in self.tensors]
        self._tensors.clear()
        self._storages.clear()
        self._containers.clear()
        return [tensor for one in alive if (tensor := one()) is not None]

    def value(self, value: Any) -> Any:
        """Return a copy of a value of plain containers with fake tensors, and an empty cache for one of a
        function; other objects are returned as they are.
        """
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, ref):
            target = value()
            return ref(self.tensor(target)) if isinstance(target, Tensor) else value
        if type(value) not in (list, tuple, dict, defaultdict, OrderedDict, set, deque, _CACHED):
            return value
        if id(value) in self._containers:
            return self._containers[id(value)][1]
        if isinstance(value, _CACHED):  # its results stay, and the dry run has others
            again = functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
            return self._containers.setdefault(id(value), (value, again))[1]
        if isinstance(value, tuple):
            made: Any = tuple(self.value(item) for item in value)
            return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
        if isinstance(value, defaultdict):
            made = defaultdict(value.default_factory)
        else:
            made = deque(maxlen=value.maxlen) if isinstance(value, deque) else type(value)()
        self._containers[id(value)] = value, made
        if isinstance(value, (list, deque)):
            made.extend(map(self.value, value))
        elif isinstance(value, set):
            made.update(map(self.value, value))
        else:
            made.update((self.value(key), self.value(item)) for key, item in value.items())
        return made


def _unusual(tensor: Tensor) -> str:
    """Return why a tensor of the model has no dry run, and what to do."""
    if tensor.layout is not torch.strided:
        return (
            f"has the layout {tensor.layout}, which a dry run does not count: keep dense indices and values"
        )
    if nn.parameter.is_lazy(tensor):
        return "lacks a shape, because its module is lazy: run one forward first"
    return (
        f"is {kind_of(tensor)}, which a dry run does not know: apply the plan before the model is quantized"
    )


@dataclass(frozen=True, slots=True)
class UsedVariable:
    """A variable that a function uses from around it, in a cell, or from its module."""

    place: CellType | dict[str, Any]
    name: str
    value: Any

    @property
    def current(self) -> Any:
        """Its value now."""
        return self.place.cell_contents if isinstance(self.place, CellType) else self.place.get(self.name)

    def set(self, value: Any) -> None:
        if isinstance(self.place, CellType):
            self.place.cell_contents = value
        else:
            self.place[self.name] = value


@contextmanager
def _replaced(objects: Sequence[Any], variables: Sequence[UsedVariable], stand: FakeCopies) -> Iterator[None]:
    """Replace all tensors in variables and in the attributes of `objects` by fake ones in the body."""
    attributes = [(one, dict(vars(one))) for one in objects]
    hooks_before = [(v, list(v.items())) for _, before in attributes for v in before.values() if _is_hooks(v)]
    registered: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (table, dict(table))
        for one in objects
        if isinstance(one, nn.Module)
        for table in (one._parameters, one._buffers)
    ]
    try:
        for variable in variables:
            variable.set(stand.value(variable.value))
        for table, before in registered:
            table.update({name: None if t is None else stand.tensor(t) for name, t in before.items()})
        for one, before in attributes:
            hooks = {name for name, value in before.items() if _is_hooks(value)}
            kept = hooks | {"_parameters", "_buffers", "_modules"} if isinstance(one, nn.Module) else hooks
            vars(one).update({name: stand.value(value) for name, value in before.items() if name not in kept})
        yield
    finally:
        for variable in variables:
            variable.set(variable.value)
        for one, before in attributes:
            vars(one).clear()
            vars(one).update(before)
        for table, before in registered:
            table.clear()
            table.update(before)
        for hooks_of_one, entries in hooks_before:
            hooks_of_one.clear()
            hooks_of_one.update(entries)


@contextmanager
def _copied_classes(objects: Sequence[Any], stand: FakeCopies) -> Iterator[None]:
    """Give classes of modules, other than torch's, copies of their containers in the body; put back what it
    sets.
    """
    every = (base for one in objects if isinstance(one, nn.Module) for base in type(one).__mro__)
    own = {base for base in every if base.__module__.partition(".")[0] not in ("torch", "builtins")}
    attributes = {base: dict(vars(base)) for base in own}
    try:
        for base, before in attributes.items():
            for name, value in before.items():
                if isinstance(value, (list, dict, _CACHED)) and not name.startswith("__"):
                    setattr(base, name, stand.value(value))
        yield
    finally:
        for base, before in attributes.items():
            for name in vars(base).keys() - before.keys():
                delattr(base, name)
            for name, value in before.items():
                if vars(base).get(name) is not value:
                    setattr(base, name, value)


def hooks_of(one: Any, *kinds: str) -> list[Any]:
    """Return the hooks of a parameter or module."""
    return [hook for kind in kinds for hook in (getattr(one, kind, None) or {}).values()]


def _is_hooks(value: Any) -> bool:
    return isinstance(value, OrderedDict)


# ---- The loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A training loop.

    Args:
        module: the user's module.
        batch: a batch as the loop gets it, or a function that makes one.
        optimizers: the optimizers.
        make_optimizer: parameters -> optimizer, in place of `optimizers`.
        loss: (outputs, targets) -> loss; None if the module returns the loss.
        step: one step of the loop, `step(batch)`; None for the plain loop.
        state: further objects with tensors or counters that a step changes.
    """

    module: nn.Module
    batch: Any
    optimizers: tuple[Optimizer, ...] = ()
    make_optimizer: Callable[[Any], Optimizer] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    step: Callable[[Any], Any] | None = None
    state: tuple[Any, ...] = field(default=())
    steps: int = 20  # of a dry run, at most
    state_on_host: bool = False  # whether optimizer state is on the host between steps
    opposite: bool = False  # whether conditions on unknown values are false in a dry run, instead of true
    contrary: frozenset[str] = frozenset()  # places in code whose conditions get the other answer

    def _objects(self) -> list[Any]:
        """Return every object whose tensors are replaced in a dry run."""
        reached = [one for function in (self.loss, self.step, *self._hooks()) for one in _reached(function)]
        given = [self.module, *self.optimizers, *self.state, self.loss, self.step, *reached]
        modules = {id(m): m for one in given if isinstance(one, nn.Module) for m in one.modules()}
        given += [one for module in modules.values() for one in sharding_of(module)]
        given += [one for module in modules.values() for one in vars(module).values() if not _is_hooks(one)]
        given += [
            optimizer
            for one in given
            if _has_attributes(one) and not isinstance(one, nn.Module)
            for optimizer in _of_containers(list(vars(one).values()))
            if isinstance(optimizer, Optimizer)
        ]
        others = {id(one): one for one in given if _has_attributes(one) and id(one) not in modules}
        return [*modules.values(), *others.values()]

    def _hooks(self) -> list[Any]:
        """Return the hooks of parameters and submodules, which run in the loop."""
        parameters = [
            hook
            for one in self.module.parameters()
            for hook in hooks_of(one, "_backward_hooks", "_post_accumulate_grad_hooks")
        ]
        kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
        return [*parameters, *(hook for one in self.module.modules() for hook in hooks_of(one, *kinds))]

    def _functions(self) -> list[Any]:
        """Return loss, step, the forward of each submodule, and hooks."""
        return [
            self.loss,
            self.step,
            *(module.forward for module in self.module.modules()),
            *self._hooks(),
        ]

    def _variables(self) -> list[UsedVariable]:
        """Return the variables of the loop's functions that hold tensors, numbers or containers of them."""
        every = [one for function in self._functions() for one in variables_of(function)]
        plain = (Tensor, list, tuple, dict, set, deque, int, float, str, NoneType, _CACHED)
        return [one for one in every if isinstance(one.value, plain) and not one.name.startswith("__")]

    def _generators(self, objects: Sequence[Any]) -> list[Any]:
        """Return Python's and NumPy's generators: the global ones, and those that the loop uses."""
        used = [variable.value for function in self._functions() for variable in variables_of(function)]
        used += [*self.state, *(value for one in objects for value in vars(one).values())]
        return [*GLOBAL_GENERATORS, *{id(one): one for one in used if type(one) in GENERATORS}.values()]

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks run the same loop, in an engine of torch."""
        return any(isinstance(one, DistributedDataParallel) or sharding_of(one) for one in self._objects())

    @contextmanager
    def over_fakes(self, fake: FakeTarget, meter: Any) -> Iterator[Callable[[], Iterator[Updates]]]:
        """Yield a function that runs the steps over fake tensors, and yields at each one's end the number
        of updates so far by each optimizer.

        `meter` counts from the parameters on. Random states and the user's objects are put back.
        """
        numbers, values, objects = torch.get_rng_state(), KnownValues(), self._objects()
        restores = [_restoring(generator) for generator in self._generators(objects)]
        sharded = any(sharding_of(one) for one in objects)
        stand = FakeCopies(fake, values, sharded=sharded)
        gc.disable()  # cycles live until a collection, which no plan can rely on
        try:
            with (
                fake,
                values,
                eager_branches(),
                torch.enable_grad(),
                _replaced(objects, self._variables(), stand),
                _copied_classes(objects, stand),
                shards_alone(objects, meter.resized) if sharded else nullcontext(),
                counted_states(meter),
                always_stepping(),
                otherwise() if self.opposite else nullcontext(),
                contrary(self.contrary),
                formatted_numbers(),
                parameters_copied_alone(),
                refusing_compiled(),
                _reading_updates() as updates,
                ExitStack() as stack,
            ):
                optimizers = self.optimizers
                if self.make_optimizer is not None:
                    optimizers = (self.make_optimizer(self.module.parameters()),)
                if self.state_on_host:
                    for optimizer in optimizers:
                        stack.callback(on_no_host(optimizer).remove)
                resident = stand.forget()
                gradients = [t.grad for t in resident if t.is_leaf and t.grad is not None]
                meter.tag([*resident, *gradients], Category.PARAMETERS)
                del resident, gradients

                def run() -> Iterator[Updates]:
                    batches = (self._made_batch(stand, meter) for _ in range(self.steps))
                    steps = self._steps(batches) if self.step else self._plain(batches, optimizers)
                    every = [*optimizers, *(one for one in objects if isinstance(one, Optimizer))]
                    known = {id(one): one for one in every}.values()
                    for _ in steps:
                        yield tuple((type(one).__name__, updates[one]) for one in known)

                with meter:
                    for one in objects:
                        if isinstance(one, DistributedDataParallel):
                            if one.static_graph:
                                raise UsageError(
                                    "DistributedDataParallel with static_graph=True reduces the gradients of "
                                    "its first step after the backward, which a dry run cannot follow: use "
                                    "static_graph=False"
                                )
                            reduce_alone(one)
                    yield run
        finally:
            gc.enable()
            for restore in restores:
                restore()
            torch.set_rng_state(numbers)

    def _made_batch(self, stand: FakeCopies, meter: Any) -> Any:
        """Return a new fake batch, counted by the meter."""
        with without_dispatch_modes():  # a function makes real tensors, whose values decide
            batch = self.batch() if callable(self.batch) else self.batch
        if isinstance(batch, Mapping):
            batch = dict(batch)
        made = pytree.tree_map_only(
            Tensor, functools.cache(stand.again), batch
        )  # one tensor may be there twice
        meter.tag([t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)], Category.BOUNDARY)
        return made

    def _steps(self, batches: Iterator[Any]) -> Iterator[None]:
        assert self.step is not None
        for batch in batches:
            self.step(batch)
            yield

    def _plain(self, batches: Iterator[Any], optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Run the loop of torch's tutorials; its outputs and loss live until the next step replaces them."""
        for batch in batches:
            inputs, targets = batch if isinstance(batch, (tuple, list)) else (batch, None)
            for optimizer in optimizers or (self.module,):
                optimizer.zero_grad()
            outputs = call(self.module, inputs)
            loss = loss_of(outputs, targets, self.loss)
            torch.autograd.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            yield


Updates = tuple[tuple[str, int], ...]  # for each optimizer its class, and how often it has stepped

GENERATORS = random.Random, np.random.RandomState, np.random.Generator
GLOBAL_GENERATORS = random.random.__self__, np.random.random.__self__  # type: ignore[attr-defined]


def _restoring(generator: Any) -> Callable[[], None]:
    """Return a function that gives a generator its present state."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def _has_attributes(one: Any) -> bool:
    """Return whether an object may keep tensors in attributes."""
    return hasattr(one, "__dict__") and not isinstance(one, (type, ModuleType, FunctionType, Tensor))


def _reached(function: Any) -> Iterator[Any]:
    """Yield objects that a function uses by name, its own object and bound arguments, or the object it is."""
    if isinstance(function, partial):
        yield from filter(_has_attributes, (*function.args, *function.keywords.values()))
        yield from _reached(function.func)
    elif isinstance(function, MethodType):
        yield function.__self__
        yield from _reached(function.__func__)
    elif _has_attributes(function):
        yield function
    else:
        for one in variables_of(function):
            yield from _of_containers(one.value) if isinstance(one.value, _CONTAINERS) else ()
            if _has_attributes(one.value):
                yield one.value


def _of_containers(value: Any) -> Iterator[Any]:
    """Yield the modules and optimizers in nested containers."""
    if isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _of_containers(item)
    elif isinstance(value, (nn.Module, Optimizer)):
        yield value


_CONTAINERS = list, tuple, dict, set, deque


def variables_of(function: Any, seen: set[int] | None = None) -> Iterator[UsedVariable]:
    """Yield the outer and module variables that a function uses, and so on through the module's functions."""
    while isinstance(function, (MethodType, partial)):
        function = function.func if isinstance(function, partial) else function.__func__
    seen = set() if seen is None else seen
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    used, cells = (
        getclosurevars(function),
        zip(function.__code__.co_freevars, function.__closure__ or (), strict=True),
    )
    yield from (
        UsedVariable(cell, name, used.nonlocals[name]) for name, cell in cells if name in used.nonlocals
    )
    yield from (UsedVariable(function.__globals__, name, value) for name, value in used.globals.items())
    for one in (*used.nonlocals.values(), *used.globals.values()):
        if isinstance(one, FunctionType) and one.__module__ == function.__module__:
            yield from variables_of(one, seen)


def call(module: nn.Module, inputs: Any) -> Any:
    """Call a module: a tuple of inputs is its positional arguments, a dictionary its keyword arguments."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def loss_of(outputs: Any, targets: Any, loss: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """Return the loss of a module's outputs.

    Raises:
        UsageError: there is none.
    """
    if loss is not None:
        result: Any = loss(outputs, targets)
    else:
        result = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", outputs)
    if not isinstance(result, Tensor) or result.numel() != 1:
        made = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else kind_of(result)
        raise UsageError(
            f"{'the module' if loss is None else 'loss='} returns {made}, not a loss: pass loss=, a function "
            "of outputs and targets that returns one number as a tensor"
        )
    return result


class _Updates(Counter[Optimizer]):
    """Number of steps of every optimizer; one in a wrapper, such as accelerate's, counts for the wrapper."""

    def __missing__(self, optimizer: Optimizer) -> int:
        inner = getattr(optimizer, "optimizer", None)
        return self[inner] if isinstance(inner, Optimizer) else 0


@contextmanager
def _reading_updates() -> Iterator[Counter[Optimizer]]:
    """Count numbers that optimizers read, such as steps, as without effect on memory; yield the steps.

    Raises:
        UsageError: an optimizer repeats forwards as it needs, as `LBFGS` does; or it has real parameters.
    """
    stack, updates = ExitStack(), _Updates()

    def begin(optimizer: Optimizer, *_: Any) -> None:
        closure = signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            raise UsageError(
                f"{kind_of(optimizer)} chooses by values how often it calls its closure, so no dry run has "
                "its peak: use an optimizer that steps once"
            )
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if not all(is_fake(one) or is_sharded(one) for one in parameters):
            raise UsageError(
                f"the loop steps {kind_of(optimizer)} that a dry run does not find, so its memory would not "
                "be counted: pass it as optimizer=, or the object that holds it in state="
            )
        stack.enter_context(updating())
        updates[optimizer] += 1

    before = register_optimizer_step_pre_hook(begin)
    after = register_optimizer_step_post_hook(lambda *_: stack.pop_all().close())
    try:
        with stack:
            yield updates
    finally:
        before.remove()
        after.remove()


@contextmanager
def counted_states(meter: Any) -> Iterator[None]:
    """Let the meter count states of torch's generator that a recomputation keeps: they are real tensors."""
    get, thread = torch.get_rng_state, get_ident()

    def counted() -> Tensor:
        state = get()
        if get_ident() == thread:  # kernels are measured on other threads
            meter.tag([state], Category.ACTIVATIONS)
        return state

    torch.get_rng_state = counted
    try:
        yield
    finally:
        torch.get_rng_state = get
