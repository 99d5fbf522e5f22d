"""What the trace of a forward ends in: the loss, if the module computes it, or all that the module returns.

Taken where the forward returns, so that a trace never meets what its caller does not need: beside its loss a module may
return anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.capture.pretrained import cache_class
from pipefit.capture.records import opened
from pipefit.capture.refusals import Refusal
from pipefit.errors import UsageError
from pipefit.texts import kind_of

_CACHE = "the cache of keys and values, which training does not fill"
_PLAIN = (Tensor, int, float, str, type(None))


def the_loss(outputs: Any, name: str) -> Tensor:
    """The loss of model `name`, which it returns alone, or as `loss` among its outputs.

    Raises:
        UsageError: it returns none.
    """
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else kind_of(outputs)
    raise UsageError(
        f"{name} has no loss of its own: its module returned {what}, no scalar and nothing with a scalar 'loss': "
        "give the labels among the inputs, or Task(..., loss=...), which is called with what the module returns"
    )


def everything(outputs: Any, name: str) -> Any:
    """All that model `name` returns, as a tree that torch knows, with a text in the place of a cache of transformers.

    Raises:
        UsageError: there is no tensor in it.
        Refusal: a part is neither tensor, number, text nor None, in tuples, lists, dictionaries or dataclasses.
    """
    kind = cache_class()
    tree = pytree.tree_map(
        lambda part: _CACHE if isinstance(part, kind) else opened(part),
        outputs,
        is_leaf=lambda part: isinstance(part, kind),
    )
    leaves = pytree.tree_flatten_with_path(tree)[0]
    for path, leaf in leaves:
        if not isinstance(leaf, _PLAIN):
            raise Refusal(
                f"it returns a {type(leaf).__name__}{f' as {pytree.keystr(path)}' if path else ''}, which is neither a "
                "tensor nor a structure of tensors",
                "return tensors, or tuples, dictionaries or dataclasses of them; use_cache=False for a cache",
            )
    if not any(isinstance(leaf, Tensor) for _, leaf in leaves):
        raise UsageError(
            f"{name} returns no tensor but {kind_of(outputs)}: there is nothing to take a loss of; return one"
        )
    return tree
