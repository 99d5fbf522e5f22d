"""Transports: the letter inside one process, and what a lost peer looks like between processes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.errors import PeerLost
from pipefit.program import parse_action
from pipefit.runtime.transport import Mailroom, Network

SEND, RECEIVE = parse_action("0SEND_F3"), parse_action("1RECV_F3")


@pytest.mark.parametrize("sender_first", [True, False])
def test_a_letter_arrives_when_both_ends_have_started(sender_first: bool) -> None:
    """Whoever starts first waits; with the other one the buffers hold what was sent, and both ends may join."""
    mail, sent, buffer = Mailroom(), torch.arange(4.0), torch.zeros(4)
    ends = [(SEND, [sent], 1), (RECEIVE, [buffer], 0)]
    first = mail.start(*ends[not sender_first])
    assert not mail.ready(first)
    second = mail.start(*ends[sender_first])
    assert mail.ready(first)
    assert mail.ready(second)
    assert torch.equal(buffer, sent)


def test_a_delivered_letter_is_a_copy() -> None:
    """Sender and receiver share no memory, and the mailroom holds neither's tensors after delivery."""
    mail, sent, buffer = Mailroom(), torch.zeros(4), torch.ones(4)
    handle = mail.start(SEND, [sent], 1)
    mail.start(RECEIVE, [buffer], 0)
    sent += 5
    assert torch.equal(buffer, torch.zeros(4))
    assert (handle.sent, handle.buffers, mail.letters) == (None, None, {})


def test_letters_do_not_mix() -> None:
    """Microbatches, directions and stages are letters of their own; a message may hold several tensors, or none."""
    mail = Mailroom()
    buffers = {}
    for number, text in enumerate(("1RECV_F0", "1RECV_F1", "0RECV_B0", "2RECV_F0")):
        buffers[text] = [torch.zeros(2), torch.zeros(1, dtype=torch.int64)]
        mail.start(parse_action(text), buffers[text], number)
    for number, text in enumerate(("0SEND_F0", "0SEND_F1", "1SEND_B0", "1SEND_F0")):
        mail.start(parse_action(text), [torch.full((2,), float(number)), torch.tensor([number])], number)
    assert [(pair[0][0].item(), pair[1].item()) for pair in buffers.values()] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    handle = mail.start(parse_action("0SEND_F9"), [], 1)
    mail.start(parse_action("1RECV_F9"), [], 0)
    assert mail.ready(handle)


def test_an_abandoned_letter_is_never_delivered() -> None:
    """After a failed step what was under way is forgotten: the next step's message gets its own content."""
    mail = Mailroom()
    mail.start(SEND, [torch.zeros(4)], 1)
    mail.abandon()
    buffer = torch.zeros(4)
    handle = mail.start(RECEIVE, [buffer], 0)
    assert not mail.ready(handle)
    mail.start(SEND, [torch.ones(4)], 1)
    assert torch.equal(buffer, torch.ones(4))


class Broken:
    """A transfer whose other end is gone."""

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError(f"Connection closed by peer after {timeout.total_seconds():g} s\nlong trace")


def network() -> Network:
    """A network of two devices with a short patience."""
    return Network(timedelta(seconds=2), {0: 0, 1: 1})


def test_a_transfer_that_fails_is_a_lost_peer() -> None:
    """The error names the action and the first line of the reason; the one who says so is a victim."""
    with pytest.raises(PeerLost, match=r"0SEND_F3 failed: .* gone or hangs \(Connection closed by peer after 2 s\)"):
        network().join(SEND, [Broken()])  # type: ignore[list-item]


def test_a_transfer_that_cannot_start_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that is refused at once names the device that is gone."""

    def refuse(tensor: Tensor, rank: int, tag: int) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(dist, "isend", refuse)
    with pytest.raises(PeerLost, match=r"0SEND_F3 failed: device 1 is gone \(Broken pipe\)"):
        network().start(SEND, [torch.zeros(1)], 1)


def test_no_two_messages_share_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a message, microbatches and directions between the same two workers have tags of their own."""
    tags: list[int] = []

    def note(tensor: Tensor, rank: int, tag: int) -> Broken:
        tags.append(tag)
        return Broken()

    monkeypatch.setattr(dist, "isend", note)
    for microbatch in range(20):
        for kind in ("SEND_F", "SEND_B"):
            network().start(parse_action(f"1{kind}{microbatch}"), [torch.zeros(1)] * 5, 0)
    assert len(set(tags)) == len(tags) == 200
