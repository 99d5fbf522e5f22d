"""Lets tests in every folder import the helpers that lie beside this file, and the benchmarks."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "benchmarks")]
