"""Capture a module as a chain of layers, the unit of partitioning."""

import torch

from pipefit.capture.model import check_release

check_release(torch.__version__)  # before the imports that use torch's internals

from pipefit.capture.chain import Chain, ChainLayer  # noqa: E402
from pipefit.capture.model import capture  # noqa: E402
from pipefit.capture.task import Task  # noqa: E402

__all__ = ["Chain", "ChainLayer", "Task", "capture"]
