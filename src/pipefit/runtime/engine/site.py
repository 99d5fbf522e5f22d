"""Objects that all devices of a run share: sources of their stages, transport, clock and observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipefit.capture import Task
from pipefit.memory import ReplicaShare, share_of
from pipefit.runtime.comm.transport import Transport
from pipefit.runtime.engine.replicas import StageSources
from pipefit.runtime.offload.lending import Lending
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Objects that all devices of a run share.

    `sources` has the chains of the stages, `lending` says which devices lend memory for offloaded tensors. In
    a dry run, `absent` is the number of trained parameters in layers that are left out, and `shares` has, by
    stage and device, shares that differ from the plan's.
    """

    task: Task
    sources: StageSources
    plan: Plan
    program: Program
    transport: Transport
    clock: Callable[[], float]
    seed: int
    on_action: Callable[[int], None] | None = None
    lending: Lending = field(default_factory=Lending)
    absent: int = 0
    shares: Mapping[tuple[int, int], ReplicaShare] = field(default_factory=dict)

    def share(self, stage: int, device: int) -> ReplicaShare | None:
        """Return a device's ZeRO share of a stage; None if nothing is sharded."""
        return self.shares.get((stage, device)) or share_of(self.plan, stage, device)
