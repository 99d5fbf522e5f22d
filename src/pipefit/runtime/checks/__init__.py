"""Checks before training: plan and task belong together, and numbers equal those of plain training."""
