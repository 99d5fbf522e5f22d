"""Checks before training: that plan and task belong together, and that numbers are those of plain training."""
