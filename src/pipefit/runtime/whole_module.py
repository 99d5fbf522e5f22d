"""The task's own module, kept whole when stages train a copy in parts.

Stages may keep a part of each parameter (tensor shards), some of the parameters (ZeRO-sharded replicas), or
none between passes (offloaded parameters). If one process trains all such stages, it trains a copy of the
module. After every step the module gets the numbers of the copy; before every step the copy gets numbers that
the user changed in the module meanwhile. So the module can be used as if it were trained in place. This costs
the module's memory, in addition to the memory of the plan's devices, and two passes over its numbers per
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pipefit.runtime.checkpoint.checkpointing import Checkpointing
from pipefit.runtime.checks.plan_check import check_frozen
from pipefit.runtime.engine.stage import StageRunner
from pipefit.runtime.state import StageState
from pipefit.schema.decisions import State, What
from pipefit.schema.plan import Plan


def takes_apart(plan: Plan) -> bool:
    """Return whether a stage of the plan lacks whole parameters between steps."""
    grids = (stage.grid for stage in plan.stages)
    divides = any(grid.tensor > 1 or (grid.data > 1 and grid.shard == "parameters") for grid in grids)
    moved = (one.subject for one in plan.decisions if one.what is What.OFFLOAD)
    return divides or any(isinstance(one, State) and one.kind == "parameters" for one in moved)


class WholeModule:
    """A module and the copy of it that `stages` train, whose state `checkpoints` read.

    Raises:
        UsageError: a layer's state dict holds an object that is not a tensor; names it.
    """

    def __init__(self, module: nn.Module, stages: Sequence[StageRunner], checkpoints: Checkpointing) -> None:
        self._module, self._stages, self._checkpoints = module, stages, checkpoints
        self._frozen = [(name, one) for name, one in module.named_parameters() if not one.requires_grad]
        self.is_behind = False  # since a step has begun
        checkpoints.told()

    def lead(self) -> None:
        """Copy the user's changes of the module into the trained copy.

        After a failed step, update the module first.

        Raises:
            UsageError: a parameter that was frozen when the plan was made is trained now.
        """
        check_frozen(self._frozen)
        if self.is_behind:
            self.follow()
        state, own = self._checkpoints.told().state, self._own
        changed = {name for name, tensor in state.tensors.items() if not _same(own[name], tensor)}
        if changed:
            values = {n: own[n].detach() if n in changed else tensor for n, tensor in state.tensors.items()}
            masters = {name: one for name, one in state.master_weights.items() if name not in changed}
            self._checkpoints.load_state(StageState(values, {}, masters))
        for name, parameter in self._trained():
            parameter.requires_grad_(own[name].requires_grad)

    def follow(self) -> None:
        """Copy the numbers of the trained copy into the module."""
        told, own = self._checkpoints.told(), self._own
        with torch.no_grad():
            for name, tensor in (*told.state.tensors.items(), *told.held.items()):
                if name in own:
                    own[name].copy_(tensor)
        self.is_behind = False

    @property
    def _own(self) -> dict[str, Tensor]:
        """Parameters and buffers of the module under all their names."""
        buffers = self._module.named_buffers(remove_duplicate=False)
        return {**dict(buffers), **dict(self._module.named_parameters(remove_duplicate=False))}

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the trained copy with their names in the module."""
        for stage in self._stages:
            for layer in stage.layers:
                for local, parameter in layer.module.named_parameters(remove_duplicate=False):
                    if local in layer.originals:
                        yield layer.originals[local], parameter


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other.to(one.device))
