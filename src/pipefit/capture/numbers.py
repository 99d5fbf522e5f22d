"""What the comparison of a module with its chain found: which numbers are apart, by how much, and the likely cause.

Numbers may round apart where kernels or the order of a sum differ: by `ALLOWED`, a share of the largest value in their
tensor that depends on the precision. Never allowed are a parameter that has a gradient in one of the two alone, and
integers that differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
from torch import Tensor

from pipefit.errors import UsageError
from pipefit.texts import counted

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Smaller gradients (a share of the largest one), losses and buffers count as that large: they may be rounding alone
_SMALLEST = 1e-3
_TOLD = 3  # differences that are printed


@dataclass(frozen=True, slots=True)
class Run:
    """What a run computed: the loss of each microbatch; gradients, summed, and buffers at the end, by name."""

    losses: list[Tensor]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What is not the same; `apart` is a share of the largest value, None where one of the two has no value at all."""

    what: str
    apart: float | None
    text: str

    def __str__(self) -> str:
        return f"{self.what} {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a comparison of a module with its chain found.

    `losses` are the module's own, of each microbatch; `gradients` and `buffers` count what was compared, and `apart` is
    the most that two numbers were apart of those that agree, as a share of the largest value; `allowed` is the limit.
    `besides` says what else was compared: layers that ranks divide, with whole ones, and losses of microbatches.
    """

    name: str
    microbatch_size: int
    losses: tuple[float, ...]
    gradients: int
    buffers: int
    apart: float
    allowed: float
    differences: tuple[Difference, ...]
    besides: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.differences:
            return self._refusal
        losses = " and ".join(f"{loss:.6g}" for loss in self.losses)
        if not all(map(isfinite, self.losses)):
            return f"the numbers of {self.name} cannot be compared: its losses are {losses} before anything is trained"
        exact = "equal bit by bit" if not self.apart else f"at most {self.apart:.1e} of the largest value apart"
        return (
            f"{self.name} computes as a chain what it computes as a module: {counted(len(self.losses), 'microbatch')} "
            f"of {self.microbatch_size}, losses {losses}, {counted(self.gradients, 'gradient')} and "
            f"{counted(self.buffers, 'buffer')}, {exact} ({self.allowed:.0e} allowed){''.join(self.besides)}"
        )

    @property
    def agrees(self) -> bool:
        """Whether numbers could be compared, and nothing differs."""
        return not self.differences and all(map(isfinite, self.losses))

    def check(self) -> None:
        """Check that nothing differs.

        Raises:
            UsageError: something does; says what, by how much, what may be the cause and what to try.
        """
        if self.differences:
            raise UsageError(self._refusal)

    @property
    def _refusal(self) -> str:
        told, rest = self.differences[:_TOLD], len(self.differences) - _TOLD
        more = f", and {rest} more" if rest > 0 else ""
        return (
            f"{self.name} computes as a chain other numbers than as a module: {', '.join(map(str, told))}{more} "
            f"({self.allowed:.0e} of the largest value is allowed); {self._cause}; change that, or give pipefit the "
            "parts instead, pipefit.chain([...]) in the order they run"
        )

    @property
    def _cause(self) -> str:
        """What such differences come from, in words."""
        what = [difference.what for difference in self.differences]
        losses = [name for name in what if name.startswith("the loss")]
        if losses and losses[0] != _loss_name(0):
            return (
                "only the first microbatch has the same loss, so the forward keeps something from one call to the "
                "next, which the chain does not keep: a count, a tensor in an attribute, a parameter changed in place"
            )
        if losses:
            return (
                "the forward is another, as where it depends on more than its inputs, parameters and buffers: on "
                "Python's state, on whether it is traced, on the data of a tensor (x.data)"
            )
        if any(name.startswith("the gradient") for name in what):
            return "the forward is the same, so that a backward was lost on the way"
        return "losses and gradients are the same, so that the update of a buffer was lost on the way"


def compared(
    plain: Run,
    ours: Run,
    *,
    name: str,
    microbatch_size: int,
    untouched: Mapping[str, Tensor],
    precisions: Iterable[torch.dtype],
) -> Numbers:
    """What a chain computed, held to what the module of that name did.

    `untouched` are the buffers before the runs: those that no layer uses stay so. The coarsest of `precisions` decides
    what is allowed.
    """
    allowed = max((ALLOWED[dtype] for dtype in precisions if dtype in ALLOWED), default=ALLOWED[torch.float32])
    found = list(_differences(plain, replace(ours, buffers={**untouched, **ours.buffers})))
    return Numbers(
        name=name,
        microbatch_size=microbatch_size,
        losses=tuple(loss.item() for loss in plain.losses),
        gradients=sum(gradient is not None for gradient in plain.gradients.values()),
        buffers=len(plain.buffers),
        apart=max((d.apart for d in found if d.apart is not None and d.apart <= allowed), default=0.0),
        allowed=allowed,
        differences=tuple(d for d in found if d.apart is None or not d.apart <= allowed),
    )


def _differences(plain: Run, ours: Run) -> Iterator[Difference]:
    """Everything that is not equal bit by bit."""
    for number, (loss, own) in enumerate(zip(plain.losses, ours.losses, strict=True)):
        if not same(loss, own):
            text = f"is {own.item():.6g} instead of {loss.item():.6g}"
            yield Difference(what=_loss_name(number), apart=_apart(loss, own, _SMALLEST), text=text)
    most = max((largest(gradient) for gradient in plain.gradients.values() if gradient is not None), default=0.0)
    for name, gradient in plain.gradients.items():
        yield from difference(f"the gradient of {name}", gradient, ours.gradients.get(name), _SMALLEST * most)
    for name, buffer in plain.buffers.items():
        yield from difference(f"the buffer {name}", buffer, ours.buffers.get(name), _SMALLEST)


def difference(what: str, plain: Tensor | None, ours: Tensor | None, floor: float) -> Iterator[Difference]:
    """How `ours` differs, if it does, as a part of the largest value, or of `floor` if that is larger."""
    if plain is None or ours is None:
        if plain is not ours:
            yield Difference(what=what, apart=None, text="is missing" if ours is None else "should not be there")
    elif plain.shape != ours.shape or plain.dtype != ours.dtype:
        text = f"is {ours.dtype} {tuple(ours.shape)} instead of {plain.dtype} {tuple(plain.shape)}"
        yield Difference(what=what, apart=None, text=text)
    elif not same(plain, ours):
        apart = _apart(plain, ours, floor)
        yield Difference(what=what, apart=apart, text=f"is {apart:.1e} of its largest value apart")


def same(plain: Tensor, ours: Tensor) -> bool:
    """Whether two tensors are equal; NaN is equal to NaN."""
    if torch.equal(plain, ours):
        return True
    if not plain.is_floating_point() or not plain.isnan().any():
        return False
    return torch.allclose(plain, ours, rtol=0.0, atol=0.0, equal_nan=True)


def _apart(plain: Tensor, ours: Tensor, floor: float) -> float:
    """The largest difference as a share of the largest value, or of `floor`; infinite for integers that differ."""
    if not (plain.is_floating_point() or plain.is_complex()):
        return float("inf")
    far = _norm(plain.to(_wide(plain)) - ours.to(_wide(plain)))
    if isfinite(far):
        return far / max(largest(plain), floor)
    unlike = (plain != ours) & ~(plain.isnan() & ours.isnan())
    far = (plain[unlike].to(_wide(plain)) - ours[unlike].to(_wide(plain))).abs().nan_to_num(float("inf")).max().item()
    return far / max(largest(plain), floor)


def largest(tensor: Tensor) -> float:
    """The largest finite absolute value."""
    if not tensor.numel():
        return 0.0
    if tensor.is_floating_point() and isfinite(found := _norm(tensor)):
        return found
    return tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item()


def _norm(tensor: Tensor) -> float:
    """The largest absolute value, in one pass."""
    return float(torch.linalg.vector_norm(tensor.detach(), ord=inf))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _loss_name(number: int) -> str:
    return f"the loss of microbatch {number + 1}"
