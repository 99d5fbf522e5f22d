"""Profiling by training runs: bytes of blocks from the peaks of stages, as mCAP finds them."""
