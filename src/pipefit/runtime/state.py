"""What training changes in a stage, by the names that the original module has for it.

Parameters, buffers and the optimizer's state belong to names, not to stages: what one plan has trained, another plan,
with other stages on other devices, can take up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipefit.errors import UsageError
from pipefit.runtime.master_weights import copies_of
from pipefit.runtime.stage import StageRunner


@dataclass(frozen=True, slots=True)
class StageState:
    """Parameters and buffers by name, for every parameter the tensors that its optimizer keeps, by their names, and its
    float32 copy where the optimizer works on one.
    """

    tensors: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]
    master_weights: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(stages: Sequence[StageRunner]) -> StageState:
        """The state of these stages; the tensors are theirs, not copies."""
        tensors: dict[str, Tensor] = {}
        kept: dict[str, dict[str, Tensor]] = {}
        masters: dict[str, Tensor] = {}
        for stage in stages:
            known = stage.optimizer.state if stage.optimizer is not None else {}
            copies = copies_of(stage.optimizer)
            for layer in stage.layers:
                for local, tensor in layer.module.state_dict(keep_vars=True).items():
                    name, trained = layer.originals[local], copies.get(tensor, tensor)
                    tensors[name] = tensor.detach()
                    if tensor in copies:
                        masters[name] = trained.detach()
                    if trained in known:
                        kept[name] = {k: v for k, v in known[trained].items() if isinstance(v, Tensor)}
        return StageState(tensors, kept, masters)

    def load_into(self, stages: Sequence[StageRunner]) -> None:
        """Give these stages this state, whatever plan it was trained under. A parameter gets the value of its float32
        copy, rounded to its own precision.

        Raises:
            UsageError: a tensor of theirs is missing here, or has another shape.
        """
        values = {**self.tensors, **self.master_weights}
        for stage in stages:
            copies = copies_of(stage.optimizer)
            for layer in stage.layers:
                for local, tensor in layer.module.state_dict(keep_vars=True).items():
                    name, trained = layer.originals[local], copies.get(tensor, tensor)
                    _copy(values, name, tensor)
                    if tensor in copies:
                        _copy(values, name, trained)
                    kept = self.optimizer.get(name)
                    if kept is not None and stage.optimizer is not None:
                        stage.optimizer.state[trained] = {key: _like(value, trained) for key, value in kept.items()}


def _copy(tensors: Mapping[str, Tensor], name: str, into: Tensor) -> None:
    found = tensors.get(name)
    if found is None or found.shape != into.shape:
        have = "is missing" if found is None else f"has shape {tuple(found.shape)}"
        raise UsageError(f"the state does not fit the model: {name} {have}, and {tuple(into.shape)} is needed")
    with torch.no_grad():
        into.copy_(found)


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of what an optimizer keeps: on the parameter's device, but for counters, which stay on the host."""
    return value.clone() if value.ndim == 0 else value.to(parameter.device, copy=True)
