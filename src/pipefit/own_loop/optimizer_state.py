"""Optimizer state on the host between the steps of an optimizer.

Before a step every state tensor gets device memory and its values; after the step it is a tensor of the host
again, which anybody may read or save in between. So a forward and a backward have the memory for themselves,
and the step has it all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipefit.torch_internals import without_dispatch_modes

SMALLEST_BYTES = 1024  # a smaller tensor, such as a step count, stays

OnHost = Callable[[Tensor], Tensor]  # a host tensor of the form of a device tensor


class StateOnHost:
    """Keeps the state of an optimizer on the host between its steps, until `remove`.

    Args:
        make: makes a host tensor; copies go there and back if `copies`.
        apart: a context in which host tensors are made, out of sight of meters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: OnHost,
        *,
        copies: bool,
        apart: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._optimizer, self._make, self._copies, self._apart = optimizer, make, copies, apart
        self._known: dict[tuple[int, str], Tensor] = {}  # host tensors, by parameter and name
        self._away: dict[tuple[int, str], tuple[Tensor, torch.device]] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.bring()),
            optimizer.register_step_post_hook(lambda *_: self.leave()),
        ]
        self.leave()

    def bring(self) -> None:
        """Give every tensor that is still on the host device memory and its values."""
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                host, device = self._away.get((id(parameter), name), (None, None))
                if host is not None and value is host:
                    here = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
                    state[name] = here.copy_(host, non_blocking=True) if self._copies else here
        self._away.clear()

    def leave(self) -> None:
        """Move the state to the host."""
        on_gpu = False
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                key = id(parameter), name
                if not isinstance(value, Tensor) or value.device != parameter.device or key in self._away:
                    continue
                if value.untyped_storage().nbytes() < SMALLEST_BYTES:
                    continue
                host = self._known.get(key)
                if host is None or host.shape != value.shape or host.dtype != value.dtype:
                    with self._apart():
                        host = self._known[key] = self._make(value)
                if self._copies:
                    host.copy_(value, non_blocking=True)
                    on_gpu = on_gpu or value.is_cuda
                self._away[key] = host, value.device
                state[name] = host
        if on_gpu:
            torch.cuda.current_stream().synchronize()  # the caller may read host tensors from here on

    def remove(self) -> None:
        """Bring the state back, and let the optimizer be."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.bring()
        self._known.clear()


def on_host(optimizer: Optimizer, pool: Any) -> StateOnHost:
    """Keep real state in slots of a pool of host memory."""

    def make(value: Tensor) -> Tensor:
        slot = pool.take(value.untyped_storage().nbytes())
        owner = slot.owner
        flat = owner if isinstance(owner, Tensor) else torch.frombuffer(owner, dtype=torch.uint8)
        return flat.view(value.dtype).as_strided(value.shape, value.stride())

    return StateOnHost(optimizer, make, copies=True, apart=torch.no_grad)


def on_no_host(optimizer: Optimizer) -> StateOnHost:
    """Keep fake state nowhere: its form is known."""

    def make(value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return StateOnHost(optimizer, make, copies=False, apart=without_dispatch_modes)
