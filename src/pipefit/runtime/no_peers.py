"""A device without the others: all transfers are complete from the start."""

from __future__ import annotations

from torch import Tensor

from pipefit.actions import RECEIVES, Action, Message
from pipefit.fake.target import is_fake
from pipefit.runtime.transport import Owners


class NoPeers:
    """A transport that stands for all other devices: what is received is zeros, and what is sent is dropped.

    Fake tensors have no numbers, and are left as they are.
    """

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> None:
        if action.kind in RECEIVES:
            for tensor in tensors:
                if not is_fake(tensor):
                    tensor.zero_()

    def collect(
        self, action: Action, tensors: list[Tensor], members: tuple[int, ...], device: int, owners: Owners = ()
    ) -> None:
        """There is nothing to add."""

    def ready(self, handle: None) -> bool:
        return True

    def join(self, action: Action, handle: None) -> None:
        """The transfer was complete from the start."""

    def abandon(self) -> None:
        """Nothing is under way."""
