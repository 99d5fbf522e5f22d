"""Simulation of a program with a virtual clock and a memory ledger: a predicted `Trace`, without torch.

simulate(plan)                    the whole trace: events by stream, memory by category
Simulation(plan).peak_bytes       only the peak of every device; the clock does not run
Simulation(plan).step_seconds     only the time
"""

from pipefit.memory import Costs
from pipefit.simulator.assembled import Assembled, DevicePart, Parts
from pipefit.simulator.ledger import Ledger, at_rest, highest
from pipefit.simulator.simulation import (
    Contents,
    LayerContents,
    Simulation,
    all_contents,
    contents_at,
    simulate,
)
from pipefit.simulator.timed_program import Collected, DeviceReader, exchange_of

__all__ = [
    "Assembled",
    "Collected",
    "Contents",
    "Costs",
    "DevicePart",
    "DeviceReader",
    "LayerContents",
    "Ledger",
    "Parts",
    "Simulation",
    "all_contents",
    "at_rest",
    "contents_at",
    "exchange_of",
    "highest",
    "simulate",
]
