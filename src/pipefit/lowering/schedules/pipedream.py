"""PipeDream: 1F1B that never flushes; every microbatch is a separate minibatch with a separate update.

    F0 F1 F2 F3 | B0 STASH0 STEP0 WAIT_STASH0 F4 | B1 STASH1 STEP1 WAIT_STASH1 F5 | ...       stage 0 of 4

Stage s of P has P-s microbatches in flight and continues with the next after each update, so a full pipeline
has no bubble. In return, gradients are late, and a stage keeps the weights of every microbatch in flight: P-s
versions. Its update is w(t+1) = w(t) - lr * g(w(t-P+s+1)). (PipeDream, SOSP 2019.)

`two_buffered` is PipeDream-2BW: the gradients of all microbatches of a step are accumulated for one update,
and all of them use the weights from before the last update: w(t+1) = w(t) - lr * g(w(t-1)), on every stage.
Two versions are enough, because a step has at least one microbatch per stage. (PipeDream-2BW,
ICML 2021.)

In both, all stages compute the forwards of a step's microbatches in that step; microbatches in flight after
it go backward in later steps. A step without microbatches drains the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.errors import UsageError
from pipefit.schema.actions import Action, Kind


def pipedream(rank: int, ranks: int, microbatches: int, entered: int) -> Iterator[Action]:
    """Generate the compute actions of one rank in a step; an update for every microbatch."""
    lag = ranks - 1 - rank
    for m in range(microbatches):
        yield Action(Kind.FORWARD, rank, m)
        if entered + m >= lag:
            yield Action(Kind.BACKWARD, rank, m - lag)
            yield from _update(rank, m - lag, apart=lag > 0)
    for m in range(-min(lag, entered), 0) if not microbatches else ():
        yield Action(Kind.BACKWARD, rank, m)
        # The last forward's weights are the newest if no update has followed it yet
        yield from _update(rank, m, apart=m < -1 and m == -entered)


def two_buffered(rank: int, ranks: int, microbatches: int, entered: int) -> Iterator[Action]:
    """Generate the compute actions of one rank in a step; one update for all of its microbatches.

    Raises:
        UsageError: fewer microbatches than ranks: a third version would be needed.
    """
    if 0 < microbatches < ranks:
        raise UsageError(
            f"pipedream-2bw needs at least {ranks} microbatches in a step, one for each stage, not "
            f"{microbatches}, because it keeps only two weight versions: use more microbatches, or schedule "
            "pipedream"
        )
    lag = ranks - 1 - rank
    for m in range(microbatches):
        yield Action(Kind.FORWARD, rank, m)
        if entered and m == microbatches - 1:  # the next step's forwards use the weights of the last update
            yield Action(Kind.STASH, rank, -1).join
        if entered or m >= lag:
            yield Action(Kind.BACKWARD, rank, m - lag)
            if m - lag in (-1, microbatches - 1):
                yield Action(Kind.STASH, rank, m - lag)
                yield Action(Kind.STEP, rank, m - lag)
    if microbatches or not entered:
        return
    yield from (Action(Kind.BACKWARD, rank, m) for m in range(-lag, 0))
    yield Action(Kind.STEP, rank, -1) if lag else Action(Kind.STASH, rank, -1).join


def _update(rank: int, microbatch: int, *, apart: bool) -> Iterator[Action]:
    """Generate the update after one microbatch: of a copy of the weights, if others are needed `apart` from
    it.
    """
    stash = Action(Kind.STASH, rank, microbatch)
    yield from (stash,) if apart else ()
    yield Action(Kind.STEP, rank, microbatch)
    yield from (stash.join,) if apart else ()
