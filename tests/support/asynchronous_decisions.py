"""A plan for asynchronous schedules with decisions of all kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.plan import Plan
from support.random_offloads import make_chain
from support.small_tasks import plan_of


def mixed(schedule: str, microbatches: int = 4) -> Plan:
    """Build three stages and a lender: tensors, optimizer state and gradients move to peers and the host,
    runs are recomputed early, the host updates layers, and weights of all versions move too.
    """
    plan = plan_of(make_chain(), [2, 2, 2], microbatches=microbatches, schedule=schedule, devices=4)
    decisions = [
        Decision(stage=0, subject=Run(start=0, stop=1), what=What.RECOMPUTE, ahead=2),
        moved(0, SavedTensors(tensors=((1, 0),)), "device3*2+host*1", behind=2),
        moved(1, SavedTensors(tensors=((3, 0),)), "device2", ahead=1, microbatches=Microbatches(1, 2)),
        moved(0, State(start=0, stop=1, kind="optimizer"), "device3*1+host*1", ahead=1, behind=0),
        moved(0, State(start=0, stop=1, kind="gradients"), "host", behind=0),
        updated_on_the_host(1, 2, 3),
        updated_on_the_host(2, 4, 6),
        moved(0, State(start=0, stop=2, kind="versions"), "host", ahead=1),
        moved(1, State(start=2, stop=3, kind="versions"), "device0"),
        moved(0, State(start=0, stop=1, kind="parameters"), "host", behind=0),
        moved(1, State(start=3, stop=4, kind="parameters"), "device0*1+host*2", ahead=1),
    ]
    return replace(plan, decisions=tuple(decisions))


def moved(stage: int, subject: SavedTensors | State, place: str, **when: Any) -> Decision:
    """Return whether something is offloaded."""
    return Decision(stage=stage, subject=subject, what=What.OFFLOAD, place=parse_place(place), **when)


def updated_on_the_host(stage: int, start: int, stop: int) -> Decision:
    """Return whether layers are updated on the host."""
    subject = State(start=start, stop=stop, kind="optimizer")
    return Decision(stage=stage, subject=subject, what=What.UPDATE, place=parse_place("host"))
