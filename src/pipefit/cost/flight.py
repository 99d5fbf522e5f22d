"""One microbatch in a stage: what every kind of action does to its residency, and which actions are refused.

`Flights.apply` takes a residency and an action and returns the next residency and the effect on the device's memory.
It depends on nothing else, so its answers are remembered, and most actions of a program cost one look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pipefit.actions import Action, Kind, Subject
from pipefit.cost.effects import Effect
from pipefit.cost.passes import Forward, Working, buffer_copies, copy_inputs, run_backward, run_forward
from pipefit.cost.residency import AGAIN, Away, Piece, Residency, begin
from pipefit.cost.storages import StageStorages
from pipefit.errors import UsageError

Answer = tuple[Residency, Effect | None]
_Handler = Callable[["_Step"], Answer]


class Flights:
    """The microbatches of one stage: every residency that they pass through, each made only once."""

    def __init__(self, storages: StageStorages) -> None:
        self.storages = storages
        self._known: dict[object, Residency] = {}
        self.start = self._interned(begin())

    def apply(
        self, residency: Residency, action: Action, moved: Sequence[Subject] = (), *, is_first: bool = False
    ) -> Answer:
        """The residency after `action`, and the action's effect on the memory of the device; None where it has none.

        Args:
            moved: of an OFFLOAD or RELOAD, the saved tensors that it moves.
            is_first: of a backward, whether it is the step's first for its layers and so allocates their gradients.

        Raises:
            UsageError: the action uses what does not exist then; says what is missing.
        """
        key = action.kind, action.layers, action.subject, action.place, action.part, action.wait, is_first
        answer = residency.known.get(key)
        if answer is None:
            found, changed = _Step(self.storages, residency, action, moved, is_first).answer()
            answer = residency.known[key] = self._interned(found), changed
        return answer

    def is_over(self, residency: Residency) -> bool:
        """Whether nothing of the microbatch is left, so that the next step may use its number again."""
        wanted = {"WAIT_SEND_F"} if not self.storages.last else set()
        wanted |= {"WAIT_SEND_B"} if self.storages.start else set()
        return not residency.held and residency.back == 0 and wanted <= residency.done

    def _interned(self, residency: Residency) -> Residency:
        return self._known.setdefault(residency.key(), residency)


class _Step:
    """One action applied to one residency; computed once, then remembered."""

    def __init__(
        self, storages: StageStorages, residency: Residency, action: Action, moved: Sequence[Subject], is_first: bool
    ) -> None:
        self.storages, self.residency, self.action = storages, residency, action
        self.moved, self.is_first = moved, is_first
        self.working = Working(storages, residency)
        self.holders = self.working.holders

    def answer(self) -> Answer:
        """The next residency and the effect, computed by the function for this kind of action.

        Raises:
            UsageError: the action is not supported, or uses what does not exist then.
        """
        handler = (_JOINS if self.action.wait else _STARTS).get(self.action.kind)
        if handler is None or self.action.part is not None:
            self.refuse("can be written down, but neither simulated nor run yet")
        return handler(self)

    def refuse(self, reason: str) -> NoReturn:
        raise UsageError(f"{self.action} {reason}")

    def waits_for(self, kind: Kind) -> str:
        """The text of the WAIT of that kind for the action's stage and microbatch."""
        return f"{self.action.stage}WAIT_{kind.value}{self.action.microbatch}"

    def left(self, *, gradients: int = 0, boundary: int = 0, **fields: Any) -> Answer:
        """The residency that the action leaves, and its effect."""
        found = self.residency.changed(held=self.working.held, away=self.working.away, **fields)
        return found, self.working.effect(gradients=gradients, boundary=boundary)

    def once(self, name: str) -> frozenset[str]:
        """`done` with `name` in it, which must not have been done with this microbatch before."""
        if name in self.residency.done:
            self.refuse("happens twice")
        return self.residency.done | {name}

    def layers(self) -> tuple[int, int]:
        """The positions that a compute action covers; with the model's last layer, the loss too."""
        storages, given = self.storages, self.action.layers
        if given is None:
            return 0, storages.count
        first, end = given
        if not storages.start <= first < end <= storages.stop:
            self.refuse(f"is outside its stage, which holds layers {storages.start} to {storages.stop - 1}")
        return first - storages.start, storages.position(end)

    def layer(self, position: int) -> int:
        """The layer of the model at a position; the loss counts as the last."""
        return min(self.storages.start + position, self.storages.stop - 1)


