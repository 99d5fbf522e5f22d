"""Baselines: planners of other systems and of common practice."""
