"""Operations along one dimension or several, such as softmax, means and running sums: the others can be divided."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.sharding.operations import Operation, Strategy, Wishes, shape

ALONG = frozenset(
    {
        "softmax", "_softmax", "log_softmax", "_log_softmax", "mean", "sum", "amax", "amin", "var", "std", "logsumexp",
        "cumsum", "cumprod", "norm", "linalg_vector_norm", "all", "any", "prod", "argmax", "argmin", "flip",
    }
)  # fmt: skip


def along(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """The dimensions that it works along stay whole; they may be gone from the result."""
    x, dims = op.node.args[0], op.given.get("dims", op.given.get("dim"))
    if dims is None or dims == []:
        return
    ndim = len(shape(x))
    worked = {dim % ndim for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    kept = [d for d in range(ndim) if op.last + 1 == ndim or d not in worked]
    for s in wishes:
        if kept[s.dim] not in worked and not s.padded:
            yield op.way(s, (x, s.at(kept[s.dim])))
