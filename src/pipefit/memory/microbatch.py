"""One microbatch in a stage: how each kind of action changes its residency, and which actions are refused.

`Flights.apply` takes a residency and an action and returns the next residency and the effect on the device's
memory. Its answers are cached, so most actions of a program cost one look-up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NoReturn

from pipefit.errors import UsageError
from pipefit.memory.forward_backward import (
    Forward,
    Working,
    buffer_copies,
    copy_inputs,
    drop_unseen,
    outputs_of,
    run_backward,
    run_forward,
)
from pipefit.memory.storages import (
    Done,
    Effect,
    Moments,
    MovedStorage,
    Piece,
    Residency,
    Sent,
    StageStorages,
    Whereabouts,
    begin,
)
from pipefit.schema.actions import OF_ROWS, Action, Kind, Subject
from pipefit.texts import layers_text

# ---- Transitions: an action applied to a residency
#
# A handler of a kind of action changes `working` and returns `left(...)`: the next residency and the effect
# on the device's memory. It refuses an action that uses missing memory.


def rows_sent(storages: StageStorages, sent: Sent) -> dict[Kind, int]:
    """Return the total rows of a microbatch's sends, in each direction."""
    return {
        Kind.SEND_FORWARD: sent.forward * storages.samples,
        Kind.SEND_BACKWARD: sent.backward * storages.samples,
    }


Answer = tuple[Residency, Effect | None]
Handler = Callable[["Transition"], Answer]


class Transition:
    """One action applied to one residency. `working` is the copy of the residency that the action changes."""

    def __init__(
        self,
        storages: StageStorages,
        residency: Residency,
        action: Action,
        moved: Sequence[Subject],
        is_first: bool | frozenset[int],
        sent: Sent,
        gathers: Moments,
    ) -> None:
        self.storages, self.residency, self.action = storages, residency, action
        self.moved, self.is_first, self.sent = moved, is_first, sent
        self.working = Working(storages, residency, gathers)
        self.holders = self.working.holders

    def bears(self, position: int) -> bool:
        """Return whether a backward allocates the gradients of the layer at a position.

        The loss counts as the last layer.
        """
        if isinstance(self.is_first, bool):
            return self.is_first
        return self.layer(position) in self.is_first

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the action.

        Raises:
            UsageError: always; the action's text and the reason.
        """
        raise UsageError(f"{self.action} {reason}")

    def waits_for(self, kind: Kind) -> str:
        """Return the text of the WAIT of this kind for the action's stage and microbatch."""
        return f"{self.action.stage}WAIT_{kind.value}{self.action.microbatch}"

    def left(self, *, gradients: int = 0, boundary: int = 0, **fields: Any) -> Answer:
        """Return the next residency, with these fields changed, and the action's effect.

        `gradients` is the change in bytes of parameter gradients, `boundary` that of value gradients.
        """
        result = self.working.after(**fields)
        return result, self.working.effect(result, gradients=gradients, boundary=boundary)

    def once(self) -> frozenset[Done]:
        """Return the residency's `done` including this action.

        Raises:
            UsageError: the action happened before.
        """
        own = self.action.kind, self.action.wait, self.action.part, self.action.place
        if own in self.residency.done or self.rows_before + self._own_rows > self._all_rows:
            self.refuse("happens twice")
        return self.residency.done | {own}

    @property
    def rows_before(self) -> int:
        """The rows that earlier actions of this kind carried."""
        return self.residency.rows(self.action.kind, wait=self.action.wait, samples=self.storages.samples)

    @property
    def completes(self) -> bool:
        """True if this action carries the last rows of its kind."""
        return self.rows_before + self._own_rows == self._all_rows

    @property
    def _all_rows(self) -> int:
        """The rows that all actions of this kind carry together."""
        return rows_sent(self.storages, self.sent).get(self.action.kind, self.storages.samples)

    @property
    def _own_rows(self) -> int:
        part = self.action.part
        return self.storages.samples if part is None else part[1] - part[0]

    def has_joined(self, kind: Kind) -> bool:
        """Return whether all receives of this kind have been joined."""
        samples = self.storages.samples
        return self.residency.rows(kind, wait=True, samples=samples) == samples

    def layers(self) -> tuple[int, int]:
        """Return the positions that a compute action covers; with the model's last layer, also the loss."""
        storages, given = self.storages, self.action.layers
        if given is None:
            return 0, storages.count
        first, end = given
        if not storages.start <= first < end <= storages.stop:
            self.refuse(f"is outside its stage, which holds {layers_text(storages.start, storages.stop)}")
        return first - storages.start, storages.position(end)

    def layer(self, position: int) -> int:
        """Return the layer of the model at a position; the loss counts as the last."""
        return min(self.storages.start + position, self.storages.stop - 1)


