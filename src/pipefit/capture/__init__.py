"""From a module to a chain of layers, the unit of partitioning."""

import torch

from pipefit.capture.model import check_release

check_release(torch.__version__)  # before anything is imported that looks into torch

from pipefit.capture.chain import Chain, ChainLayer  # noqa: E402
from pipefit.capture.model import capture  # noqa: E402
from pipefit.capture.task import Task  # noqa: E402

__all__ = ["Chain", "ChainLayer", "Task", "capture"]
