"""Transports: messages inside one process, channels between processes, and errors for lost peers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.errors import PeerLost, UsageError
from pipefit.lowering import lower
from pipefit.runtime.comm.transport import InProcess, Network, connect
from pipefit.runtime.launch.forks import forks
from pipefit.schema.actions import Message, message_of, parse_action
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.program import Channel
from pipefit.schema.training import Training
from support.network_workers import talk, what_is_sent
from support.pipelines import equal_profile, make_plan

SEND, RECEIVE = parse_action("0SEND_F3"), parse_action("1RECV_F3")
MESSAGE = Message(forward=True, receiver=1, microbatch=3, part=None, source=0, target=1)
INSIDE = MESSAGE._replace(target=0)


def message(text: str) -> Message:
    """Return the message of an action, with stage n on device n."""
    action = parse_action(text)
    return message_of(action.stage, action, ((0,), (1,), (2,)))


@pytest.mark.parametrize("sender_first", [True, False])
def test_a_message_arrives_when_both_ends_have_started(sender_first: bool) -> None:
    """A message arrives when both ends have started, in any order; then both ends may join."""
    transport, sent, buffer = InProcess(), torch.arange(4.0), torch.zeros(4)
    ends = [(SEND, [sent], MESSAGE), (RECEIVE, [buffer], MESSAGE)]
    first = transport.start(*ends[not sender_first])
    assert not transport.ready(first)
    second = transport.start(*ends[sender_first])
    assert transport.ready(first)
    assert transport.ready(second)
    assert torch.equal(buffer, sent)


def test_a_delivered_message_is_a_copy() -> None:
    """A delivered message is a copy: both ends share no memory, and the transport keeps no tensor."""
    transport, sent, buffer = InProcess(), torch.zeros(4), torch.ones(4)
    handle = transport.start(SEND, [sent], MESSAGE)
    transport.start(RECEIVE, [buffer], MESSAGE)
    sent += 5
    assert torch.equal(buffer, torch.zeros(4))
    assert (handle.sent, handle.buffers, transport.messages) == (None, None, {})


def test_messages_do_not_mix() -> None:
    """Every microbatch, direction and stage has its own message, with several tensors or none."""
    transport = InProcess()
    buffers = {}
    for text in ("1RECV_F0", "1RECV_F1", "0RECV_B0", "2RECV_F0"):
        buffers[text] = [torch.zeros(2), torch.zeros(1, dtype=torch.int64)]
        transport.start(parse_action(text), buffers[text], message(text))
    for number, text in enumerate(("0SEND_F0", "0SEND_F1", "1SEND_B0", "1SEND_F0")):
        sent = [torch.full((2,), float(number)), torch.tensor([number])]
        transport.start(parse_action(text), sent, message(text))
    assert [(pair[0][0].item(), pair[1].item()) for pair in buffers.values()] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    handle = transport.start(parse_action("0SEND_F9"), [], message("0SEND_F9"))
    transport.start(parse_action("1RECV_F9"), [], message("1RECV_F9"))
    assert transport.ready(handle)


def test_an_abandoned_message_is_never_delivered() -> None:
    """Messages of a failed step are dropped: the next step's messages get their own content."""
    transport = InProcess()
    transport.start(SEND, [torch.zeros(4)], MESSAGE)
    transport.abandon()
    buffer = torch.zeros(4)
    handle = transport.start(RECEIVE, [buffer], MESSAGE)
    assert not transport.ready(handle)
    transport.start(SEND, [torch.ones(4)], MESSAGE)
    assert torch.equal(buffer, torch.ones(4))


class Broken:
    """A transfer whose peer is gone."""

    def wait(self, *timeout: timedelta) -> None:
        patience = f"{timeout[0].total_seconds():g} s" if timeout else "no time of ours"
        raise RuntimeError(f"Connection closed by peer after {patience}\nlong trace")


class Late:
    """A transfer that fails with a given error."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def wait(self, *timeout: timedelta) -> None:
        raise RuntimeError(self.reason)


def network(timeout: timedelta | None = timedelta(seconds=2)) -> Network:
    """Return a network of two devices with a short timeout."""
    here: Any = "a process group"
    placement, workers = ((0,), (1,), (0,)), {0: 0, 1: 1}
    return Network(
        timeout=timeout, device=0, placement=placement, workers=workers, channels={Channel(0, 1, 0, 1): here}
    )


def test_messages_inside_a_device_do_not_leave_it() -> None:
    """Two stages on one worker's device exchange messages in memory, without a communicator."""
    here = Network(timeout=None, device=0, placement=((0,), (0,)), workers={0: 0}, channels={})
    sent, buffer = torch.arange(4.0), torch.zeros(4)
    handles = [here.start(SEND, [sent], INSIDE), here.start(RECEIVE, [buffer], INSIDE)]
    for action, handle in zip((SEND, RECEIVE), handles, strict=True):
        here.join(action, handle)
    assert torch.equal(buffer, sent)


