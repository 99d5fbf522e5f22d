"""Checkpoints: safetensors shards and one JSON manifest, written whole or not at all.

Nothing is ever unpickled. A checkpoint serves to resume a training, under the same plan or another one, and
to load its weights into plain PyTorch: tensors have the names of the original module. It costs its tensors'
bytes on the disk; reading costs one pass over each needed shard, for its hash.
"""

from pipefit.checkpoints.folders import Candidates, Checkpoint, find, whole
from pipefit.checkpoints.hold import Owner
from pipefit.checkpoints.manifest import Manifest
from pipefit.checkpoints.plain import export, load_state_dict, load_weights

__all__ = [
    "Candidates", "Checkpoint", "Manifest", "Owner", "export", "find", "load_state_dict", "load_weights", "whole",
]  # fmt: skip
