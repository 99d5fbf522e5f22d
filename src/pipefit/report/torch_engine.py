"""Memory of a plan on `torch.distributed.pipelining`, beyond that of pipefit's own runtime."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.memory import most_receive_buffers, receive_buffers
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Trace
from pipefit.simulator import Simulation
from pipefit.tables import Block, Table
from pipefit.units import format_bytes


def describe_engine(plan: Plan, trace: Trace) -> Iterator[Block]:
    """Yield a table with a row for each device, and the sentence about receive buffers.

    `trace` is that of the plan's simulation on torch's engine. The other tensors are the batch, outputs until
    their backward, sent tensors until the engine drops them, and losses, as far as they raise the peak.
    """
    own, buffers = Simulation(plan).peak_bytes, receive_buffers(plan)
    rows = []
    for device in plan.workers:
        peak = trace.devices[device].peak_bytes
        more = peak - own[device]
        others = max(0, more - buffers[device])
        rows.append((str(device), *map(format_bytes, (own[device], peak, buffers[device], others))))
    yield "on torch's engine"
    yield Table(
        ("device", "pipefit's peak", "peak here", "receive buffers", "others at the peak"), tuple(rows)
    )
    if sentence := most_receive_buffers(plan):
        yield sentence
