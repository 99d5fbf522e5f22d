"""Random draws that two runs of a model have in common, though they compute in another order.

The draws of a model's first forward are recorded, microbatch by microbatch, and handed out again when another run comes
to them: as plain training, which does not know in which layers and slices a plan draws. Where they cannot be recorded,
both runs get means in place of draws, under which dropout changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.errors import UsageError

_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class UnknownDraw(UsageError):
    """An operator draws whose draws cannot be handed out again, or none is left of those that were recorded."""


class Draws:
    """The results of random operators, in the order of the forward, by whatever names a part of a forward."""

    def __init__(self) -> None:
        self.of: dict[Hashable, list[Tensor]] = {}

    def joined(self, parts: Sequence[Sequence[Hashable]]) -> deque[Tensor]:
        """The draws of a whole forward: of `parts` one after the other, each of which some slices have computed."""
        found = deque[Tensor]()
        for slices in parts:
            drawn = [self.of.get(key, []) for key in slices]
            if len({len(one) for one in drawn}) > 1:
                raise UnknownDraw("slices of a microbatch draw another number of times")
            found.extend(_together(list(tensors)) for tensors in zip(*drawn, strict=True))
        return found


def _together(tensors: list[Tensor]) -> Tensor:
    """Draws of slices as those of all, one after the other in the dimension of the samples, which is the first."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class Recording(_Mode):  # type: ignore[no-untyped-call]
    """Inside, what is drawn is recorded under `key`."""

    def __init__(self, draws: Draws, key: Hashable) -> None:
        super().__init__()
        self.draws, self.key = draws, key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_draw(func):
            drawn = result[1] if func is _DROPOUT else result
            self.draws.of.setdefault(self.key, []).append(_alone(func, drawn).detach().clone())
        return result


class Replaying(_Mode):  # type: ignore[no-untyped-call]
    """Inside, random operators take their results from those recorded."""

    def __init__(self, drawn: deque[Tensor]) -> None:
        super().__init__()
        self.drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_draw(func):
            return func(*args, **(kwargs or {}))
        if not self.drawn:
            raise UnknownDraw(f"it draws more often ({func}) than as planned")
        drawn = self.drawn.popleft()
        if func is _DROPOUT:
            return args[0] * drawn / (1 - args[1]), drawn
        if _is_in_place(func):
            return args[0].copy_(drawn)
        return drawn.clone()


class Means(_Mode):  # type: ignore[no-untyped-call]
    """Inside, random operators give the mean of what they would draw."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_draw(func):
            return func(*args, **kwargs)
        if func is _DROPOUT:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = _alone(func, func(*args, **kwargs))
        match func.overloadpacket:
            case _aten.bernoulli_ if isinstance(args[1] if len(args) > 1 else 0.5, float):
                return result.fill_(args[1] if len(args) > 1 else 0.5)
            case _aten.uniform_:
                low, high = args[1:3] if len(args) > 2 else (0.0, 1.0)
                return result.fill_((low + high) / 2)
            case _aten.rand | _aten.rand_like:
                return result.fill_(0.5)
            case _aten.normal_ | _aten.randn | _aten.randn_like:
                return result.fill_(args[1] if func.overloadpacket is _aten.normal_ and len(args) > 1 else 0.0)
        raise UnknownDraw(f"it draws by {func}, which has no mean that could stand for it")


def _is_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_in_place(func: Any) -> bool:
    return bool(func._schema.name.endswith("_"))


def _alone(func: Any, result: Any) -> Tensor:
    if not isinstance(result, Tensor):
        raise UnknownDraw(f"it draws by {func}, which gives more than its draws")
    return result
