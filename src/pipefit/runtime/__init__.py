"""Execution of programs: in dry runs over fake tensors, in one process, or in one worker per device."""

from pipefit.runtime.checkpoint.background_saver import SaveReport
from pipefit.runtime.checkpoint.checkpointing import Checkpointing
from pipefit.runtime.checks.comparison import (
    SMALLEST,
    Comparisons,
    certify_numbers,
    host_bytes,
    host_seconds,
    left_out,
    rounding,
)
from pipefit.runtime.checks.plan_check import check_casts, check_model
from pipefit.runtime.comm.agreement import Agreement, LossScale
from pipefit.runtime.comm.collectives import mark, may_be_absent, unmark
from pipefit.runtime.comm.transport import Transport, groups_in_order, joins_workers
from pipefit.runtime.dry_run.certify import certify, divided_without_peers, rank_without_peers
from pipefit.runtime.engine.assembly import agreement_of, assemble, put_on_device, usual_layers
from pipefit.runtime.engine.execution import cut_batch, run_in_turn
from pipefit.runtime.engine.forward_backward import layer_seeds, seed_update
from pipefit.runtime.engine.in_flight import (
    GraphEnds,
    apart,
    backward,
    born_apart,
    cut,
    enter,
    fed_back_copies,
    leave,
    move,
    naming_changes,
    working_copies,
)
from pipefit.runtime.engine.replicas import RankShards, Source, StageSources, Wanted, trained_sources
from pipefit.runtime.engine.stage import Site
from pipefit.runtime.engine.tensor_groups import Together, lost, naming_the_lost
from pipefit.runtime.hardware import Hardware, check_backwards, free_bytes, moment, named, ran_out
from pipefit.runtime.initial_weights import start_of
from pipefit.runtime.launch.restarts import train
from pipefit.runtime.launch.worker import IN_A_STEP
from pipefit.runtime.offload.copying import Copier, Slot, SlotPart, UnpacedCopies
from pipefit.runtime.offload.cuda import OnStreams
from pipefit.runtime.optim.half_precision import (
    Copied,
    Group,
    MasterWeights,
    WeightCopies,
    WeightCopy,
    cast_by,
    copied_weights,
    copies_of,
    make_optimizer,
    using,
)
from pipefit.runtime.optim.updates import Undivided, Updates, check_elementwise, check_state_apart, step_part
from pipefit.runtime.options import Callback, Supervision, TrainerArguments, TrainerOptions
from pipefit.runtime.state import Names
from pipefit.runtime.trainer import Trainer, report_of

__all__ = [
    "IN_A_STEP",
    "SMALLEST",
    "Agreement",
    "Callback",
    "Checkpointing",
    "Comparisons",
    "Copied",
    "Copier",
    "GraphEnds",
    "Group",
    "Hardware",
    "LossScale",
    "MasterWeights",
    "Names",
    "OnStreams",
    "RankShards",
    "SaveReport",
    "Site",
    "Slot",
    "SlotPart",
    "Source",
    "StageSources",
    "Supervision",
    "Together",
    "Trainer",
    "TrainerArguments",
    "TrainerOptions",
    "Transport",
    "Undivided",
    "UnpacedCopies",
    "Updates",
    "Wanted",
    "WeightCopies",
    "WeightCopy",
    "agreement_of",
    "apart",
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
    "cut",
    "cut_batch",
    "divided_without_peers",
    "enter",
    "fed_back_copies",
    "free_bytes",
    "groups_in_order",
    "host_bytes",
    "host_seconds",
    "joins_workers",
    "layer_seeds",
    "leave",
    "left_out",
    "lost",
    "make_optimizer",
    "mark",
    "may_be_absent",
    "moment",
    "move",
    "named",
    "naming_changes",
    "naming_the_lost",
    "put_on_device",
    "ran_out",
    "rank_without_peers",
    "report_of",
    "rounding",
    "run_in_turn",
    "seed_update",
    "start_of",
    "step_part",
    "train",
    "trained_sources",
    "unmark",
    "using",
    "usual_layers",
    "working_copies",
]
