"""Which layers cost the same, so that one of them need be measured.

Two modules cost the same if they have the same class, the same settings, parameters and buffers of the same shapes and
dtypes, and submodules for which this holds too. A module with hooks, or with a setting that cannot be compared, is like
no other.
"""

from __future__ import annotations

from torch import nn

from pipefit.capture.settings import module_settings


def cost_key(module: nn.Module) -> object:
    """A key that is equal for modules that cost the same on the same inputs.

    Keys may be compared within this process, as long as their modules exist.
    """
    return module_settings(module, id)