# ---- Offloading of saved tensors
#
# A tensor is named by its layer and its number in the layer, and its whole storage is moved, including other
# tensors in it. The holders of the storage stay; only the location of its bytes changes.


def offload(transition: Transition) -> Answer:
    """Start an offload; nothing is freed yet."""
    for subject, instance in _subjects(transition):
        saver = transition.holders.saved(subject.layer - transition.storages.start)
        if not transition.working.held.get(instance, 0) & saver:
            transition.refuse(
                f"offloads a missing tensor: it belongs between forward and backward of layer {subject.layer}"
            )
        if instance in transition.residency.away:
            transition.refuse(
                f"offloads a storage that is {transition.residency.away[instance].state} already"
            )
        transition.working.away[instance] = MovedStorage(Whereabouts.LEAVING, transition.action.place)
    return transition.left()[0], None


def offloaded(transition: Transition) -> Answer:
    """Join an offload: the bytes on the device are freed."""
    for _, instance in _subjects(transition):
        holders = transition.working.held[instance]
        if holders & (transition.holders.value | transition.holders.target):
            transition.refuse(
                f"frees a tensor that the forward of layer {transition.layer(transition.residency.at)} "
                "still reads"
            )
        if holders & transition.holders.sending:
            transition.refuse(
                f"frees a tensor that is still being sent: {transition.waits_for(Kind.SEND_FORWARD)} must "
                "come before it"
            )
        transition.working.away[instance] = MovedStorage(Whereabouts.AWAY, transition.action.place)
    return transition.left()


def reload(transition: Transition) -> Answer:
    """Start a reload, into memory that is allocated now."""
    for _, instance in _subjects(transition):
        result = transition.residency.away.get(instance, MovedStorage(Whereabouts.HERE, None))
        if result != MovedStorage(Whereabouts.AWAY, transition.action.place):
            where = "" if result.place is None else f" (@{result.place})"
            transition.refuse(f"reloads a storage that is {result.state}{where}")
        transition.working.away[instance] = MovedStorage(Whereabouts.RETURNING, transition.action.place)
    return transition.left()


def reloaded(transition: Transition) -> Answer:
    """Join a reload."""
    for _, instance in _subjects(transition):
        del transition.working.away[instance]
    return transition.left()[0], None


def _subjects(transition: Transition) -> list[tuple[Subject, int]]:
    """Return the saved tensors that the action moves, each with the instance of its storage.

    Raises:
        UsageError: the action moves something else, a tensor that the stage does not keep, or one storage
            twice.
    """
    if transition.action.place is None:
        transition.refuse("lacks a place: write @host, @device3 or, in shares, @device3*2+device4*1")
    result: dict[int, Subject] = {}
    for subject in transition.moved:
        if not isinstance(subject.what, int):
            transition.refuse(
                "offloads something else: only saved tensors can be offloaded here, such as [5.3]"
            )
        try:
            number = transition.storages.storage(subject)
        except UsageError:
            transition.refuse(f"names a tensor that stage {transition.action.stage} does not keep")
        if number in result:
            transition.refuse(f"offloads one storage under two names, {result[number]} and {subject}")
        result[number] = subject
    return [(subject, _instance(transition, number, subject)) for number, subject in result.items()]


def _instance(transition: Transition, number: int, subject: Subject) -> int:
    """Return the instance that the named layer saved, in the first forward or in the recomputation."""
    saver = transition.holders.saved(subject.layer - transition.storages.start)
    again = number + len(transition.storages.sizes)
    return again if transition.working.held.get(again, 0) & saver else number


