"""Transfers that begin together."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipefit.lowering import lower
from pipefit.runtime.comm import transport
from pipefit.runtime.comm.transport import Network, begin_together
from pipefit.schema.program import channels
from support.pipelines import equal_profile, make_plan


class OnGpu:
    """A stand-in for a GPU tensor, as far as a process group checks."""

    is_cuda, device = True, torch.device("cuda", 1)


def begun_of(tensors: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return a process group's calls, and the works to wait for."""
    seen = list[Any]()

    def called(what: Any) -> Any:
        seen.append(what)
        return what

    start, end = (
        mock.patch.object(transport, name, lambda group, device, name=name: called((name, device)))
        for name in ("start_coalescing", "end_coalescing")
    )
    with start, end:
        works = begin_together(None, tensors, [partial(called, n) for n in range(len(tensors))])  # type: ignore[arg-type]
    return seen, works


@pytest.mark.parametrize("count", [1, 2])
def test_on_a_gpu_they_are_one(count: int) -> None:
    """NCCL transfers are coalesced between a start and an end, and waited for together; a single one too,
    because torch would make a separate communicator for it.
    """
    start, end = (("start_coalescing", OnGpu.device), ("end_coalescing", OnGpu.device))
    assert begun_of([OnGpu()] * count) == ([start, *range(count), end], [end])


@pytest.mark.parametrize("ends", [None, RuntimeError("a group without its end")])
def test_what_cannot_begin_holds_nothing_back(ends: Exception | None) -> None:
    """A transfer that fails to begin does not block the group's next transfers, and its error is raised."""
    begins = [mock.Mock(), mock.Mock(side_effect=RuntimeError("a peer is gone"))]
    with (
        mock.patch.object(transport, "start_coalescing"),
        mock.patch.object(transport, "end_coalescing", side_effect=ends) as end,
        pytest.raises(RuntimeError, match="a peer is gone"),
    ):
        begin_together(None, [OnGpu(), OnGpu()], begins)  # type: ignore[arg-type, list-item]
    assert end.call_count == 1


@pytest.mark.parametrize("tensors", [[], [torch.ones(1), torch.ones(1)]])
def test_those_of_gloo_are_left_as_they_are(tensors: list[Any]) -> None:
    """gloo transfers are not coalesced, since gloo would copy them; without transfers nothing is waited for."""
    assert begun_of(tensors) == ([*range(len(tensors))], [*range(len(tensors))])


def test_the_first_message_of_a_channel_goes_the_way_of_all() -> None:
    """The first message of a channel, which makes the communicator, is sent like those of the steps;
    otherwise the steps would make another one.
    """
    begun = list[Any]()
    plan = make_plan(equal_profile(2), [1, 1])
    program = lower(plan)

    def begin(group: Any, tensors: Any, begins: Any) -> list[Any]:
        begun.append(len(tensors))
        return []

    network = Network(
        timeout=None,
        device=0,
        placement=program.placement,
        workers={0: 0, 1: 1},
        channels=dict.fromkeys(channels(program.actions, program.placement)),  # type: ignore[arg-type]
    )
    with (
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(transport, "begin_together", begin),
    ):
        network.warm_up(torch.device("cpu"))
    assert begun == [1, 1]
