"""Messages and collectives of several tensors: NCCL carries them out as one, in one kernel, with the delays of one.

A message of one tensor goes the same way. torch gives messages that are not coalesced a communicator of their own,
beside that of the group (`ProcessGroupNCCL::pointToPoint`): it would be made, and waited for, in the middle of a step.

Gloo would copy the tensors into one and back, which takes memory that nobody counts. So it gets each for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor


def begin_together(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], begins: Sequence[Callable[[], dist.Work | None]]
) -> list[dist.Work]:
    """Begin transfers in a process group, one of each tensor; what has to be waited for.

    Raises:
        RuntimeError: one could not begin; nothing is held back then.
    """
    together = len(tensors) > 0 and tensors[0].is_cuda
    if together:
        torch.distributed.ProcessGroup._start_coalescing(group, tensors[0].device)
    try:
        begun = [begin() for begin in begins]
    except BaseException:
        if together:
            with suppress(RuntimeError):  # what could not begin is what is told
                torch.distributed.ProcessGroup._end_coalescing(group, tensors[0].device)
        raise
    if together:
        begun = [torch.distributed.ProcessGroup._end_coalescing(group, tensors[0].device)]
    assert None not in begun, "this worker is in the group"
    return [work for work in begun if work is not None]