# -------------------------------------------------------------------- data and messages


def _load(step: _Step) -> Answer:
    storages, holders = step.storages, step.holders
    if "loaded" in step.residency.done:
        step.refuse("loads what is there already")
    if storages.start and not storages.last:
        step.refuse("has nothing to load: only the first stage has inputs and only the last one targets")
    values = step.residency.values
    if not storages.start:
        values = storages.input_storages
        for instance in values:
            step.working.hold(instance, holders.value)
    for instance in storages.target_storages:
        step.working.hold(instance, holders.target)
    return step.left(done=step.once("loaded"), values=values)


def _receive_forward(step: _Step) -> Answer:
    for instance in step.storages.input_storages:
        step.working.hold(instance, step.holders.value)
    return step.left(done=step.once("RECV_F"), values=step.storages.input_storages)


def _receive_backward(step: _Step) -> Answer:
    nbytes = step.storages.output_gradient_bytes
    return step.left(done=step.once("RECV_B"), boundary=nbytes)


def _send_forward(step: _Step) -> Answer:
    if step.residency.at < step.storages.count or step.storages.last:
        step.refuse(f"comes before the forward of layer {step.storages.stop - 1}")
    return step.residency.changed(done=step.once("SEND_F")), None


def _send_backward(step: _Step) -> Answer:
    if step.residency.back != 0:
        step.refuse(f"comes before the backward of layer {step.storages.start}")
    return step.residency.changed(done=step.once("SEND_B")), None


def _received(step: _Step) -> Answer:
    return step.residency.changed(done=step.once(f"WAIT_{step.action.kind.value}")), None


def _sent_forward(step: _Step) -> Answer:
    step.working.drop_all(step.holders.sending)
    return step.left(done=step.once("WAIT_SEND_F"))


def _sent_backward(step: _Step) -> Answer:
    nbytes = step.storages.sent_gradient_bytes
    return step.left(done=step.once("WAIT_SEND_B"), boundary=-nbytes)


# -------------------------------------------------------------------- forward


def _forward(step: _Step) -> Answer:
    return _pass(step, saves=True)


def _forward_only(step: _Step) -> Answer:
    return _pass(step, saves=False)


def _pass(step: _Step, *, saves: bool) -> Answer:
    """A forward that saves for the backward, or one that keeps its inputs alone, to run again."""
    first, end = step.layers()
    inputs = _inputs(step, first, end)
    piece = Piece(first, end, not saves, inputs)
    values = inputs
    if not saves:
        for instance in (*inputs, *(step.storages.target_storages if end == step.storages.count else ())):
            step.working.hold(instance, step.holders.kept(first))
        values = copy_inputs(step.working, first, inputs)
    values = run_forward(step.working, Forward(first, end, 0, saves), values)
    if end == step.storages.count:
        for instance in values:
            step.working.hold(instance, step.holders.sending)
            step.working.drop(instance, step.holders.value)
        values = ()
    return step.left(at=end, values=values, pieces=(*step.residency.pieces, piece))


def _inputs(step: _Step, first: int, end: int) -> tuple[int, ...]:
    """The instances that a forward starts from.

    Raises:
        UsageError: they do not exist yet.
    """
    storages, residency = step.storages, step.residency
    if first != residency.at:
        step.refuse(f"is out of order: the next layer forward is {step.layer(residency.at)} of {storages.stop - 1}")
    if first == 0 and storages.start and "WAIT_RECV_F" not in residency.done:
        step.refuse(f"has no inputs: {step.waits_for(Kind.RECV_FORWARD)} must come before it")
    needs_data = (first == 0 and not storages.start) or (end == storages.count and storages.last)
    if needs_data and "loaded" not in residency.done:
        step.refuse(f"has no data: {step.action.stage}LOAD{step.action.microbatch} must come before it")
    for again in storages.repetitions:
        apart = (first <= again.user < end) != (first <= again.later < end)
        if apart and again.shared.gradient_bytes:
            step.refuse(
                f"takes layer {step.layer(again.user)} apart from layer {step.layer(again.later)}, which shares "
                f"parameter {again.shared.name!r} with it: their gradients would be added up in another order"
            )
    return residency.values