# ---- Residencies and the handlers of actions


class Flights:
    """The microbatches of one stage: all residencies that they pass through, each created once.

    `sent` says how often the stage's outputs and gradients are sent, if not once.
    """

    def __init__(self, storages: StageStorages, sent: Sent = Sent()) -> None:  # noqa: B008 - it is frozen
        self.storages, self.sent = storages, sent
        self._known: dict[object, Residency] = {}
        self._sent = [] if storages.last else [Kind.SEND_FORWARD]
        self._sent += [Kind.SEND_BACKWARD] if storages.start else []
        self.start = self._interned(begin())
        self._later = self.start
        if sent.late:
            self._later = self._interned(self.start.changed(done=frozenset({_RETURNED})))

    def begin(self, microbatch: int) -> Residency:
        """Return the residency of a microbatch that has not reached the stage yet."""
        return self._later if microbatch else self.start

    def apply(
        self,
        residency: Residency,
        action: Action,
        moved: Sequence[Subject] = (),
        *,
        is_first: bool | frozenset[int] = False,
        gathers: Moments = (),
    ) -> Answer:
        """Return the residency after `action`, and the action's effect on the device's memory.

        The effect is None if the bytes do not change.

        Args:
            moved: the saved tensors that an OFFLOAD or RELOAD moves, or that move within a forward.
            is_first: for a backward, whether it is the step's first for its layers and so allocates their
                gradients; or, if
            replicas divide gradients, the layers whose gradients it allocates.
            gathers: changes of gathered parameters during the action.

        Raises:
            UsageError: the action uses missing memory; says what is missing.
        """
        what = (
            moved or action.subject
        )  # not the bundle's number, which means other tensors in another program
        key = action.kind, action.layers, what, action.place, action.part, action.wait, is_first, *gathers
        answer = residency.known.get(key)
        if answer is None:
            result, changed = _answer(
                Transition(self.storages, residency, action, moved, is_first, self.sent, gathers)
            )
            answer = residency.known[key] = self._interned(result), changed
        return answer

    def is_over(self, residency: Residency) -> bool:
        """Return whether nothing of the microbatch is left, so that the next step may reuse its number."""
        if residency.held or residency.back != 0:
            return False
        samples, sent = self.storages.samples, rows_sent(self.storages, self.sent)
        return all(residency.rows(kind, wait=True, samples=samples) == sent[kind] for kind in self._sent)

    def _interned(self, residency: Residency) -> Residency:
        return self._known.setdefault(residency.key(), residency)


def _answer(transition: Transition) -> Answer:
    """Return the next residency and the effect, computed by the handler of this kind of action.

    Raises:
        UsageError: the action is not supported, or uses missing memory.
    """
    action = transition.action
    handler = (_JOINS if action.wait else _STARTS).get(action.kind)
    if handler is None or (action.part is not None and action.kind not in OF_ROWS):
        transition.refuse("is valid in a program, but neither the simulator nor the runtime supports it yet")
    return handler(transition)


# ---- Data and messages


def _load(transition: Transition) -> Answer:
    storages, holders = transition.storages, transition.holders
    if transition.rows_before:
        transition.refuse("loads data that is already loaded")
    if not transition.completes:
        transition.refuse(
            f"loads a number of rows other than the {storages.samples} of the stage's local batch"
        )
    if storages.start and not storages.last:
        transition.refuse(
            "has nothing to load: only the first stage takes inputs and only the last stage takes targets"
        )
    values = transition.residency.values
    if not storages.start:
        values = storages.input_storages
        for instance in values:
            transition.working.hold(instance, holders.value)
    for instance in storages.target_storages:
        transition.working.hold(instance, holders.target)
    return transition.left(done=transition.once(), values=values, boundary=storages.loaded_bytes)


def _receive_forward(transition: Transition) -> Answer:
    for instance in transition.storages.input_storages:
        transition.working.hold(instance, transition.holders.value)
    nbytes = 0 if transition.rows_before else transition.storages.arriving_bytes("inputs")
    values = transition.storages.input_storages
    return transition.left(done=transition.once(), values=values, boundary=nbytes)


