"""What all devices of a run have in common: what their stages are built from, and what connects and observes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipefit.capture.task import Task
from pipefit.memory.model_state import Share, share_of
from pipefit.runtime.comm.transport import Transport
from pipefit.runtime.engine.replicas import Sources
from pipefit.runtime.offload.lending import Lending
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What all devices of a run have in common: what stages are built from, and what connects and observes them.

    `sources` has the chains of the stages, `lending` says who lends memory for what is moved away. `absent` are the
    trained parameters of layers that a dry run leaves out, and `shares` those of stages and devices that own other
    layers in it than by the plan.
    """

    task: Task
    sources: Sources
    plan: Plan
    program: Program
    transport: Transport
    clock: Callable[[], float]
    seed: int
    on_action: Callable[[int], None] | None = None
    lending: Lending = field(default_factory=Lending)
    absent: int = 0
    shares: Mapping[tuple[int, int], Share] = field(default_factory=dict)

    def share(self, stage: int, device: int) -> Share | None:
        """What a device owns of a stage; None where nothing is divided."""
        return self.shares.get((stage, device)) or share_of(self.plan, stage, device)