def _recompute(step: _Step) -> Answer:
    first, end = step.layers()
    number, piece = _piece(step, first, end)
    if not piece.keeps_inputs or piece.again:
        step.refuse("has nothing to recompute: it belongs once between an N of these layers and their backward")
    kept = step.holders.kept(first)
    step.working.hold(buffer_copies(step.storages, first, end), kept)
    for instance in piece.inputs:
        step.working.hold(instance, step.holders.value)
        step.working.drop(instance, kept)
    for instance in step.storages.target_storages:
        if step.working.held.get(instance, 0) & kept:
            step.working.hold(instance, step.holders.target)
            step.working.drop(instance, kept)
    values = run_forward(step.working, Forward(first, end, AGAIN, True), piece.inputs)
    for instance in values:
        step.working.drop(instance, step.holders.value)
    pieces = list(step.residency.pieces)
    pieces[number] = piece._replace(again=True)
    return step.left(pieces=tuple(pieces))


def _piece(step: _Step, first: int, end: int) -> tuple[int, Piece]:
    """The piece of exactly these positions, whose forward was one action, and its number.

    Raises:
        UsageError: there is none: the forwards were cut at other layers.
    """
    found = [(n, p) for n, p in enumerate(step.residency.pieces) if (p.first, p.end) == (first, end)]
    if not found:
        step.refuse("belongs to no forward of just these layers: cut forwards, recomputations and backwards alike")
    return found[0]


# -------------------------------------------------------------------- backward


def _backward(step: _Step) -> Answer:
    first, end = step.layers()
    residency, storages = step.residency, step.storages
    back = storages.count if residency.back is None else residency.back
    if residency.at < storages.count or end != back or back == 0:
        last = step.layer(back - 1) if back else "none"
        step.refuse(f"is out of order: the next layer backward is {last}, after the forward of the stage")
    if end == storages.count and not storages.last and "WAIT_RECV_B" not in residency.done:
        step.refuse(f"has no gradients: {step.waits_for(Kind.RECV_BACKWARD)} must come before it")
    pieces = [piece for piece in residency.pieces if first <= piece.first < end]
    if not pieces or pieces[0].first != first or pieces[-1].end != end:
        step.refuse("ends within layers that went forward in one action: cut forwards and backwards alike")
    for piece in pieces:
        if piece.keeps_inputs and not piece.again:
            layers = None if (piece.first, piece.end) == (0, storages.count) else _layers(step, piece)
            step.refuse(f"needs {step.action._replace(kind=Kind.RECOMPUTE, layers=layers)} before it")
    _check_back(step, first, end)
    born = travelling = 0
    for piece in reversed(pieces):
        made = run_backward(step.working, piece, is_first=step.is_first)
        born, travelling = born + made[0], travelling + made[1]
        step.working.level += sum(made)
        step.working.drop_all(step.holders.kept(piece.first))
    step.working.level -= born + travelling
    return step.left(back=first, gradients=born, boundary=travelling)


def _layers(step: _Step, piece: Piece) -> tuple[int, int]:
    start, stop = step.storages.start, step.storages.stop
    return start + piece.first, min(start + piece.end, stop)


def _check_back(step: _Step, first: int, end: int) -> None:
    """Refuse a backward that needs a saved tensor which is not on the device."""
    for instance, (state, place) in step.residency.away.items():
        holders = step.residency.held[instance]
        savers = [p for p in range(step.storages.count) if holders & step.holders.saved(p)]
        if any(first <= position < end for position in savers):
            layers = " and ".join(dict.fromkeys(str(step.layer(position)) for position in savers))
            step.refuse(
                f"needs a saved tensor of layer {layers} that is {state} (@{place}): "
                "RELOAD it and join the reload before"
            )


