"""Worker processes: their start, their supervision, and restarts from checkpoints."""
