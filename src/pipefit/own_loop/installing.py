"""Another `forward` for each planned submodule of the user's module.

It is an attribute of the instance. Class, parameters, buffers, hooks and state dict stay as they are. A copy
or a pickle of the module gets the plain `forward` of its class, so files do not mention pipefit.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipefit.errors import UsageError
from pipefit.own_loop.offloading import HostTensors, is_parameter
from pipefit.schema.plan import LoopDecision
from pipefit.torch_internals import backward_id, pytree

FORWARD = "forward"


class PlannedForward:
    """A submodule's `forward` under a decision."""

    def __init__(self, module: nn.Module, decision: LoopDecision, host: HostTensors) -> None:
        self.module, self.decision, self.host = module, decision, host
        self.before = vars(module).get(FORWARD)  # another tool's forward
        self.inner: Callable[..., Any] = module.forward
        functools.update_wrapper(self, self.inner)
        # A model that is compiled later has a graph break here
        why = "pipefit recomputes or offloads this submodule"
        self._eager = torch.compiler.disable(self._call, reason=why)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._eager(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or backward_id() >= 0:  # the latter: within another recomputation
            return self.inner(*args, **kwargs)
        if self.decision.technique == "recompute":
            return self._recomputed(args, kwargs)
        fixed = {t.untyped_storage()._cdata for t in (*self.module.parameters(), *self.module.buffers())}
        with self.host.saving(
            self.decision.moved, lambda t: is_parameter(t) or t.untyped_storage()._cdata in fixed
        ):
            return self.inner(*args, **kwargs)

    def _recomputed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        again = _Again(self.module, self.decision)
        leaves, form = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place] for place in places]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inner = self.inner

        def run(*given: Tensor) -> Any:
            every = list(others)
            for place, tensor in zip(places, given, strict=True):
                every[place] = tensor
            own_args, own_kwargs = pytree.tree_unflatten(every, form)
            return inner(*own_args, **own_kwargs)

        # All tensors are positional: checkpoint finds the device, whose random state it keeps, by these
        # alone.
        return checkpoint(run, *tensors, use_reentrant=False, context_fn=lambda: (nullcontext(), again))

    def remove(self) -> None:
        """Give the module its former `forward`, unless another tool has replaced this one."""
        if vars(self.module).get(FORWARD) is self:
            if self.before is None:
                del vars(self.module)[FORWARD]
            else:
                vars(self.module)[FORWARD] = self.before

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as the plain `forward`."""
        if self.before is not None:
            return functools.partial, (self.before,)
        return getattr, (self.module, FORWARD)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.before is not None:
            return functools.partial(copy.deepcopy(self.before, memo))
        return _PlainForward(copy.deepcopy(self.module, memo))


class _PlainForward:
    """The `forward` of a copy's class, without the copy, which would live until garbage is collected."""

    def __init__(self, module: nn.Module) -> None:
        self._reference = weakref.ref(module)

    @property
    def _module(self) -> nn.Module:
        module = self._reference()
        assert module is not None  # it holds this
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._module).forward(self._module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(functools.partial(type(self._module).forward, self._module))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, FORWARD)

    def __deepcopy__(self, memo: dict[int, Any]) -> _PlainForward:
        return _PlainForward(copy.deepcopy(self._module, memo))


class _Again:
    """The context of every second forward of a call: the module has copies of the buffers that its forward
    writes, and its mode and numbers, as they were before the first one.

    Raises:
        RuntimeError: a parameter or another buffer has changed since the first forward, or the forward writes
            a buffer that it did not write when it was planned.
    """

    def __init__(self, module: nn.Module, decision: LoopDecision) -> None:
        self._module, self._name = module, decision.name
        self._before = {name: module.get_buffer(name).clone() for name in decision.buffers}
        self._parameters = _versions(module.named_parameters())
        self._buffers = self._other_buffers()
        self._numbers = [(vars(part), _numbers(vars(part))) for part in module.modules()]
        self._present: list[tuple[dict[str, Any], str, Any]] = []
        self._others: list[Version] = []

    def _other_buffers(self) -> list[Version]:
        """Return the buffers that have no copies."""
        return [one for one in _versions(self._module.named_buffers()) if one[0] not in self._before]

    def __enter__(self) -> None:
        self._others = self._other_buffers()
        here = {id(buffer) for _, buffer, _ in self._others}
        changed = [one for one in (*self._parameters, *self._buffers) if one[1]._version != one[2]]
        changed += [one for one in self._buffers if id(one[1]) not in here]
        for name, tensor, _ in changed:
            raise RuntimeError(
                f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name} of {self._name} was "
                "modified by an inplace operation, or replaced, "
                "between the forward and the backward of a call"
            )
        for attributes, numbers in self._numbers:
            for own in {**numbers, **_numbers(attributes)}:
                self._put(attributes, own, numbers.get(own, _ABSENT))
        for name, value in self._before.items():
            parent, _, own = name.rpartition(".")
            buffers = self._module.get_submodule(parent)._buffers
            self._put(buffers, own, value.clone())

    def _put(self, table: dict[str, Any], name: str, value: Any) -> None:
        """Give an entry of a table another value until the end."""
        self._present.append((table, name, table.get(name, _ABSENT)))
        _set(table, name, value)

    def __exit__(self, *_: object) -> None:
        for table, name, value in self._present:
            _set(table, name, value)
        self._present.clear()
        others, self._others = self._others, []
        for name, buffer, version in others:
            if buffer._version != version:
                raise RuntimeError(
                    f"{self._name} has written its buffer {name} in a recomputation, but did not when it was "
                    "planned: plan again with a batch that makes it do so"
                )


Version = tuple[str, Tensor, int]  # a tensor's name, itself, and how often it was written


def _versions(named: Iterable[tuple[str, Tensor]]) -> list[Version]:
    return [(name, tensor, tensor._version) for name, tensor in named]


def _numbers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers and words among the attributes of a module, its mode included."""
    return {name: value for name, value in attributes.items() if isinstance(value, (int, float, str))}


_ABSENT = object()


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry of a table, or take it out."""
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


def install(module: nn.Module, decisions: Sequence[LoopDecision], host: HostTensors) -> list[PlannedForward]:
    """Give planned submodules of `module` another `forward`.

    Raises:
        UsageError: a decision names no submodule, one that is compiled, or one that has a plan already.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    for decision in decisions:
        if decision.name not in modules:
            raise UsageError(
                f"the plan is for another module: this one does not have a submodule {decision.name!r}"
            )
    check_free(module)
    planned = [PlannedForward(modules[decision.name], decision, host) for decision in decisions]
    for forward in planned:
        vars(forward.module)[FORWARD] = forward
    return planned


def check_free(module: nn.Module) -> None:
    """Check that the module has no plan, and that none of its submodules is compiled, scripted or has sparse
    gradients.

    Raises:
        UsageError: it has, or one is.
    """
    for name, part in module.named_modules():
        if isinstance(vars(part).get(FORWARD), PlannedForward):
            raise UsageError("the module has a plan already: call remove() of its handle first")
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise UsageError(
                f"{name} has sparse gradients, which no dry run counts: make it with sparse=False"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(
                f"{name or 'the module'} is scripted, and torch.jit runs it out of sight: apply the plan to "
                "the module as it was before torch.jit.script"
            )
        if getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod"):
            raise UsageError(
                f"{name or 'the module'} is compiled, and the compiler decides which tensors a compiled call "
                "saves: apply the plan to the module as it was before torch.compile"
            )
