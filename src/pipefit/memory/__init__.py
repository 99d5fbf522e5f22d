"""Bytes and seconds of a stage's layers on a device, computed from a profile without torch."""
