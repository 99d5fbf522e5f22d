"""What a runner knows of every action of its program before it executes it: text, stream, and whose bytes it leaves."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.actions import COMPUTE, COPIES, UPDATES, Action, Kind
from pipefit.trace import Category, Stream

Instructions = tuple[tuple[Action, str, Stream], ...]

OWN_JOINS = COPIES | UPDATES  # joins of what no other device takes part in
LEFT = {  # by kind, the category of what an action allocates and does not free; boundary buffers for all others
    Kind.FORWARD: Category.ACTIVATIONS,
    Kind.RECOMPUTE: Category.ACTIVATIONS,
    Kind.BACKWARD: Category.GRADIENTS,
    Kind.STEP: Category.OPTIMIZER,
    Kind.STASH: Category.PARAMETERS,
}


def instructions(actions: Sequence[Action]) -> Instructions:
    """Actions with their texts and streams."""
    return tuple((action, str(action), _stream(action)) for action in actions)


def _stream(action: Action) -> Stream:
    if action.kind in COPIES or (action.kind is Kind.STEP and action.place is not None):
        return Stream.COPY
    own = action.kind in COMPUTE or action.kind in (Kind.LOAD, Kind.STASH, Kind.RESHARD)
    return Stream.COMPUTE if own else Stream.COMMUNICATION
