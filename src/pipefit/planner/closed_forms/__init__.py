"""Closed forms of a stage's peak, for planners: the same bytes as the simulator's ledger, without a program.

They hold for stages whose forward is one action, recomputed as a whole or not at all. For stages recomputed
block by block they are bounds. Other decisions need the simulator.
"""
