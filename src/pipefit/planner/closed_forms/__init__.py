"""Closed forms of a stage's peak, for planners: the same bytes that the simulator's ledger finds, without a program.

They hold for stages whose forward is one action, recomputed as a whole or not at all. For any other decision, ask the
simulator.
"""
