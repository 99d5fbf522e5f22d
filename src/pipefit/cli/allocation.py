"""The settings of CUDA's caching allocator, from the command line or the environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pipefit.cli.options import Target
from pipefit.errors import UsageError

if TYPE_CHECKING:
    from pipefit.allocator import AllocatorSettings


def allocator(written: str | None, target: Target) -> AllocatorSettings | None:
    """The settings of the caching allocator, which only the target `cuda` has: those written, or the environment's.

    Raises:
        UsageError: they are not simulated; or settings are written for a target without the allocator.
    """
    from pipefit.allocator import ENVIRONMENT, AllocatorSettings

    if target != "cuda":
        if written is not None:
            raise UsageError(f"--alloc-conf is for target cuda: target {target} has no caching allocator")
        return None
    set_by = next((name for name in ENVIRONMENT if name in os.environ), None)
    if written is not None or set_by is None:
        return AllocatorSettings.parse(written or "")
    try:
        return AllocatorSettings.parse(os.environ[set_by])
    except UsageError as error:
        raise UsageError(f"{set_by}: {error}; --alloc-conf gives other settings") from None
