"""Execution of a device's program: passes, microbatches in flight, updates."""
