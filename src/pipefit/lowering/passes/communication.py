"""The rewriting that makes communication explicit: it puts receives, sends and loads around the compute actions.

For each of a rank's compute actions c[0], c[1], ..., in this order:

    start the receive of what c[t+1] needs    so that it arrives while c[t] computes
    join the receive of what c[t] needs
    load the data that c[t] needs from the host
    c[t]
    join the sends of what c[t-1] made        they had the time of c[t] to arrive
    start the sends of what c[t] made

If c[t] is the backward of the forward c[t-1], the gradients that it needs can only come after the output of c[t-1] has
arrived. Then the receive and the send are joined first.

A recomputation that comes earlier than just before its backward is no c[t]: it needs no message and stands between two
of them, before the receive of what c[t+1] needs. Were it counted, receives would start after sends that wait for them,
and devices that hold several stages would wait for each other. Nor is an update, or what is copied or summed for it:
they follow c[t] and its sends.

In a step of an endless schedule, c[-1] is the last compute action of the step before: its sends are joined here, and
those of this step's last one in the next step.

Between stages with several replicas there is one message for each pair of them that have common rows, all started and
joined together.

So a device holds, beside its microbatches in flight, at most one started receive and one outstanding send in each
direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from pipefit.lowering.local_batches import Slices
from pipefit.lowering.schedules import Order
from pipefit.schema.actions import COLLECTIVE, FORWARDS, UPDATES, Action, Kind
from pipefit.schema.plan import Plan


def communicated(
    order: Order, plan: Plan, slices: Slices | None = None, *, before: Action | None = None, endless: bool = False
) -> Iterator[Action]:
    """The actions of one device: its compute actions, and the receives, loads and sends around them.

    `slices` says which rows it loads, receives and sends; those of the first replica unless given. Under an `endless`
    schedule the next step joins the last sends, and this one those of `before`, the last compute action of the step
    before.
    """
    slices = slices or Slices(plan)
    early, counted, behind = _around(order)
    receives = [list(_receives(action, plan, slices)) for action in counted]
    yield from receives[0]
    sending = [] if before is None else list(_sends(before, plan, slices))
    for number, action in enumerate(counted):
        ahead = receives[number + 1] if number + 1 < len(counted) else []
        needed = [receive.join for receive in receives[number]]
        joins = [send.join for send in sending]
        turns_back = number > 0 and is_backward_of(action, counted[number - 1])
        yield from early[number]
        yield from (*needed, *joins, *ahead) if turns_back else (*ahead, *needed)
        if _loads(action, plan):
            yield slices.load(action.stage, action.microbatch)
        sending = list(_sends(action, plan, slices))
        yield action
        yield from () if turns_back else joins
        yield from sending
        yield from behind[number]
    yield from () if endless else (send.join for send in sending)


def drained(order: Order, plan: Plan, slices: Slices, *, before: Action | None) -> Iterator[Action]:
    """The same of the drain of an endless schedule, with every message by itself.

    So a drain never holds more than the steps before it: in its place a microbatch more was in flight.
    """
    yield from () if before is None else (send.join for send in _sends(before, plan, slices))
    for action in order:
        receives, sends = list(_receives(action, plan, slices)), list(_sends(action, plan, slices))
        yield from (*receives, *(receive.join for receive in receives))
        yield action
        yield from (*sends, *(send.join for send in sends))


def _around(order: Order) -> tuple[list[list[Action]], list[Action], list[list[Action]]]:
    """The actions c[t]; for each the recomputations before it that come earlier than just before their backward; and
    for each the updates behind it.
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
    """Whether `action` is the backward of the forward `before`, for the same stage and microbatch."""
    return (
        action.kind is Kind.BACKWARD
        and before.kind is Kind.FORWARD
        and (action.stage, action.microbatch) == (before.stage, before.microbatch)
    )


def begins(action: Action, plan: Plan) -> bool:
    """Whether the action's layers begin its stage."""
    return action.layers is None or action.layers[0] == plan.stages[action.stage].start


def ends(action: Action, plan: Plan) -> bool:
    """Whether the action's layers end its stage."""
    return action.layers is None or action.layers[1] == plan.stages[action.stage].stop


def _loads(action: Action, plan: Plan) -> bool:
    return action.kind in FORWARDS and action.stage in (0, len(plan.stages) - 1) and begins(action, plan)


def _receives(action: Action, plan: Plan, slices: Slices) -> Iterator[Action]:
    kind, stage, microbatch = action[:3]
    if kind in FORWARDS and stage > 0 and begins(action, plan):
        yield from slices.messages(Kind.RECV_FORWARD, stage, microbatch)
    if kind is Kind.BACKWARD and stage < len(plan.stages) - 1 and ends(action, plan):
        yield from slices.messages(Kind.RECV_BACKWARD, stage, microbatch)


def _sends(action: Action, plan: Plan, slices: Slices) -> Iterator[Action]:
    kind, stage, microbatch = action[:3]
    if kind in FORWARDS and stage < len(plan.stages) - 1 and ends(action, plan):
        yield from slices.messages(Kind.SEND_FORWARD, stage, microbatch)
    if kind is Kind.BACKWARD and stage > 0 and begins(action, plan):
        yield from slices.messages(Kind.SEND_BACKWARD, stage, microbatch)
