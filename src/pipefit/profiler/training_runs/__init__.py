"""Profiling by training runs: bytes of blocks from peaks of stages, the method of mCAP."""
