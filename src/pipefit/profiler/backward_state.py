"""What a backward has to do with the tensors that its layer holds, past what autograd has saved for it.

In plain training the backward of a microbatch comes before the forward of the next, so that it finds what its own
forward has left. In a pipeline other forwards come between. Autograd checks what it has saved. A context's attributes,
the module itself on a context and hooks on gradients are checked by nobody: a layer whose backward so reads what its
forward changes, or changes what its forward reads, would train other gradients. It is refused by name.

Only layers that change what they hold are run once more for this, and not those that only count in integers, as batch
norm does, unless their backward runs code of Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.capture.constants import held_tensors
from pipefit.capture.refusals import Refusal
from pipefit.capture.storages import storage_key
from pipefit.capture.structure import Values
from pipefit.profiler.arriving import gradients_like
from pipefit.profiler.feedback import Feedback
from pipefit.profiler.writes import given_storages
from pipefit.runtime.boundary import GraphEnds, backward, leave


def check_backward(
    forward: Callable[[GraphEnds], Values], module: nn.Module, found: Feedback, written: Set[str]
) -> None:
    """Check that a backward of `module` does not depend on how many other microbatches went forward before it.

    Args:
        forward: runs it, at the start of a graph.
        found: what its forward changes and reads.
        written: the names of what its backward changes in place.

    Raises:
        Refusal: it does; names the tensor.
    """
    for name in sorted(written & found.read):
        raise Refusal(
            f"its backward changes {name!r}, with which its forward computes: in a pipeline other microbatches go "
            "forward before that",
            f"change {name!r} in the forward, or after the optimizer's step",
        )
    held = held_tensors(module)
    if any(found.runs_python or held[name].is_floating_point() for name in found.in_place):
        read = _read_unsaved(forward, module)
        for name in sorted(read & found.in_place):
            raise Refusal(
                f"its backward reads {name!r}, which its forward changes and does not save, as by an attribute of a "
                "context or a hook: with several microbatches in flight it would read the numbers of another one",
                f"keep {name!r} by ctx.save_for_backward, or a clone of it",
            )


def _read_unsaved(forward: Callable[[GraphEnds], Values], module: nn.Module) -> set[str]:
    """The names of what a backward reads of what `module` holds, besides what autograd has saved for it."""
    graph, saved, reads = GraphEnds(), Saved(), Reads()
    with saved:
        values = forward(graph)
    leave(graph, values)
    graph.incoming = gradients_like(values)
    held = {name: storage_key(tensor) for name, tensor in held_tensors(module).items()}
    del values
    with reads:
        backward(graph)
    return {name for name, storage in held.items() if storage in reads.storages - saved.versions.keys()}


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a pass runs; `storages` are those that operations were given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.storages |= given_storages(args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Inside, a forward runs; `versions` are those of what autograd saves for the backward and checks, by storage."""

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.versions[storage_key(tensor)] = tensor._version
        return tensor.detach()  # the tensor itself may be the result of the node that keeps it
