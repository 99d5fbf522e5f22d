"""Simulation of a program with a virtual clock and a memory ledger: a predicted `Trace`, without torch.

simulate(plan)                    the whole trace: events by stream, memory by category
Simulation(plan).peak_bytes       only the peak of every device; the clock does not run
Simulation(plan).step_seconds     only the time
"""

from pipefit.memory.stage import Costs
from pipefit.simulator.simulation import Simulation, simulate

__all__ = ["Costs", "Simulation", "simulate"]
