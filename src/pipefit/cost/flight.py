"""One microbatch in a stage: what every kind of action does to its residency, and which actions are refused.

`Flights.apply` takes a residency and an action and returns the next residency and the effect on the device's memory.
It depends on nothing else, so its answers are remembered, and most actions of a program cost one look-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipefit.actions import OF_ROWS, Action, Kind, Subject
from pipefit.cost.messages import Sent
from pipefit.cost.moving import offload, offloaded, reload, reloaded
from pipefit.cost.passes import Forward, buffer_copies, copy_inputs, run_backward, run_forward
from pipefit.cost.residency import Away, Piece, Residency, Whereabouts, begin
from pipefit.cost.storages import StageStorages
from pipefit.cost.transition import Answer, Handler, Transition, rows_sent


class Flights:
    """The microbatches of one stage: every residency that they pass through, each made only once.

    `sent` says how often what leaves the stage is sent, if not once.
    """

    def __init__(self, storages: StageStorages, sent: Sent = Sent()) -> None:  # noqa: B008 - it is frozen
        self.storages, self.sent = storages, sent
        self._known: dict[object, Residency] = {}
        self._sent = [] if storages.last else [Kind.SEND_FORWARD]
        self._sent += [Kind.SEND_BACKWARD] if storages.start else []
        self.start = self._interned(begin())

    def apply(
        self,
        residency: Residency,
        action: Action,
        moved: Sequence[Subject] = (),
        *,
        is_first: bool | frozenset[int] = False,
    ) -> Answer:
        """The residency after `action`, and the action's effect on the memory of the device; None where it has none.

        Args:
            moved: of an OFFLOAD or RELOAD, the saved tensors that it moves.
            is_first: of a backward, whether it is the step's first for its layers and so allocates their gradients; or
                those of its layers of which it allocates them, where replicas divide gradients.

        Raises:
            UsageError: the action uses what does not exist then; says what is missing.
        """
        what = moved or action.subject  # not the number of a bundle, by which another program may mean other tensors
        key = action.kind, action.layers, what, action.place, action.part, action.wait, is_first
        answer = residency.known.get(key)
        if answer is None:
            found, changed = _answer(Transition(self.storages, residency, action, moved, is_first, self.sent))
            answer = residency.known[key] = self._interned(found), changed
        return answer

    def is_over(self, residency: Residency) -> bool:
        """Whether nothing of the microbatch is left, so that the next step may use its number again."""
        if residency.held or residency.back != 0:
            return False
        samples, sent = self.storages.samples, rows_sent(self.storages, self.sent)
        return all(residency.rows(kind, wait=True, samples=samples) == sent[kind] for kind in self._sent)

    def _interned(self, residency: Residency) -> Residency:
        return self._known.setdefault(residency.key(), residency)


def _answer(transition: Transition) -> Answer:
    """The next residency and the effect, computed by the function for this kind of action.

    Raises:
        UsageError: the action is not supported, or uses what does not exist then.
    """
    action = transition.action
    handler = (_JOINS if action.wait else _STARTS).get(action.kind)
    if handler is None or (action.part is not None and action.kind not in OF_ROWS):
        transition.refuse("can be written down, but neither simulated nor run yet")
    return handler(transition)


# -------------------------------------------------------------------- data and messages


def _load(transition: Transition) -> Answer:
    storages, holders = transition.storages, transition.holders
    if transition.rows_before:
        transition.refuse("loads what is there already")
    if not transition.completes:
        transition.refuse(f"loads other rows than the {storages.samples} of the stage's slice")
    if storages.start and not storages.last:
        transition.refuse("has nothing to load: only the first stage has inputs and only the last one targets")
    values = transition.residency.values
    if not storages.start:
        values = storages.input_storages
        for instance in values:
            transition.working.hold(instance, holders.value)
    for instance in storages.target_storages:
        transition.working.hold(instance, holders.target)
    return transition.left(done=transition.once(), values=values)


def _receive_forward(transition: Transition) -> Answer:
    for instance in transition.storages.input_storages:
        transition.working.hold(instance, transition.holders.value)
    return transition.left(done=transition.once(), values=transition.storages.input_storages)


def _receive_backward(transition: Transition) -> Answer:
    nbytes = 0 if transition.rows_before else transition.storages.output_gradient_bytes
    return transition.left(done=transition.once(), boundary=nbytes)


def _send_forward(transition: Transition) -> Answer:
    if transition.residency.at < transition.storages.count or transition.storages.last:
        transition.refuse(f"comes before the forward of layer {transition.storages.stop - 1}")
    return transition.residency.changed(done=transition.once()), None


def _send_backward(transition: Transition) -> Answer:
    if transition.residency.back != 0:
        transition.refuse(f"comes before the backward of layer {transition.storages.start}")
    return transition.residency.changed(done=transition.once()), None


def _received(transition: Transition) -> Answer:
    return transition.residency.changed(done=transition.once()), None


def _sent_forward(transition: Transition) -> Answer:
    if transition.completes:
        transition.working.drop_all(transition.holders.sending)
    return transition.left(done=transition.once())


def _sent_backward(transition: Transition) -> Answer:
    nbytes = transition.storages.sent_gradient_bytes if transition.completes else 0
    return transition.left(done=transition.once(), boundary=-nbytes)


# -------------------------------------------------------------------- forward


def _forward(transition: Transition) -> Answer:
    return _pass(transition, saves=True)


def _forward_only(transition: Transition) -> Answer:
    return _pass(transition, saves=False)


def _pass(transition: Transition, *, saves: bool) -> Answer:
    """A forward that saves for the backward, or one that keeps what it starts from, to run again."""
    first, end = transition.layers()
    inputs = _inputs(transition, first, end)
    piece = Piece(first, end, not saves, inputs)
    values = inputs
    if not saves:
        copies = buffer_copies(transition.storages, first, end, fed_back=True)
        for instance in (*inputs, *(transition.storages.target_storages if end == transition.storages.count else ())):
            transition.working.hold(instance, transition.holders.kept(first))
        transition.working.hold(copies, transition.holders.kept(first))
        values = copy_inputs(transition.working, first, inputs)
    values = run_forward(transition.working, Forward(first, end, again=False, saves=saves), values)
    if end == transition.storages.count:
        for instance in values:
            if transition.sent.forward:
                transition.working.hold(instance, transition.holders.sending)
            transition.working.drop(instance, transition.holders.value)
        values = ()
    return transition.left(at=end, values=values, pieces=(*transition.residency.pieces, piece))


def _inputs(transition: Transition, first: int, end: int) -> tuple[int, ...]:
    """The instances that a forward starts from.

    Raises:
        UsageError: they do not exist yet.
    """
    storages, residency = transition.storages, transition.residency
    if first != residency.at:
        transition.refuse(
            f"is out of order: the next layer forward is {transition.layer(residency.at)} of {storages.stop - 1}"
        )
    if first == 0 and storages.start and not transition.has_joined(Kind.RECV_FORWARD):
        transition.refuse(f"has no inputs: {transition.waits_for(Kind.RECV_FORWARD)} must come before it")
    needs_data = (first == 0 and not storages.start) or (end == storages.count and storages.last)
    if needs_data and not residency.rows(Kind.LOAD, wait=False, samples=storages.samples):
        transition.refuse(
            f"has no data: {transition.action.stage}LOAD{transition.action.microbatch} must come before it"
        )
    _check_together(transition, first, end)
    return residency.values


def _check_together(transition: Transition, first: int, end: int) -> None:
    """Refuse a forward of one of two layers that share a trained parameter, when the other one is in this stage too."""
    for again in transition.storages.repetitions:
        apart = (first <= again.user < end) != (first <= again.later < end)
        if apart and again.shared.gradient_bytes:
            user, later = transition.layer(again.user), transition.layer(again.later)
            transition.refuse(
                f"takes layer {user} apart from layer {later}, which shares parameter {again.shared.name!r} with it: "
                "their gradients would be added up in another order"
            )


def _recompute(transition: Transition) -> Answer:
    first, end = transition.layers()
    number, piece = _piece(transition, first, end)
    if not piece.keeps_inputs or piece.again:
        transition.refuse("has nothing to recompute: it belongs once between an N of these layers and their backward")
    _check_inputs(transition, piece)
    kept = transition.holders.kept(first)
    transition.working.hold(buffer_copies(transition.storages, first, end, fed_back=False), kept)
    for instance in piece.inputs:
        transition.working.hold(instance, transition.holders.value)
        transition.working.drop(instance, kept)
    for instance in transition.storages.target_storages:
        if transition.working.held.get(instance, 0) & kept:
            transition.working.hold(instance, transition.holders.target)
            transition.working.drop(instance, kept)
    values = run_forward(transition.working, Forward(first, end, again=True, saves=True), piece.inputs)
    for instance in values:
        transition.working.drop(instance, transition.holders.value)
    pieces = list(transition.residency.pieces)
    pieces[number] = piece._replace(again=True)
    return transition.left(pieces=tuple(pieces))


def _check_inputs(transition: Transition, piece: Piece) -> None:
    """Refuse a second forward whose inputs are not on the device."""
    for instance in piece.inputs:
        state, place = transition.residency.away.get(instance, Away(Whereabouts.HERE, None))
        if state in (Whereabouts.AWAY, Whereabouts.RETURNING):
            transition.refuse(f"starts from a tensor that is {state} (@{place}): RELOAD it and join the reload before")


def _piece(transition: Transition, first: int, end: int) -> tuple[int, Piece]:
    """The piece of exactly these positions, whose forward was one action, and its number.

    Raises:
        UsageError: there is none: the forwards were cut at other layers.
    """
    found = [(n, p) for n, p in enumerate(transition.residency.pieces) if (p.first, p.end) == (first, end)]
    if not found:
        transition.refuse(
            "belongs to no forward of just these layers: cut forwards, recomputations and backwards alike"
        )
    return found[0]


# -------------------------------------------------------------------- backward


def _backward(transition: Transition) -> Answer:
    first, end = transition.layers()
    residency, storages = transition.residency, transition.storages
    back = storages.count if residency.back is None else residency.back
    if residency.at < storages.count or end != back or back == 0:
        last = transition.layer(back - 1) if back else "none"
        transition.refuse(f"is out of order: the next layer backward is {last}, after the forward of the stage")
    if end == storages.count and not storages.last and not transition.has_joined(Kind.RECV_BACKWARD):
        transition.refuse(f"has no gradients: {transition.waits_for(Kind.RECV_BACKWARD)} must come before it")
    pieces = [piece for piece in residency.pieces if first <= piece.first < end]
    if not pieces or pieces[0].first != first or pieces[-1].end != end:
        transition.refuse("ends within layers that went forward in one action: cut forwards and backwards alike")
    for piece in pieces:
        if piece.keeps_inputs and not piece.again:
            layers = None if (piece.first, piece.end) == (0, storages.count) else _layers(transition, piece)
            transition.refuse(f"needs {transition.action._replace(kind=Kind.RECOMPUTE, layers=layers)} before it")
    _check_present(transition, first, end)
    born = travelling = 0
    for piece in reversed(pieces):
        made = run_backward(transition.working, piece, bears=transition.bears)
        born, travelling = born + made[0], travelling + made[1]
        transition.working.level += sum(made)
        transition.working.drop_from(_kept(transition, piece), transition.holders.kept(piece.first))
    transition.working.level -= born + travelling
    if first == 0 and not transition.sent.backward:
        travelling -= storages.sent_gradient_bytes
    return transition.left(back=first, gradients=born, boundary=travelling)


def _kept(transition: Transition, piece: Piece) -> Iterator[int]:
    """The instances that a piece may keep to run again: what it starts from, and copies of buffers."""
    yield from piece.inputs
    yield from transition.storages.target_storages
    for fed_back in (False, True):
        yield buffer_copies(transition.storages, piece.first, piece.end, fed_back=fed_back)


def _layers(transition: Transition, piece: Piece) -> tuple[int, int]:
    start, stop = transition.storages.start, transition.storages.stop
    return start + piece.first, min(start + piece.end, stop)


def _check_present(transition: Transition, first: int, end: int) -> None:
    """Refuse a backward that needs a saved tensor which is not on the device."""
    needed = sum(transition.holders.saved(position) for position in range(first, end))
    for instance, (state, place) in transition.residency.away.items():
        holders = transition.working.held[instance]
        if holders & needed:
            savers = [p for p in range(transition.storages.count) if holders & transition.holders.saved(p)]
            layers = " and ".join(dict.fromkeys(str(transition.layer(position)) for position in savers))
            transition.refuse(
                f"needs a saved tensor of layer {layers} that is {state} (@{place}): "
                "RELOAD it and join the reload before"
            )


_STARTS: dict[Kind, Handler] = {
    Kind.LOAD: _load,
    Kind.FORWARD: _forward,
    Kind.FORWARD_ONLY: _forward_only,
    Kind.RECOMPUTE: _recompute,
    Kind.BACKWARD: _backward,
    Kind.SEND_FORWARD: _send_forward,
    Kind.RECV_FORWARD: _receive_forward,
    Kind.SEND_BACKWARD: _send_backward,
    Kind.RECV_BACKWARD: _receive_backward,
    Kind.OFFLOAD: offload,
    Kind.RELOAD: reload,
}
_JOINS: dict[Kind, Handler] = {
    Kind.SEND_FORWARD: _sent_forward,
    Kind.RECV_FORWARD: _received,
    Kind.SEND_BACKWARD: _sent_backward,
    Kind.RECV_BACKWARD: _received,
    Kind.OFFLOAD: offloaded,
    Kind.RELOAD: reloaded,
}
