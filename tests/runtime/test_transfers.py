"""Transfers: what a device has under way, and what may not leave it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipefit.actions import parse_action
from pipefit.errors import UsageError
from pipefit.layer_costs import Value
from pipefit.runtime.transfers import Transfers
from pipefit.runtime.transport import InProcess

SEND, RECEIVE = parse_action("0SEND_F3"), parse_action("1RECV_F3")
PLANNED = [
    Value(shape=(2, 3), dtype="float32", nbytes=24, requires_grad=True),
    Value(shape=(), dtype="int64", nbytes=8, requires_grad=False),
]
WRONG: list[tuple[Callable[[Tensor, Tensor], list[Tensor]], str]] = [
    (
        lambda big, small: [big[:1], small],
        "0SEND_F3 would send 1x3 of float32, one number of int64, but by the plan device 1 ",
    ),
    (lambda big, small: [big.double(), small], "2x3 of float64, .* allocates 2x3 of float32, one number of int64"),
    (lambda big, small: [small, big], "one number of int64, 2x3 of float32, but"),
    (lambda big, small: [big], "0SEND_F3 would send 2x3 of float32, but"),
    (lambda big, small: [], "0SEND_F3 would send nothing, but .* profile and plan it again"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG)
def test_what_is_sent_is_what_the_receiver_allocates(
    change: Callable[[Tensor, Tensor], list[Tensor]], sentence: str
) -> None:
    """Tensors of other shapes, dtypes or number than the plan's never leave; the error names action and both sides."""
    transport = InProcess()
    transfers = Transfers(transport)
    transfers.hand_over(SEND, change(torch.zeros(2, 3), torch.tensor(1)))
    with pytest.raises(UsageError, match=sentence):
        transfers.send(SEND, 1, PLANNED)
    assert transport.messages == {}


def test_what_is_planned_arrives() -> None:
    """Tensors as planned are sent, and joining hands them on."""
    transport = InProcess()
    sender, receiver = Transfers(transport), Transfers(transport)
    sent, buffers = [torch.ones(2, 3), torch.tensor(7)], [torch.empty(2, 3), torch.tensor(0)]
    sender.hand_over(SEND, sent)
    sender.send(SEND, 1, PLANNED)
    assert not sender.ready(SEND.join)
    receiver.receive(RECEIVE, buffers, 0)
    assert sender.join(SEND.join) is sent
    assert [tensor.tolist() for tensor in receiver.join(RECEIVE.join)] == [[[1.0] * 3] * 2, 7]