def _receive_backward(transition: Transition) -> Answer:
    storages = transition.storages
    arriving = storages.output_gradient_bytes + storages.arriving_bytes("gradients")
    nbytes = 0 if transition.rows_before else arriving
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


# ---- Forward


def _forward(transition: Transition) -> Answer:
    return _pass(transition, saves=True)


def _forward_only(transition: Transition) -> Answer:
    return _pass(transition, saves=False)


def _pass(transition: Transition, *, saves: bool) -> Answer:
    """Run a forward that saves for the backward, or one that keeps its inputs for recomputation."""
    first, end = transition.layers()
    inputs = _inputs(transition, first, end)
    values, cut = inputs, end if saves else _recomputed_end(transition, first, end)
    if not saves:
        values = _keep_inputs(transition, first, cut, end)
    moved = frozenset(map(transition.storages.storage, transition.moved))
    pieces = [Piece(first, cut, not saves, inputs, moved=moved)]
    waiting = _waiting_outputs(transition, first, values)
    cuts = {first, cut, end}
    if end == transition.storages.count and (waiting or cut < end):
        cuts.add(end - 1)
    for start, stop in pairwise(sorted(cuts)):
        above = waiting if stop < transition.storages.count else 0
        if start == cut:
            pieces.append(Piece(cut, end, False, values))
        transition.working.level += above
        way = Forward(start, stop, again=False, saves=saves or start >= cut, moved=moved)
        values = run_forward(transition.working, way, values)
        transition.working.level -= above
    if not (saves or transition.storages.runs_again(first, cut)):
        transition.working.drop_from(_kept(transition, pieces[0]), transition.holders.kept(first))
    if end == transition.storages.count:
        for instance in values:
            if transition.sent.forward:
                transition.working.hold(instance, transition.holders.sending)
            transition.working.drop(instance, transition.holders.value)
        values = ()
    kept = transition.storages.measurement.loss_bytes + _NUMBER if _loss_apart(transition, end) else 0
    transition.working.reach(kept)
    return transition.left(
        boundary=kept, at=end, values=values, pieces=(*transition.residency.pieces, *pieces)
    )


def _keep_inputs(transition: Transition, first: int, cut: int, end: int) -> tuple[int, ...]:
    """Keep the inputs of a pass for its recomputation up to `cut`; return the instances that it reads."""
    working, kept = transition.working, transition.holders.kept(first)
    needs_targets = end == transition.storages.count and not _loss_apart(transition, end)
    inputs = transition.residency.values
    for instance in (*inputs, *(transition.storages.target_storages if needs_targets else ())):
        working.hold(instance, kept)
    working.hold(buffer_copies(transition.storages, first, cut, fed_back=True), kept)
    return copy_inputs(working, first, inputs)


_RETURNED: Done = (Kind.FORWARD, False, None, None)  # the engine has outputs of the microbatch before


def _waiting_outputs(transition: Transition, first: int, values: tuple[int, ...]) -> int:
    """Return the bytes of the last stage's outputs for the microbatch before, until there are new ones.

    They are like those of this microbatch, whose `values` are before position `first`.
    """
    if _RETURNED not in transition.residency.done:
        return 0
    for layer in transition.storages.layers[first:-1]:
        values = outputs_of(layer, values)
    return sum(map(transition.working.size, {*values}))


def _loss_apart(transition: Transition, end: int) -> bool:
    """Return whether a pass up to `end` ends with a loss that its engine computes outside of the layers."""
    storages = transition.storages
    return storages.buffered and storages.last and end == storages.count


def _recomputed_end(transition: Transition, first: int, end: int) -> int:
    """Return the position at which the recomputation of these positions ends.

    `torch.utils.checkpoint` starts it when the backward first needs a saved tensor. Positions at the end that
    save none are not run again, and have gone backward by then, like a loss apart.
    """
    storages = transition.storages
    if not storages.buffered:
        return end
    end -= _loss_apart(transition, end)
    stop = max(first, storages.last_saver(first, end))
    while end > stop + 1 and not storages.costs[end - 1].buffer_bytes:  # whose copies are kept for it
        end -= 1
    return end


