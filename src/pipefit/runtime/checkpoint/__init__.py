"""Checkpoints of a training: snapshots, saving in the background, restoring under any plan."""
