"""The releases of torch that pipefit follows: tracing, fake tensors and the simulated allocator know their inside.

An older one lacks what is needed, and is refused before anything else of torch is looked at. A newer one is taken with
a warning: what it has moved fails by name, and kernels are measured in any release, but what CUDA chooses and reserves
may have changed unseen. pip is told the oldest alone (`pyproject.toml`): of a newest it would make a reason to
exchange a torch that people have for another, gigabytes large, without a word.
"""

from __future__ import annotations

import re
import warnings

from pipefit.errors import PipefitWarning, UsageError

FIRST, LAST = (2, 11), (2, 15)  # the tests have been run with each, the newest included


def check_release(version: str) -> None:
    """Check that this is a release of torch that pipefit follows; a `PipefitWarning` where it is newer than those.

    Raises:
        UsageError: it is older; says which to install.
    """
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    first, last = (".".join(map(str, release)) for release in (FIRST, LAST))
    if found < FIRST:
        raise UsageError(
            f"pipefit follows torch {first} to {last} to the byte, and this is torch {version}: install one of these, "
            f"such as pip install 'torch=={last}.*'"
        )
    if found > LAST:
        warnings.warn(
            f"this is torch {version}, and pipefit is tested with torch {first} to {last}: peaks for the target cuda "
            "may be off, and a model may be refused that could be planned; for what is tested, "
            f"pip install 'torch=={last}.*'",
            PipefitWarning,
            stacklevel=2,
        )
