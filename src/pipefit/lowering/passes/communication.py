"""The pass that inserts receives, sends and loads around the compute actions.

For each of a rank's compute actions c[0], c[1], ..., in this order:

    start the receive for c[t+1]              so that it arrives while c[t] computes
    join the receive for c[t]
    load the data for c[t] from the host
    c[t]
    join the sends of c[t-1]'s results        which have had the time of c[t] to arrive
    start the sends of c[t]'s results

If c[t] is the backward of the forward c[t-1], the gradients that it needs can only come after the output of
c[t-1] has arrived. Then the receive and the send are joined first.

A recomputation that comes earlier than just before its backward is not counted as a c[t]: it needs no message
and stands between two of them, before the receive for c[t+1]. Otherwise receives would start after sends that
wait for them, and devices that hold several stages would wait for each other. Updates, and the copies and
reductions for them, are not counted either: they follow c[t] and its sends.

In a step of an asynchronous schedule, c[-1] is the last compute action of the previous step: its sends are
joined here, and those of this step's last one in the next step. Between stages with several replicas there is
one message for each pair of them that has common rows, all started and joined together.

Thus a device holds at most one started receive and one outstanding send in each direction, in addition to its
microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from pipefit.lowering.local_batches import Slices
from pipefit.lowering.schedules import Order
from pipefit.schema.actions import COLLECTIVE, FORWARDS, UPDATES, Action, Kind
from pipefit.schema.plan import Plan


def communicated(
    order: Order,
    plan: Plan,
    slices: Slices | None = None,
    *,
    before: Action | None = None,
    endless: bool = False,
) -> Iterator[Action]:
    """Yield the actions of one device: its compute actions, and the receives, loads and sends around them.

    `slices` has the rows that it loads, receives and sends; default: those of the first replica. Under an
    asynchronous (`endless`) schedule the next step joins the last sends, and this step those of `before`, the
    last compute action of the previous step.
    """
    slices = slices or Slices(plan)
    early, counted, behind = _around(order)
    receives = [list(receives_of(action, plan, slices)) for action in counted]
    yield from receives[0]
    sending = [] if before is None else list(sends_of(before, plan, slices))
    for number, action in enumerate(counted):
        ahead = receives[number + 1] if number + 1 < len(counted) else []
        needed = [receive.join for receive in receives[number]]
        joins = [send.join for send in sending]
        turns_back = number > 0 and is_backward_of(action, counted[number - 1])
        yield from early[number]
        yield from (*needed, *joins, *ahead) if turns_back else (*ahead, *needed)
        if _loads(action, plan):
            yield slices.load(action.stage, action.microbatch)
        sending = list(sends_of(action, plan, slices))
        yield action
        yield from () if turns_back else joins
        yield from sending
        yield from behind[number]
    yield from () if endless else (send.join for send in sending)


def drained(order: Order, plan: Plan, slices: Slices, *, before: Action | None) -> Iterator[Action]:
    """Yield the same for the drain of an asynchronous schedule, with each message joined at once.

    Thus a drain never holds more than the steps before it, which had one more microbatch in flight.
    """
    yield from () if before is None else (send.join for send in sends_of(before, plan, slices))
    for action in order:
        receives, sends = list(receives_of(action, plan, slices)), list(sends_of(action, plan, slices))
        yield from (*receives, *(receive.join for receive in receives))
        yield action
        yield from (*sends, *(send.join for send in sends))


def _around(order: Order) -> tuple[list[list[Action]], list[Action], list[list[Action]]]:
    """Return the counted actions c[t], with the uncounted actions around each.

    For each c[t], these are the early recomputations before it, and the updates after it.
    """
    early: list[list[Action]] = [[]]
    counted: list[Action] = []
    behind: list[list[Action]] = []
    for action, following in zip_longest(order, order[1:]):
        if action.kind is Kind.RECOMPUTE and (following is None or following != (Kind.BACKWARD, *action[1:])):
            early[-1].append(action)
        elif action.kind in UPDATES | COLLECTIVE or action.moves_state:
            behind[-1].append(action)
        else:
            counted.append(action)
            early.append([])
            behind.append([])
    return early, counted, behind


def is_backward_of(action: Action, before: Action) -> bool:
    """Return whether `action` is the backward of the forward `before`, for the same stage and microbatch."""
    return (
        action.kind is Kind.BACKWARD
        and before.kind is Kind.FORWARD
        and (action.stage, action.microbatch) == (before.stage, before.microbatch)
    )


def begins(action: Action, plan: Plan) -> bool:
    """Return whether the action's layers begin its stage."""
    return action.layers is None or action.layers[0] == plan.stages[action.stage].start


def ends(action: Action, plan: Plan) -> bool:
    """Return whether the action's layers end its stage."""
    return action.layers is None or action.layers[1] == plan.stages[action.stage].stop


def _loads(action: Action, plan: Plan) -> bool:
    return action.kind in FORWARDS and action.stage in (0, len(plan.stages) - 1) and begins(action, plan)


def receives_of(action: Action, plan: Plan, slices: Slices) -> Iterator[Action]:
    """Yield the receives that a compute action needs."""
    kind, stage, microbatch = action[:3]
    if kind in FORWARDS and stage > 0 and begins(action, plan):
        yield from slices.messages(Kind.RECV_FORWARD, stage, microbatch)
    if kind is Kind.BACKWARD and stage < len(plan.stages) - 1 and ends(action, plan):
        yield from slices.messages(Kind.RECV_BACKWARD, stage, microbatch)


def sends_of(action: Action, plan: Plan, slices: Slices) -> Iterator[Action]:
    """Yield the sends of a compute action's results."""
    kind, stage, microbatch = action[:3]
    if kind in FORWARDS and stage < len(plan.stages) - 1 and ends(action, plan):
        yield from slices.messages(Kind.SEND_FORWARD, stage, microbatch)
    if kind is Kind.BACKWARD and stage > 0 and begins(action, plan):
        yield from slices.messages(Kind.SEND_BACKWARD, stage, microbatch)
