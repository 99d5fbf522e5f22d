"""The task's own module, which stays whole where stages are not.

Stages may keep a part of each parameter (tensor shards), some of the parameters (replicas that divide them), or none
between passes (parameters that are moved away). If one process trains all of them, it trains a copy of the module.
After every step the module has the numbers of the copy. Before every step the copy takes up those that the module's
owner has changed meanwhile. So the module can be used as if it were trained in place. It costs the module's memory,
outside of that of the plan's devices, and two passes over its numbers for each step.
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
    """Whether a stage of the plan has no whole parameters between steps."""
    grids = (stage.grid for stage in plan.stages)
    divides = any(grid.tensor > 1 or (grid.data > 1 and grid.shard == "parameters") for grid in grids)
    moved = (one.subject for one in plan.decisions if one.what is What.OFFLOAD)
    return divides or any(isinstance(one, State) and one.kind == "parameters" for one in moved)


class WholeModule:
    """A module beside the copy of it that `stages` train, whose state `checkpoints` tell.

    Raises:
        UsageError: a layer has something in its state dict that is no tensor; names it.
    """

    def __init__(self, module: nn.Module, stages: Sequence[StageRunner], checkpoints: Checkpointing) -> None:
        self._module, self._stages, self._checkpoints = module, stages, checkpoints
        self._frozen = [(name, one) for name, one in module.named_parameters() if not one.requires_grad]
        self.is_behind = False  # since a step has begun
        checkpoints.told()

    def lead(self) -> None:
        """Let the copy take up what the module's owner has changed; where a step has failed, follow it first.

        Raises:
            UsageError: a parameter is trained that was frozen when the plan was made.
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
        """Give the module the numbers of the copy."""
        told, own = self._checkpoints.told(), self._own
        with torch.no_grad():
            for name, tensor in (*told.state.tensors.items(), *told.held.items()):
                if name in own:
                    own[name].copy_(tensor)
        self.is_behind = False

    @property
    def _own(self) -> dict[str, Tensor]:
        """The module's parameters and buffers by all their names."""
        buffers = self._module.named_buffers(remove_duplicate=False)
        return {**dict(buffers), **dict(self._module.named_parameters(remove_duplicate=False))}

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the copy, by their names in the module."""
        for stage in self._stages:
            for layer in stage.layers:
                for local, parameter in layer.module.named_parameters(remove_duplicate=False):
                    if local in layer.originals:
                        yield layer.originals[local], parameter


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other.to(one.device))
