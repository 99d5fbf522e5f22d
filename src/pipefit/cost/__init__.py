"""What layers on a device cost: memory, time. Pure arithmetic over a profile, no torch."""
