"""Lets tests in every folder import the helpers that lie beside this file, and the benchmarks.

Tests run in as many processes as there are cores, so each computes with one thread, as pipefit's workers do.
"""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "benchmarks")]
torch.set_num_threads(1)
