"""Checkpoints: safetensors shards and one JSON manifest, written whole or not at all.

Nothing is ever unpickled. A checkpoint serves to resume a training, under the same plan or another one, and
to load its weights into plain PyTorch: tensors have the names of the original module. It costs its tensors'
bytes on the disk; reading costs one pass over each needed shard, for its hash.
"""

from pipefit.checkpoints.folders import Candidates, Checkpoint, check_writable, find, set_aside, survey, whole
from pipefit.checkpoints.hold import Hold, Owner, check_holder, keep, new_owner, restarted_since, utc
from pipefit.checkpoints.manifest import (
    DTYPES,
    GroupSettings,
    Kind,
    Manifest,
    ParameterNumbers,
    Part,
    Scalar,
    ScaleState,
    Setting,
    Shard,
    StoredTensor,
    TrainedStage,
    joined_settings,
    tensor_key,
)
from pipefit.checkpoints.plain import export, load_state_dict, load_weights
from pipefit.checkpoints.shards import write_shard

__all__ = [
    "DTYPES",
    "Candidates",
    "Checkpoint",
    "GroupSettings",
    "Hold",
    "Kind",
    "Manifest",
    "Owner",
    "ParameterNumbers",
    "Part",
    "Scalar",
    "ScaleState",
    "Setting",
    "Shard",
    "StoredTensor",
    "TrainedStage",
    "check_holder",
    "check_writable",
    "export",
    "find",
    "joined_settings",
    "keep",
    "load_state_dict",
    "load_weights",
    "new_owner",
    "restarted_since",
    "set_aside",
    "survey",
    "tensor_key",
    "utc",
    "whole",
    "write_shard",
]
