"""The version of pipefit."""

__version__ = "0.1.0"
