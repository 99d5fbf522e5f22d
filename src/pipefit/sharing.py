"""Tensors that several layers hold. On one device such a tensor exists once; across devices each has a copy.

Every layer counts them in its own cost, so whoever adds up the costs of several layers subtracts what is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter:
    """One parameter that several layers use, such as a tied embedding. Every one of them counts it in its own cost.

    On one device it exists once; across devices each has a copy, and gradients are summed before the update.

    Raises:
        UsageError: fewer than two users, or users out of order.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    users: tuple[int, ...]  # layers, rising
    nbytes: int
    gradient_bytes: int
    state_bytes: int
    early_state_bytes: int = 0  # the part of it that exists before the first step

    def __post_init__(self) -> None:
        _check_users("parameter", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer:
    """One buffer, or tensor that is a plain attribute, that several layers hold, such as a mask or a rotary table.

    Every one of them counts it in its own cost. On one device it exists once; a recomputed run has one copy of a
    buffer, and none of a plain attribute, which is not `copied`. No forward changes it.

    Raises:
        UsageError: fewer than two users, or users out of order.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    users: tuple[int, ...]  # layers, rising
    nbytes: int
    copied: bool = True

    def __post_init__(self) -> None:
        _check_users("buffer", self)


def _check_users(what: str, shared: SharedParameter | SharedBuffer) -> None:
    """Check that two or more layers share it, in rising order."""
    if len(shared.users) < 2 or list(shared.users) != sorted(set(shared.users)):
        raise UsageError(
            f"shared {what} {shared.name!r} needs two or more layers in rising order, not {list(shared.users)}"
        )
