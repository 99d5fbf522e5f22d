"""Executes the program of a device: passes, microbatches in flight, updates."""