# -------------------------------------------------------------------- moving saved tensors away and back


def _offload(step: _Step) -> Answer:
    for subject, instance in _subjects(step):
        saver = step.holders.saved(subject.layer - step.storages.start)
        if not step.residency.held.get(instance, 0) & saver:
            step.refuse(f"moves what is not there: it belongs between forward and backward of layer {subject.layer}")
        if instance in step.residency.away:
            step.refuse(f"moves a storage that is {step.residency.away[instance].state} already")
        step.working.away[instance] = Away("on its way out", step.action.place)
    return step.left()[0], None


def _offloaded(step: _Step) -> Answer:
    for _, instance in _subjects(step):
        holders = step.residency.held[instance]
        if holders & (step.holders.value | step.holders.target):
            step.refuse(f"frees what the forward of layer {step.layer(step.residency.at)} still reads")
        if holders & step.holders.sending:
            step.refuse(f"frees what is still being sent: {step.waits_for(Kind.SEND_FORWARD)} must come before it")
        step.working.away[instance] = Away("away", step.action.place)
    return step.left()


def _reload(step: _Step) -> Answer:
    for _, instance in _subjects(step):
        found = step.residency.away.get(instance, Away("on the device", None))
        if found != Away("away", step.action.place):
            where = "" if found.place is None else f" (@{found.place})"
            step.refuse(f"brings back a storage that is {found.state}{where}")
        step.working.away[instance] = Away("on its way back", step.action.place)
    return step.left()


def _reloaded(step: _Step) -> Answer:
    for _, instance in _subjects(step):
        del step.working.away[instance]
    return step.left()[0], None


def _subjects(step: _Step) -> list[tuple[Subject, int]]:
    """The saved tensors that the action moves, with the instance of the storage of each.

    Raises:
        UsageError: it moves something else, a tensor that the stage does not keep, or one storage twice.
    """
    if step.action.place is None:
        step.refuse("does not say where: write @host, @device3 or, in shares, @device3*2+device4*1")
    found: dict[int, Subject] = {}
    for subject in step.moved:
        if not isinstance(subject.what, int):
            step.refuse("moves something else: only saved tensors move, such as [5.3]")
        try:
            number = step.storages.storage(subject)
        except UsageError:
            step.refuse(f"names a tensor that stage {step.action.stage} does not keep")
        if number in found:
            step.refuse(f"moves one storage by two names, {found[number]} and {subject}")
        found[number] = subject
    return [(subject, _instance(step, number, subject)) for number, subject in found.items()]


def _instance(step: _Step, number: int, subject: Subject) -> int:
    """The instance that the named layer saved, in the first forward or in the second."""
    saver = step.holders.saved(subject.layer - step.storages.start)
    again = number + AGAIN * len(step.storages.sizes)
    return again if step.residency.held.get(again, 0) & saver else number


_STARTS: dict[Kind, _Handler] = {
    Kind.LOAD: _load,
    Kind.FORWARD: _forward,
    Kind.FORWARD_ONLY: _forward_only,
    Kind.RECOMPUTE: _recompute,
    Kind.BACKWARD: _backward,
    Kind.SEND_FORWARD: _send_forward,
    Kind.RECV_FORWARD: _receive_forward,
    Kind.SEND_BACKWARD: _send_backward,
    Kind.RECV_BACKWARD: _receive_backward,
    Kind.OFFLOAD: _offload,
    Kind.RELOAD: _reload,
}
_JOINS: dict[Kind, _Handler] = {
    Kind.SEND_FORWARD: _sent_forward,
    Kind.RECV_FORWARD: _received,
    Kind.SEND_BACKWARD: _sent_backward,
    Kind.RECV_BACKWARD: _received,
    Kind.OFFLOAD: _offloaded,
    Kind.RELOAD: _reloaded,
}
