"""The releases of torch that pipefit follows: tracing, fake tensors and the simulated allocator know their inside.

Another release may differ where nobody would notice, or fail somewhere in the middle: it is refused before anything
else of torch is looked at. `pyproject.toml` says the same to pip.
"""

from __future__ import annotations

import re

from pipefit.errors import UsageError

FIRST, LAST = (2, 11), (2, 13)


def check_release(version: str) -> None:
    """Check that this is a release of torch that pipefit follows.

    Raises:
        UsageError: it is older or newer; says which to install.
    """
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not FIRST <= found <= LAST:
        first, last = (".".join(map(str, release)) for release in (FIRST, LAST))
        raise UsageError(
            f"pipefit follows torch {first} to {last} to the byte, and this is torch {version}: install one of these, "
            f"such as pip install 'torch=={last}.*'"
        )
