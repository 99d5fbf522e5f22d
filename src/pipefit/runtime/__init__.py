"""Execution of programs: in dry runs over fake tensors, in one process, or in one worker per device."""

from pipefit.runtime.checks.comparison import (
    SMALLEST,
    certify_numbers,
    host_bytes,
    host_seconds,
    left_out,
    rounding,
)
from pipefit.runtime.checks.plan_check import check_casts, check_model
from pipefit.runtime.dry_run.certify import certify
from pipefit.runtime.engine.assembly import assemble
from pipefit.runtime.engine.batches import cut_batch
from pipefit.runtime.engine.flight import GraphEnds, backward, born_apart, enter, leave
from pipefit.runtime.engine.in_turn import NoPeers, run_in_turn
from pipefit.runtime.engine.replicas import Source, StageSources
from pipefit.runtime.engine.site import Site
from pipefit.runtime.hardware import Hardware, check_backwards, free_bytes
from pipefit.runtime.launch.restarts import train
from pipefit.runtime.offload.copying import Copier, NoCopier, Slot, SlotPart, UnpacedCopies
from pipefit.runtime.offload.cuda import OnStreams
from pipefit.runtime.optim.half_precision import (
    Copied,
    Group,
    MasterWeights,
    WeightCopy,
    cast_by,
    copied_weights,
    copies_of,
    make_optimizer,
    using,
)
from pipefit.runtime.optim.updates import Undivided, check_elementwise, check_state_apart, step_part
from pipefit.runtime.trainer import Trainer

__all__ = [
    "SMALLEST",
    "Copied",
    "Copier",
    "GraphEnds",
    "Group",
    "Hardware",
    "MasterWeights",
    "NoCopier",
    "NoPeers",
    "OnStreams",
    "Site",
    "Slot",
    "SlotPart",
    "Source",
    "StageSources",
    "Trainer",
    "Undivided",
    "UnpacedCopies",
    "WeightCopy",
    "assemble",
    "backward",
    "born_apart",
    "cast_by",
    "certify",
    "certify_numbers",
    "check_backwards",
    "check_casts",
    "check_elementwise",
    "check_model",
    "check_state_apart",
    "copied_weights",
    "copies_of",
    "cut_batch",
    "enter",
    "free_bytes",
    "host_bytes",
    "host_seconds",
    "leave",
    "left_out",
    "make_optimizer",
    "rounding",
    "run_in_turn",
    "step_part",
    "train",
    "using",
]
