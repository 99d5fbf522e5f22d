"""Transfers: messages of a device under way, and tensors that must not be sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipefit.errors import UsageError
from pipefit.runtime.comm.transfers import MessagePart, Transfers
from pipefit.runtime.comm.transport import InProcess
from pipefit.schema.actions import Message, parse_action
from pipefit.schema.layer_costs import Value

SEND, RECEIVE = parse_action("0SEND_F3"), parse_action("1RECV_F3")
MESSAGE = Message(forward=True, receiver=1, microbatch=3, part=None, source=0, target=1)
PLANNED = [
    Value(shape=(2, 3), dtype="float32", nbytes=24, requires_grad=True),
    Value(shape=(), dtype="int64", nbytes=8, requires_grad=False),
]
WRONG: list[tuple[Callable[[Tensor, Tensor], list[Tensor]], str]] = [
    (
        lambda big, small: [big[:1], small],
        "0SEND_F3 would send 1x3 of float32, one number of int64, but by the plan device 1 ",
    ),
    (
        lambda big, small: [big.double(), small],
        "2x3 of float64, .* allocates 2x3 of float32, one number of int64",
    ),
    (lambda big, small: [small, big], "one number of int64, 2x3 of float32, but"),
    (lambda big, small: [big], "0SEND_F3 would send 2x3 of float32, but"),
    (lambda big, small: [], "0SEND_F3 would send nothing, but .* Profile and plan it again"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG)
def test_what_is_sent_is_what_the_receiver_allocates(
    change: Callable[[Tensor, Tensor], list[Tensor]], sentence: str
) -> None:
    """Tensors with other shapes, dtypes or number than planned are never sent; the error names the action and
    both sides.
    """
    transport = InProcess()
    transfers = Transfers(transport)
    transfers.hand_over(SEND, change(torch.zeros(2, 3), torch.tensor(1)))
    with pytest.raises(UsageError, match=sentence):
        transfers.send(SEND, MESSAGE, PLANNED)
    assert transport.messages == {}


def test_what_is_planned_arrives() -> None:
    """Tensors as planned are sent, and the join returns them."""
    transport = InProcess()
    sender, receiver = Transfers(transport), Transfers(transport)
    sent, buffers = [torch.ones(2, 3), torch.tensor(7)], [torch.empty(2, 3), torch.tensor(0)]
    sender.hand_over(SEND, sent)
    sender.send(SEND, MESSAGE, PLANNED)
    assert not sender.ready(SEND.join)
    receiver.receive(RECEIVE, MESSAGE, lambda: buffers)
    assert sender.join(SEND.join) is sent
    arrived = receiver.join(RECEIVE.join)
    assert arrived is buffers
    assert [tensor.tolist() for tensor in arrived] == [[[1.0] * 3] * 2, 7]


def test_rows_are_held_until_the_last_of_them_has_gone() -> None:
    """Rows are held until the last of them is sent: three replicas' rows go to two, and each tensor joins
    with its last part.

    A table without samples is sent once to each receiver.
    """
    transport = InProcess()
    sender, receivers = Transfers(transport), [Transfers(transport), Transfers(transport)]
    rows, table = torch.arange(12.0).reshape(6, 2), torch.tensor([7.0])
    whole = [rows[2:4].clone(), table]  # of the second of three
    buffers = [[torch.zeros(3, 2), torch.zeros(1)] for _ in receivers]
    values = [
        Value(shape=(2, 2), dtype="float32", nbytes=16, requires_grad=True),
        Value(shape=(1,), dtype="float32", nbytes=4, requires_grad=False),
    ]
    ends = [  # the rows of the message among the sender's, and among the receiver's; whether the table comes along
        (parse_action("0SEND_F3{2:3}@device3"), parse_action("1RECV_F3{2:3}@device1"), (0, 1), (2, 3), False),
        (parse_action("0SEND_F3{3:4}@device4"), parse_action("1RECV_F3{3:4}@device1"), (1, 2), (0, 1), True),
    ]
    sender.hand_over(SEND, whole)
    for number, (send, receive, there, here, along) in enumerate(ends):
        message = MESSAGE._replace(part=send.part, source=1, target=3 + number)
        carried: tuple[tuple[int, int | None], ...] = ((0, 0), (1, None)) if along else ((0, 0),)
        sender.send(send, message, values, MessagePart(carried, there, 2))
        receivers[number].receive(
            receive, message, lambda own=buffers[number]: own, MessagePart(carried, here, 3)
        )
    assert buffers[0][0].tolist() == [[0, 0], [0, 0], [4, 5]]
    assert buffers[1][0].tolist() == [[6, 7], [0, 0], [0, 0]]
    assert [own[1].item() for own in buffers] == [0, 7]
    assert sender.join(ends[0][0].join) is None
    assert len(sender.tensors) == 2
    assert sender.join(ends[1][0].join) is whole
    assert sender.tensors == []
    assert receivers[0].join(ends[0][1].join) is None  # two of its three rows have not come
