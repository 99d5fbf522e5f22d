"""From a module to a chain of layers, the unit of partitioning."""

from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.model import capture
from pipefit.capture.task import Task

__all__ = ["Chain", "ChainLayer", "Task", "capture"]
