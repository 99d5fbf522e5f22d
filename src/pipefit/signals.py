"""The signals with which a terminal, a scheduler or a user ends all processes of a group."""

from __future__ import annotations

import signal

_NAMES = "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"
ENDING = tuple(signal.Signals[name] for name in _NAMES if hasattr(signal, name))  # Windows has the first two