_NUMBER = 8  # bytes of a number that a graph keeps: the weight of a microbatch's loss


def _root_bytes(transition: Transition) -> int:
    """Return the bytes that a backward from a loss apart holds to its end: the gradient of the weighted loss.

    The number that its graph kept is freed first.
    """
    storages, begins = transition.storages, transition.residency.back is None
    if not storages.buffered or not storages.last:
        return 0
    return storages.measurement.loss_bytes - _NUMBER * begins


def _inputs(transition: Transition, first: int, end: int) -> tuple[int, ...]:
    """Return the instances that a forward reads.

    Raises:
        UsageError: the instances do not exist yet.
    """
    storages, residency = transition.storages, transition.residency
    if first != residency.at:
        transition.refuse(
            f"is out of order: the next layer forward is {transition.layer(residency.at)} of "
            f"{storages.stop - 1}"
        )
    if first == 0 and storages.start and not transition.has_joined(Kind.RECV_FORWARD):
        transition.refuse(f"lacks its inputs: {transition.waits_for(Kind.RECV_FORWARD)} must come before it")
    needs_data = (first == 0 and not storages.start) or (end == storages.count and storages.last)
    if needs_data and not residency.rows(Kind.LOAD, wait=False, samples=storages.samples):
        transition.refuse(
            f"lacks its data: {transition.action.stage}LOAD{transition.action.microbatch} must come before it"
        )
    return residency.values


def _recompute(transition: Transition) -> Answer:
    first, end = transition.layers()
    made, back, root = (0, 0), transition.residency.back, _root_bytes(transition)
    freed, cut = _NUMBER * _loss_apart(transition, end), _recomputed_end(transition, first, end)
    transition.working.level += root
    if cut < end:
        rest = _piece(transition, cut, end)[1]
        made = run_backward(transition.working, rest, bears=transition.bears)
        transition.working.level += sum(made)
        back = end = cut
    number, piece = _piece(transition, first, end)
    if not piece.keeps_inputs or piece.again:
        transition.refuse(
            "has nothing to recompute: it belongs once between an N of these layers and their backward"
        )
    copies = _run_again(transition, piece) if transition.storages.runs_again(first, end) else ()
    pieces = list(transition.residency.pieces)
    pieces[number] = piece._replace(again=True, copies=copies)
    transition.working.level -= sum(made) + root
    return transition.left(pieces=tuple(pieces), back=back, gradients=made[0], boundary=made[1] - freed)


def _run_again(transition: Transition, piece: Piece) -> tuple[int, ...]:
    """Run a piece forward from its inputs; return the copies of these that its layers change in place."""
    first, end = piece.first, piece.end
    _check_inputs(transition, piece)
    kept = transition.holders.kept(first)
    transition.working.hold(buffer_copies(transition.storages, first, end, fed_back=False), kept)
    for instance in piece.inputs:
        transition.working.hold(instance, transition.holders.value)
        if not transition.storages.buffered:  # torch.utils.checkpoint keeps them until the backward has ended
            transition.working.drop(instance, kept)
    for instance in transition.storages.target_storages:
        if transition.working.held.get(instance, 0) & kept:
            transition.working.hold(instance, transition.holders.target)
            transition.working.drop(instance, kept)
    values = piece.inputs
    if transition.storages.buffered:  # torch.utils.checkpoint copies them again
        values = copy_inputs(transition.working, first, values, again=True)
    copies = values if values != piece.inputs else ()
    values = run_forward(transition.working, Forward(first, end, again=True, saves=True), values)
    for instance in values:
        transition.working.drop(instance, transition.holders.value)
    if transition.storages.buffered:
        drop_unseen(transition.working, first, end)
    return copies


def _check_inputs(transition: Transition, piece: Piece) -> None:
    """Refuse a recomputation whose inputs are not on the device."""
    for instance in piece.inputs:
        state, place = transition.residency.away.get(instance, MovedStorage(Whereabouts.HERE, None))
        if state in (Whereabouts.AWAY, Whereabouts.RETURNING):
            transition.refuse(
                f"starts from a tensor that is {state} (@{place}): RELOAD it and wait for the reload first"
            )


