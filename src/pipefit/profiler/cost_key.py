"""Which layers cost the same, so that measuring one of them is enough?

Those of one class, with the same settings, the same parameters and buffers by shape and dtype, and parts of which the
same is true. A module with hooks, or with a setting that cannot be compared, costs the same as no other.
"""

from __future__ import annotations

from torch import nn

from pipefit.capture.settings import module_settings


def cost_key(module: nn.Module) -> object:
    """A key that is equal for modules that cost the same on the same inputs; good in this process, for modules that
    live.
    """
    return module_settings(module, id)
