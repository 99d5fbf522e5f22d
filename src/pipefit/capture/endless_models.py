"""A model that is never built to its end, as with a trillion layers by a slip of the pen, is refused while it is built.

Modules are counted as they become parts of others. Costs a tenth of a microsecond for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from pipefit.errors import UsageError

MOST_MODULES = 200_000  # of one model; a mixture of 384 experts in 61 layers has fewer


@contextmanager
def of_an_end(name: str) -> Iterator[None]:
    """Inside, this thread builds the model `name`.

    Raises:
        UsageError: it has more modules than any model that is trained.
    """
    count, thread = 0, get_ident()

    def counted(parent: nn.Module, child: str, module: nn.Module | None) -> None:
        nonlocal count
        if get_ident() != thread:
            return
        count += 1
        if count > MOST_MODULES:
            raise UsageError(
                f"{name} has more than {MOST_MODULES:,} modules and is not built any further: is one of its settings, "
                "such as the number of layers, larger than it was meant to be?"
            )

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()
