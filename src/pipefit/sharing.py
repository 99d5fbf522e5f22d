"""Tensors that several layers hold. On one device such a tensor exists once; across devices each has a copy.

Every layer counts them in its own cost, so whoever adds up the costs of several layers subtracts what is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from pipefit.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A tensor of `nbytes` that several layers hold.

    Raises:
        UsageError: fewer than two users, or users out of order.
    """

    __pydantic_config__ = {"extra": "forbid"}
    what: ClassVar[str] = "tensor"

    name: str
    users: tuple[int, ...]  # layers, rising
    nbytes: int

    def __post_init__(self) -> None:
        if len(self.users) < 2 or list(self.users) != sorted(set(self.users)):
            raise UsageError(
                f"shared {self.what} {self.name!r} needs two or more layers in rising order, not {list(self.users)}"
            )

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Every user with the next one: layers that hold n of these pairs count the tensor n times too often."""
        return tuple(pairwise(self.users))

    @property
    def sizes(self) -> tuple[int, ...]:
        """All of its numbers of bytes."""
        return (self.nbytes,)

    @property
    def parts(self) -> Iterator[tuple[int, str, int]]:
        """What it is in the costs of its users: the layer, the property of its cost, and the bytes in that."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter(SharedTensor):
    """One parameter that several layers use, such as a tied embedding.

    Across devices each has a copy, and gradients are summed before the update. Those of the users that are in
    `copying` compute with the half-precision copy that autocast makes of it, which takes `copy_bytes`; those of them in
    `cast_only` with nothing else of it.

    Raises:
        UsageError: fewer than two users, users out of order, or some in `cast_only` that are not in `copying`.
    """

    __pydantic_config__ = {"extra": "forbid"}
    what: ClassVar[str] = "parameter"

    gradient_bytes: int
    state_bytes: int
    early_state_bytes: int = 0  # the part of it that exists before the first step
    copying: tuple[int, ...] = ()  # layers, rising
    copy_bytes: int = 0
    cast_only: tuple[int, ...] = ()  # layers, rising
    form: str = ""  # how tensor-parallel ranks divide it; empty where each has all of it

    def __post_init__(self) -> None:
        SharedTensor.__post_init__(self)
        if not set(self.cast_only) <= set(self.copying):
            raise UsageError(
                f"layers {list(self.cast_only)} read shared parameter {self.name!r} through its half-precision copy "
                f"alone, which only layers {list(self.copying)} have"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """All of its numbers of bytes."""
        return self.nbytes, self.gradient_bytes, self.state_bytes, self.early_state_bytes, self.copy_bytes

    @property
    def parts(self) -> Iterator[tuple[int, str, int]]:
        """As in every shared tensor."""
        for user in self.users:
            yield user, "parameter_bytes", self.nbytes
            yield user, "gradient_bytes", self.gradient_bytes
            yield user, "state_bytes", self.state_bytes
            yield user, "early_state_bytes", self.early_state_bytes
        yield from ((user, "copy_bytes", self.copy_bytes) for user in self.copying)
        yield from ((user, "cast_only_bytes", self.nbytes) for user in self.cast_only)

    def copies_again(self, start: int, stop: int) -> tuple[int, ...]:
        """Of layers `start` to `stop - 1`, those that use a copy which an earlier one of them uses too."""
        return tuple(user for user in self.copying if start <= user < stop)[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer(SharedTensor):
    """One buffer, or tensor that is a plain attribute, that several layers hold, such as a mask or a rotary table.

    A recomputed run has one copy of a buffer, and none of a plain attribute, which is not `copied`. No forward changes
    it.

    Raises:
        UsageError: fewer than two users, or users out of order.
    """

    __pydantic_config__ = {"extra": "forbid"}
    what: ClassVar[str] = "buffer"

    copied: bool = True

    @property
    def parts(self) -> Iterator[tuple[int, str, int]]:
        """As in every shared tensor."""
        what = "buffer_bytes" if self.copied else "constant_bytes"
        return ((user, what, self.nbytes) for user in self.users)
