"""Real tensors in a loss that runs over fake ones, such as weights of classes: fake ones on the same device stand in.

Those of a loss that is a module go with the last stage to its device; those of a closure are where its script puts
them. They take none of what a plan counts, because they are there before and after it. A parameter among them
is refused: its gradient would be on the device of the loss alone, and no optimizer there has it. A loss may change its
tensors, or put others in the place of its buffers; those are put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.refusals import Refusal

_WAY_OUT = (
    "register it in the layer too, as several may have one parameter, or freeze it (requires_grad_(False)); a loss "
    "with parameters is a part of the module, which returns it (loss=None), and weight decay an option of the optimizer"
)
STRANGER = (
    "it computes with a parameter that it does not have, and whose gradient would be lost on its device",
    _WAY_OUT,
)


@dataclass(slots=True)
class StoodIn:
    """What losses that ran have met: real tensors with what stood in for each, and the buffers that they replaced."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    replaced: list[Tensor] = field(default_factory=list)


_noticing: ContextVar[StoodIn | None] = ContextVar("what stands in for real tensors", default=None)


@contextmanager
def noticing() -> Iterator[StoodIn]:
    """Inside, losses run over fake tensors."""
    token = _noticing.set(found := StoodIn())
    try:
        yield found
    finally:
        _noticing.reset(token)


def standing_in(values: tuple[Tensor, ...], loss: object) -> AbstractContextManager[object]:
    """Inside, while a loss runs, real tensors that meet `values` are replaced by fake ones, if those are fake."""
    like = values[0]
    return _standing_in(like, loss) if isinstance(like, FakeTensor) else nullcontext()


@contextmanager
def _standing_in(like: FakeTensor, loss: object) -> Iterator[None]:
    parts = loss.modules() if isinstance(loss, nn.Module) else ()
    buffers = {(part, name): buffer for part in parts for name, buffer in part._buffers.items()}
    found, stand_ins = _noticing.get(), _StandIns(like)
    try:
        with stand_ins:
            yield
    finally:
        for (part, name), buffer in buffers.items():
            if part._buffers.get(name) is not buffer:
                part._buffers[name] = buffer
                if found is not None and buffer is not None:
                    found.replaced.append(buffer)
        if found is not None:
            found.pairs.extend(stand_ins.pairs)


def left_real(tensor: Tensor) -> AbstractContextManager[object]:
    """Inside, a real tensor can be copied where a fake mode is on, and the copy is real; fake ones stay with theirs."""
    return nullcontext() if isinstance(tensor, FakeTensor) else real()


def is_faking() -> bool:
    """Whether a fake mode is on, so that real tensors have no place here."""
    return active_fake_mode() is not None


def real() -> AbstractContextManager[object]:
    """Inside, tensors are real ones where a fake mode is on."""
    return _disable_current_modes() if is_faking() else nullcontext()


class _StandIns(TorchFunctionMode):
    """Gives every operation fake tensors like `like`, on the same device, in the place of real ones."""

    def __init__(self, like: FakeTensor) -> None:
        super().__init__()
        self._like = like
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # real and fake, which keeps the first from being freed

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The real tensors so far, with the fake ones."""
        return list(self._made.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.requires_grad:
            raise Refusal(*STRANGER)
        if id(tensor) not in self._made:
            with _disable_current_modes(), self._like.fake_mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._like.device)
            self._made[id(tensor)] = tensor, made
        return self._made[id(tensor)][1]
