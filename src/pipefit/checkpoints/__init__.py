"""Checkpoints: safetensors shards beside one JSON manifest, written whole or not at all. Nothing is ever unpickled.

Good for going on after a break, under the same plan or another one, and for plain PyTorch: tensors have the names of
the original module. A checkpoint costs its tensors' bytes on the disk; reading one costs a pass over each shard that is
needed, for its hash.
"""

from pipefit.checkpoints.folders import Candidates, Checkpoint, find, whole
from pipefit.checkpoints.hold import Owner
from pipefit.checkpoints.manifest import Manifest
from pipefit.checkpoints.plain import export, load_state_dict, load_weights

__all__ = [
    "Candidates", "Checkpoint", "Manifest", "Owner", "export", "find", "load_state_dict", "load_weights", "whole",
]  # fmt: skip