def _piece(transition: Transition, first: int, end: int) -> tuple[int, Piece]:
    """Return the number and the piece of exactly these positions, whose forward was one action.

    Raises:
        UsageError: no such piece, because forwards were cut at other layers.
    """
    pieces = transition.residency.pieces
    number = _place(pieces, first)
    if number == len(pieces) or (pieces[number].first, pieces[number].end) != (first, end):
        transition.refuse(
            "needs a forward of exactly these layers: split forwards, recomputations and backwards at the "
            "same layers"
        )
    return number, pieces[number]


def _place(pieces: Sequence[Piece], position: int) -> int:
    """Return the number of the first piece, of those in the order of the forward, from this position on."""
    return bisect_left(pieces, position, key=attrgetter("first"))


# ---- Backward


def _backward(transition: Transition) -> Answer:
    first, end = transition.layers()
    residency, storages = transition.residency, transition.storages
    back = storages.count if residency.back is None else residency.back
    root, freed = _root_bytes(transition), _NUMBER * (_loss_apart(transition, end) and residency.back is None)
    if storages.buffered and first < back < end:
        end = back  # a recomputation has had the backward of the rest
    if residency.at < storages.count or end != back or back == 0:
        last = transition.layer(back - 1) if back else "none"
        transition.refuse(
            f"is out of order: the next layer backward is {last}, after the forward of the stage"
        )
    if end == storages.count and not storages.last and not transition.has_joined(Kind.RECV_BACKWARD):
        transition.refuse(
            f"lacks its gradients: {transition.waits_for(Kind.RECV_BACKWARD)} must come before it"
        )
    pieces = _pieces(transition, first, end)
    _check_present(transition, first, end)
    grown = travelling = 0
    transition.working.level += root
    for piece in reversed(pieces):
        made = run_backward(transition.working, piece, bears=transition.bears)
        grown, travelling = grown + made[0], travelling + made[1]
        transition.working.level += sum(made)
        transition.working.drop_from(_kept(transition, piece), transition.holders.kept(piece.first))
    transition.working.level -= grown + travelling + root
    travelling -= freed
    if first == 0 and not transition.sent.backward:
        travelling -= storages.sent_gradient_bytes
    if first == 0:
        travelling -= _dropped_bytes(transition)
    return transition.left(back=first, gradients=grown, boundary=travelling)


def _pieces(transition: Transition, first: int, end: int) -> Sequence[Piece]:
    """Return the pieces of exactly these positions, which can go backward.

    Raises:
        UsageError: forwards were cut at other layers, or a piece must be recomputed first.
    """
    residency, storages = transition.residency, transition.storages
    pieces = residency.pieces[_place(residency.pieces, first) : _place(residency.pieces, end)]
    if not pieces or pieces[0].first != first or pieces[-1].end != end:
        transition.refuse(
            "ends within layers that went forward in one action: split forwards and backwards at the same "
            "layers"
        )
    for piece in pieces:
        if piece.keeps_inputs and not piece.again:
            layers = None if (piece.first, piece.end) == (0, storages.count) else _layers(transition, piece)
            transition.refuse(
                f"needs {transition.action._replace(kind=Kind.RECOMPUTE, layers=layers)} before it"
            )
    return pieces


def _dropped_bytes(transition: Transition) -> int:
    """Return the bytes of messages that end with a stage's backward, and drop what was held until then."""
    storages = transition.storages
    if not storages.last:
        return storages.arriving_bytes("inputs") + storages.arriving_bytes("gradients")
    transition.working.drop_all(transition.holders.sending)  # of engines that keep outputs for the backward
    return 0


def _kept(transition: Transition, piece: Piece) -> Iterator[int]:
    """Yield the instances that a piece may keep for its recomputation.

    These are its inputs, targets, and copies of buffers.
    """
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
                f"needs a saved tensor of layer {layers} that is {state} (@{place}): RELOAD it and wait for "
                "the reload first"
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
