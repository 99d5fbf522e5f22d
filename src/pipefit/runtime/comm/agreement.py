"""Agreement of all stages before an update: the norm of all gradients, and whether any of them overflowed.

Every stage makes a vector with an element for each parameter of the model, in the order of their names, or
for each tensor shard of it. It writes the norms of its own gradients and zeros elsewhere, and an all-reduce
adds the vectors of all stages. The sum is exact, because each element has at most one nonzero addend; so the
result does not depend on the split. From it every stage computes the same clipping factor and the same
decision to skip the update. (Clipping as in `torch.nn.utils.clip_grad_norm_`; scaling as in
`torch.amp.GradScaler`.)

Gradients are unscaled and clipped in place. Those of parameters with master weights are in half precision and
would lose digits, so they stay unchanged: norms are computed in float32, and the update multiplies by
`gradient_factor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipefit.fake_cuda.target import is_fake
from pipefit.torch_internals import unscale_gradients
from pipefit.torch_internals.data_parallel import local_part

_EPSILON = 1e-6  # as in clip_grad_norm_


@dataclass(slots=True)
class LossScale:
    """The factor on the loss that keeps float16 gradients from underflowing.

    It is halved when gradients overflow, and doubled after `growth_interval` steps without overflow, which
    `quiet` counts.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    quiet: int = 0

    def update(self, overflow: bool) -> None:
        """Adapt the factor after a step."""
        if overflow:
            self.value, self.quiet = self.value / 2, 0
            return
        self.quiet += 1
        if self.quiet == self.growth_interval:
            self.value, self.quiet = self.value * 2, 0


class Agreement:
    """One stage's part of the agreement.

    Args:
        names: names of all trainable parameters of the model, each once.
        own: the parameters whose norms this stage reports, by name, each with its shard number; only the
            first stage of a shared parameter reports it.
        shards: the largest number of tensor shards of a stage of the model.
        parameters: all of this stage's trainable parameters.
        clip_norm: the largest norm of all gradients together; None for no clipping.
        scale: the loss scale, for float16; None for no scaling.
        master_weights: leave the gradients unchanged; the update multiplies them by `gradient_factor`.
        double: compute norms in double precision.
        absent: number of further parameters of the model, in layers that a dry run leaves out; their norms
            stay zero.
    """

    def __init__(
        self,
        names: Sequence[str],
        own: Mapping[str, tuple[nn.Parameter, int]],
        parameters: Sequence[nn.Parameter],
        *,
        clip_norm: float | None,
        scale: LossScale | None,
        master_weights: bool = False,
        double: bool = False,
        absent: int = 0,
        shards: int = 1,
    ) -> None:
        places = {name: place * shards for place, name in enumerate(sorted(names))}
        self._own = [(places[name] + shard, parameter) for name, (parameter, shard) in own.items()]
        self._dtype = torch.float64 if double else torch.float32
        self._size, self._parameters = (len(places) + absent) * shards + 1, parameters
        self.clip_norm, self.scale, self.master_weights = clip_norm, scale, master_weights
        self.overflow = False
        self.gradient_factor = 1.0
        self.norm = 0.0  # norm of all gradients before clipping; not on the device

    def contribution(self, device: torch.device) -> Tensor:
        """Return this stage's vector: norms of its gradients and, last, 1 if any of them overflowed, else
        0.
        """
        gradients = [local_part(p.grad) for p in self._parameters if p.grad is not None]
        vector = torch.zeros(self._size, dtype=self._dtype, device=device)
        unscaling = 1.0 if self.scale is None else 1.0 / self.scale.value
        if self.master_weights:
            self.gradient_factor, unscaling = unscaling, 1.0
        if self.scale is not None:
            overflow = torch.zeros_like(vector[-1:])
            factor = torch.full_like(overflow, unscaling)
            numbers = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
            if numbers:
                unscale_gradients(numbers, overflow, factor)
            vector[-1:].copy_(overflow)
        for place, parameter in self._own:
            if parameter.grad is not None:
                vector[place].copy_(self._norm_of(local_part(parameter.grad)))
        return vector

    def conclude(self, total: Tensor) -> None:
        """Clip the gradients, and decide whether this step is skipped.

        `total` is the sum of all stages' vectors. The host reads all values at once: on a GPU it waits there
        for the computations.
        """
        norm = torch.linalg.vector_norm(total[:-1])
        factor = torch.ones_like(norm) if self.clip_norm is None else self._factor(norm, self.clip_norm)
        tensor = torch.stack((total[-1], norm, factor))
        overflow, self.norm, on_host = (0.0, 0.0, 1.0) if is_fake(tensor) else tensor.tolist()
        self.overflow = self.scale is not None and overflow > 0
        if self.clip_norm is not None and not self.overflow:
            self._clip(factor, on_host)
        if self.scale is not None:
            self.scale.update(self.overflow)

    def _norm_of(self, gradient: Tensor) -> Tensor:
        """Return the norm of a gradient, without the loss scale."""
        wide = self.master_weights and gradient.is_floating_point()
        result: Tensor = torch.linalg.vector_norm(gradient.float() if wide else gradient)
        return result.mul_(self.gradient_factor)

    def _factor(self, norm: Tensor, clip_norm: float) -> Tensor:
        """Return the clipping factor for gradients of this norm."""
        return (clip_norm / (norm + _EPSILON)).clamp(max=1.0)

    def _clip(self, factor: Tensor, on_host: float) -> None:
        """Multiply the gradients by `factor`, or with master weights only `gradient_factor` by `on_host`."""
        if self.master_weights:
            self.gradient_factor *= on_host
            return
        for parameter in self._parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor.to(parameter.grad.dtype))
