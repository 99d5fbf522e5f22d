"""What the layers of a stage cost on a device: bytes and seconds, computed from a profile without torch."""
