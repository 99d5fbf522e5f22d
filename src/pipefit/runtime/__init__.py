"""Execution of programs: in dry runs over fake tensors, in one process, or in one worker per device."""

from pipefit.runtime.checks.comparison import certify_numbers
from pipefit.runtime.dry_run.certify import certify
from pipefit.runtime.launch.restarts import train
from pipefit.runtime.trainer import Trainer

__all__ = ["Trainer", "certify", "certify_numbers", "train"]