def test_a_transfer_that_fails_is_a_lost_peer() -> None:
    """A failed transfer is a lost peer: the error names the action and the reason in one line, and its sender
    counts as a victim.
    """
    said = r"0SEND_F3 failed: .* has ended or hangs \(Connection closed by peer after 2 s long trace\)"
    with pytest.raises(PeerLost, match=said):
        network().join(SEND, [Broken()])  # type: ignore[list-item]


def test_a_join_on_a_gpu_gives_no_timeout() -> None:
    """A join on a GPU passes no timeout, because NCCL would then block the process, not only the device."""
    with pytest.raises(PeerLost, match="after no time of ours"):
        network(timeout=None).join(SEND, [Broken()])  # type: ignore[list-item]


@pytest.mark.parametrize(("reason", "remedy"), [("Timed out waiting 2000ms", True), ("Broken pipe", False)])
def test_a_timeout_says_how_to_wait_longer(reason: str, remedy: bool) -> None:
    """A timeout's error says how to wait longer, because the peer may only be slow; a broken connection's
    does not.
    """
    with pytest.raises(PeerLost, match="has ended or hangs") as caught:
        network().join(SEND, [Late(reason)])  # type: ignore[list-item]
    assert ("raise timeout_seconds" in str(caught.value)) == remedy


def test_a_transfer_that_cannot_start_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that fails to start names the device that is gone."""

    def refuse(tensor: Tensor, rank: int, group: object) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(dist, "isend", refuse)
    with pytest.raises(PeerLost, match=r"0SEND_F3 failed: device 1 has ended \(Broken pipe\)"):
        network().start(SEND, [torch.zeros(1)], MESSAGE)


def test_one_queue_for_all_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL, CUDA_DEVICE_MAX_CONNECTIONS=1 is refused by name before any worker connects."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    plan = make_plan(equal_profile(2), [1, 1])
    with pytest.raises(
        UsageError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1 .* unset it, or set it to 8 or more"
    ):
        connect(plan, lower(plan), torch.device("cuda", 0), timedelta(seconds=1))


@pytest.mark.parametrize("by_way_of_the_host", [pytest.param(False, marks=pytest.mark.gallery), True])
def test_channels_cross_and_keep_their_order(by_way_of_the_host: bool, tmp_path: Path) -> None:
    """Three workers start 20 messages in every direction before they join one: each receive gets its own, in
    order.

    Devices are not numbered as the stages are, messages hold two tensors, and an all-reduce is under way
    meanwhile. In host memory, sent tensors may change at once, and nothing is received before its join.
    Joined messages hold no memory, though gloo's own threads release it a little later.
    """
    stages = tuple(Stage(start=n, stop=n + 1, grid=Grid.of(device)) for n, device in enumerate((2, 0, 1)))
    training = Training(batch_size=4, microbatches=4, clip_norm=1.0)
    plan = replace(make_plan(equal_profile(3), [1, 1, 1]), training=training, stages=stages)
    context = forks()
    pipes, processes = [], []
    for rank in range(3):
        ours, theirs = context.Pipe(duplex=False)
        asked = rank, plan, str(tmp_path / "store"), theirs, by_way_of_the_host
        processes.append(context.Process(target=talk, args=asked, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    told = [pipe.recv() if pipe.poll(60) else None for pipe in pipes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for rank, (total, received, kept) in enumerate(told):
        assert total == 0 + 1 + 2
        assert kept == 0
        senders = [("F", rank - 1)] * (rank > 0) + [("B", rank + 1)] * (rank < 2)
        assert received == {
            f"{rank}RECV_{way}{m}": ([what_is_sent(sender, way, m)], m)
            for way, sender in senders
            for m in range(20)
        }


def test_sums_inside_one_process_cross_gpus() -> None:
    """All-reduces inside one process cross GPUs, though torch adds only tensors of one device."""
    first, second = (mock.create_autospec(Tensor, device=torch.device("cuda", number)) for number in range(2))
    transport = InProcess()
    transport.collect(parse_action("0REDUCE"), [first], (0, 1), 0)
    transport.collect(parse_action("0REDUCE"), [second], (0, 1), 1)
    second.to.assert_called_once_with(first.device)
    first.add_.assert_called_once_with(second.to.return_value)
    second.copy_.assert_called_once_with(first)
