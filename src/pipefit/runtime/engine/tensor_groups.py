"""Tensor groups of a plan, whose devices compute the shards of one replica together.

A collective stands in the middle of a layer. Between processes it is one of `torch.distributed`; in one
process the devices of a group run on threads with turns (`tensor_parallel.lockstep`), and wait for each other
within an action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import LimitMet, OutOfMemory, PeerLost, UsageError, WorkerFailed, all_lines
from pipefit.memory import tensor_groups
from pipefit.processes import met
from pipefit.runtime.hardware import ran_out
from pipefit.schema.plan import Plan
from pipefit.tensor_parallel import Alone, Collectives, LockstepCollectives, Meeting, ProcessGroupCollectives

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenWorkers:
    """Collectives of `device` in a group of processes; errors name the other `devices` that may be gone."""

    inner: ProcessGroupCollectives
    devices: Sequence[int]
    device: int

    def __deepcopy__(self, memo: Any) -> BetweenWorkers:
        return self  # a copy of a layer belongs to the same processes

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._naming_the_lost():
            return self.inner.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        with self._naming_the_lost():
            return self.inner.all_gather(tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        with self._naming_the_lost():
            return self.inner.all_to_all(tensor)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        with self._naming_the_lost():
            return self.inner.broadcast(tensor, source)

    @contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            named = " or ".join(str(device) for device in self.devices if device != self.device)
            what = f"a tensor-parallel layer failed: device {named} has ended or hangs"
            raise lost(what, error, self.device) from error
