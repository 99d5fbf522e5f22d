"""Closed forms of a stage's peak, for planners alone: the same bytes as the ledger's, without a program.

They know stages that run their layers in one piece, kept or recomputed as a whole. A planner of finer decisions asks
the ledger.
"""
