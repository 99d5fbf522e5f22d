"""The pass that inserts receives, sends and loads around the compute actions.

A pass is the forward or the backward of one microbatch through a stage, with the recomputations just before
parts of the backward. For each of a rank's passes p[0], p[1], ..., in this order:

    start the receives for p[t+1]             so that they arrive while p[t] computes
    p[t], its inputs loaded from the host, and each receive joined before the action that needs it
    join the sends of p[t-1]'s results        which have had the time of p[t] to arrive
    start the sends of p[t]'s results

If p[t] is the backward of the forward p[t-1], the gradients that it needs can only come after the output of
p[t-1] has arrived. Then these sends are joined first.

The neighbor that sends the inputs of p[t] may need the results of p[t-1] for its next pass, as in 1F1B. Then
it cannot wait for p[t] before p[t-1] has ended, so messages between recomputations cost memory and save no
time: the receives for p[t] start one action before the action that needs them, and the sends of p[t-1] are
joined after the first action of p[t] and these receives.

A recomputation that comes earlier than just before its backward is not part of a pass: it needs no message
and stands between two of them, before the receives for p[t+1]. Otherwise receives would start after sends
that wait for them, and devices that hold several stages would wait for each other. Updates, and the copies
and reductions for them, are not part of a pass either: they follow p[t] and its sends.

In a step of an asynchronous schedule, p[-1] is the last pass of the previous step: its sends are joined here,
and those of this step's last one in the next step. Between stages with several replicas there is one message
for each pair of them that has common rows, all started and joined together.

Thus a device holds at most one started receive and one outstanding send in each direction, in addition to its
microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise, zip_longest
from typing import NamedTuple

from pipefit.lowering.local_batches import Slices
from pipefit.lowering.schedules import Compute, Order
from pipefit.schema.actions import COLLECTIVE, FORWARDS, UPDATES, Action, Kind
from pipefit.schema.plan import Plan

Pass = tuple[int, int | None, bool]  # stage, microbatch, and whether it is a forward
Following = Callable[[Pass], Pass | None]
_Computes = Callable[[int, int, int, int], Iterator[Compute]]  # a `Schedule`


def communicated(
    order: Order,
    plan: Plan,
    slices: Slices | None = None,
    *,
    before: Action | None = None,
    endless: bool = False,
    following: Following | None = None,
) -> Iterator[Action]:
    """Yield the actions of one device: its compute actions, and the receives, loads and sends around them.

    `slices` has the rows that it loads, receives and sends; default: those of the first replica. Under an
    asynchronous (`endless`) schedule the next step joins the last sends, and this step those of `before`, the
    last compute action of the previous step. `following` returns the next pass of a neighbor; default: it is
    unknown.
    """
    slices = slices or Slices(plan)
    passes = _passes(order)
    ids = [pass_of(one.actions[-1]) for one in passes]
    answers = [False, *(answers_next(one, two, following) for one, two in pairwise(ids))]
    receives = [[list(receives_of(action, plan, slices)) for action in one.actions] for one in passes]
    starts = _starts(receives, answers)
    yield from chain(*receives[0])
    sending = [] if before is None else list(sends_of(before, plan, slices))
    for number, (early, actions, behind) in enumerate(passes):
        joins = [send.join for send in sending]
        turns_back = number > 0 and is_backward_of(actions[-1], passes[number - 1].actions[-1])
        joined = 1 if answers[number] else len(actions)
        yield from early
        yield from joins if turns_back else ()
        for place, action in enumerate(actions):
            yield from starts.get((number, place), ())
            yield from (receive.join for receive in receives[number][place])
            yield from joins if place == joined else ()
            if _loads(action, plan):
                yield slices.load(action.stage, action.microbatch)
            yield action
        yield from joins if joined >= len(actions) and not turns_back else ()
        sending = list(sends_of(actions[-1], plan, slices))
        yield from sending
        yield from behind
    yield from () if endless else (send.join for send in sending)


def _starts(
    receives: Sequence[Sequence[Sequence[Action]]], answers: Sequence[bool]
) -> dict[tuple[int, int], list[Action]]:
    """Return the receives to start before an action, by the numbers of its pass and of it in the pass."""
    starts: dict[tuple[int, int], list[Action]] = {}
    for number in range(1, len(receives)):
        if not answers[number]:
            place = number - 1, 0
        elif receives[number][0]:
            place = number - 1, len(receives[number - 1]) - 1
        else:  # the pass begins with a recomputation
            place = number, 0
        starts[place] = [*starts.get(place, ()), *chain(*receives[number])]
    return starts


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


class _Pass(NamedTuple):
    """A pass with any updates and early recomputations inside it, and those just before and behind it."""

    early: list[Action]
    actions: list[Action]
    behind: list[Action]


def _passes(order: Order) -> list[_Pass]:
    """Return the passes of a rank."""
    passes: list[_Pass] = []
    early: list[Action] = []
    for action, following in zip_longest(order, order[1:]):
        if action.kind in UPDATES | COLLECTIVE or action.moves_state:
            passes[-1].behind.append(action)
        elif passes and pass_of(action) == pass_of(passes[-1].actions[-1]):
            passes[-1].actions.extend((*passes[-1].behind, *early, action))
            passes[-1].behind.clear()
            early = []
        elif action.kind is Kind.RECOMPUTE and (
            following is None or following != (Kind.BACKWARD, *action[1:])
        ):
            early.append(action)
        else:
            passes.append(_Pass(early, [action], []))
            early = []
    return passes


def pass_of(action: Action | Compute) -> Pass:
    """Return what identifies the pass of a compute action: stage, microbatch, and whether it is a forward."""
    return action.stage, action.microbatch, action.kind in FORWARDS


def answers_next(one: Pass, two: Pass, following: Following | None) -> bool:
    """Return whether the neighbor that sends the inputs of `two`, the pass after `one`, needs the results of
    `one` for its next pass.
    """
    return following is not None and following(_neighbor(two, -1)) == _neighbor(one, 1)


def _neighbor(one: Pass, ahead: int) -> Pass:
    """Return the pass that needs the results of `one`, or with -1 the pass whose results it needs."""
    stage, microbatch, forward = one
    return stage + (ahead if forward else -ahead), microbatch, forward


def following_of(schedule: _Computes, ranks: int, chunks: int, microbatches: int) -> Following:
    """Return the function that returns the next pass of the same rank under a schedule; None after the last.

    Only stages -1 to the last exist; stage -1 is before the first stage of a longer pipeline.
    """

    def following(one: Pass) -> Pass | None:
        if one[0] >= ranks * chunks:
            return None
        rank = one[0] if chunks == 1 else one[0] % ranks
        return _following(schedule, rank, ranks, chunks, microbatches).get(one)

    return following


@lru_cache(256)
def _following(
    schedule: _Computes, rank: int, ranks: int, chunks: int, microbatches: int
) -> dict[Pass, Pass]:
    """Return each pass's next one on the same rank."""
    return dict(pairwise(map(pass_of, schedule(rank, ranks, chunks, microbatches))))


def is_backward_of(action: Action, before: Action) -> bool:
    """Return whether `action` is of the backward of the forward `before`, for one stage and microbatch."""
    return (*pass_of(action)[:2], True) == pass_of(before) != pass_of(action)


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
