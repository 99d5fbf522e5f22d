"""Planners of other systems and of practice, to compare with."""
