"""Tensor groups of a plan, whose devices compute the shards of one replica together.

A collective stands in the middle of a layer. Between processes it is one of `torch.distributed`; in one
process the devices of a group run on threads with turns (`tensor_parallel.lockstep`), and wait for each other
within an action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pipefit.errors import LimitMet, OutOfMemory, PeerLost, UsageError, WorkerFailed, all_lines
from pipefit.memory import tensor_groups
from pipefit.processes import met
from pipefit.runtime.hardware import ran_out
from pipefit.schema.plan import Plan
from pipefit.tensor_parallel import Alone, Collectives, LockstepCollectives, Meeting

# ---- Failed transfers between workers


def lost(what: str, error: BaseException, device: int) -> WorkerFailed | OutOfMemory:
    """Return the exception to raise after `error` stopped a transfer of `device`'s process.

    `what` describes the failure. This is `OutOfMemory` or a limit of the system if `error` says so; otherwise
    the loss of a peer, with advice.
    """
    said = all_lines(error)
    if ran_out(error):
        return OutOfMemory(
            f"device {device} ran out of memory for messages between workers ({said}): plan with a larger "
            "--reserve"
        )
    if limit := met(error):
        return LimitMet(f"{what} ({said}); {limit}")
    late = "timed out" in said.lower() or "timeout" in said.lower()
    advice = (
        "raise timeout_seconds if it is only slow" if late else "the output of that worker shows the reason"
    )
    return PeerLost(f"{what} ({said}); {advice}")


# ---- Collectives of tensor groups

TensorGroups = Callable[[tuple[int, ...], int], Collectives]  # by the devices of a group, and a rank of it


def without_peers(group: tuple[int, ...], rank: int) -> Collectives:
    """Return the collectives of a rank whose peers are absent, for dry runs."""
    return Alone(rank=rank, size=len(group))


class Together:
    """The tensor groups of a plan whose devices are all run by this process.

    Raises:
        UsageError: they would be on GPUs, whose backwards run on threads that cannot wait for each other.
    """

    def __init__(self, plan: Plan) -> None:
        self._meetings = {group: Meeting[Any](len(group)) for group in tensor_groups(plan)}
        self.devices = frozenset(member for group in self._meetings for member in group)
        if self.devices and plan.cluster.backend == "cuda":
            raise UsageError(
                f"devices {', '.join(map(str, sorted(self.devices)))} hold tensor shards, which a single "
                "process cannot train on GPUs: start one worker for each device, such as with pipefit "
                "train or torchrun"
            )

    def __call__(self, group: tuple[int, ...], rank: int) -> Collectives:
        return LockstepCollectives(rank=rank, size=len(group), group=self._meetings[group])

    @property
    def arrivals(self) -> int:
        """Number of times that a device has reached a collective so far."""
        return sum(meeting.arrivals for meeting in self._meetings.values())

    def abandon(self) -> None:
        """Stop all waiting in collectives after a failed step."""
        for meeting in self._meetings.values():
            meeting.forget()


@contextmanager
def naming_the_lost(group: Sequence[int], device: int) -> Iterator[None]:
    """Raise errors of a collective of `device` with the names of the other devices of its `group`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        named = " or ".join(str(other) for other in group if other != device)
        what = f"a tensor-parallel layer failed: device {named} has ended or hangs"
        raise lost(what, error, device) from error
