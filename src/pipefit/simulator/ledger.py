"""The memory ledger of one device: the exact bytes that every action of a program allocates and frees.

It applies `memory.microbatch` to one action after the other. In between it keeps the residency of every
microbatch, the layers with gradients, the stages with optimizer state, and under an asynchronous schedule the
versions of weights. It raises `UsageError` for an action that uses a tensor or state that does not exist. No
clock is needed: allocations depend only on the order of the program. Cost: half a microsecond per action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple, NoReturn

from pipefit.errors import UsageError
from pipefit.memory import (
    BytesAway,
    Effect,
    Gathered,
    Gathering,
    Residency,
    StageCost,
    StageRest,
    StageStates,
    StageVersions,
    after_freeing,
    effect,
    freeing_versions,
    state_moves,
)
from pipefit.schema.actions import COLLECTIVE, COMPUTE, COPIES, FORWARDS, Action, Kind, Subject
from pipefit.schema.program import UncheckedProgram
from pipefit.texts import layers_text

# ---- Levels: bytes by category, at the peak of every action and between actions

Levels = tuple[int, int, int, int, int, int, int, int, int]  # bytes by category, in the order of CATEGORIES

Change = tuple[int, int, Effect]  # an effect, after its training step and its position in the program

Row = tuple[float, int, str, Levels]  # an action's peak: seconds, step, text, bytes

NOTHING_AWAY = BytesAway(0, 0)


def at_rest(stages: Iterable[StageRest], lent_bytes: int, away: BytesAway = NOTHING_AWAY) -> Levels:
    """Return the bytes of a device before the first step.

    Parameters and buffers and optimizer state that exists before the first update, less what is `away` of
    these; the memory in which the losses are summed; receive buffers for all microbatches, if its engine has
    them; and the arenas that the device lends.
    """
    rests = list(stages)
    parameters = sum(rest.parameter_bytes for rest in rests) - away.parameters
    early = sum(rest.early_state_bytes for rest in rests) - away.optimizer
    boundary = sum(rest.loss_bytes + rest.buffer_bytes for rest in rests)
    return parameters, 0, early, 0, 0, boundary, lent_bytes, 0, 0


def highest(rest: Levels, changes: Iterable[Change]) -> int:
    """Return the peak: the most bytes of all categories together."""
    level = top = sum(rest)
    for _, _, (peak_bytes, after_bytes, _, _) in changes:
        top = max(top, level + peak_bytes)
        level += after_bytes
    return top


def peaks(rest: Levels, changes: Iterable[Change]) -> list[Levels]:
    """Return the bytes by category at the peak of every action."""
    parameters, gradients, optimizer, activations, versions, boundary, lent, *_ = rest
    result = []
    for _, _, (_, _, peak, after) in changes:
        result.append(
            (
                parameters + peak[5],
                gradients + peak[0],
                optimizer + peak[1],
                activations + peak[2],
                versions + peak[3],
                boundary + peak[4],
                lent,
                peak[6],
                peak[7],
            )
        )
        gradients += after[0]
        optimizer += after[1]
        activations += after[2]
        versions += after[3]
        boundary += after[4]
        parameters += after[5]
    return result


# ---- Ledger

_OF_VERSIONS = FORWARDS | {Kind.RECOMPUTE, Kind.BACKWARD}  # actions that use weights
_NONE: frozenset[Kind] = frozenset()

Effects = list[tuple[int, Effect]]  # by position in the device's program, only actions with an effect


class Ledger:
    """Ledger that reads the program of one device, step after step.

    Under an asynchronous schedule it reads one program after the other.
    """

    def __init__(self, device: int, stages: Mapping[int, StageCost], program: UncheckedProgram) -> None:
        self._device, self._stages, self._program = device, stages, program
        kept = stages.items() if program.endless else ()
        self._versions = {
            number: StageVersions(stage.start, stage.rest.versions_bytes) for number, stage in kept
        }
        self._flights: dict[tuple[int, int | None], Residency] = {}
        self._born: set[int] = set()  # layers with gradients
        self._complete: set[int] = set()  # stages in which all layers have gradients
        self._stepped: set[int] = set()  # layers with optimizer state
        moves = state_moves(
            program, device, {number: (stage.start, stage.stop) for number, stage in stages.items()}
        )
        self._states = {n: StageStates(stage.rest, moves.of_stage(n)) for n, stage in stages.items()}
        self._gathered = {number: Gathered(stage.share, stage.storages) for number, stage in stages.items()}
        self._gathering = {n: Gathering(s.sharded) for n, s in stages.items() if s.sharded is not None}
        self._incomplete = self._lacking()
        self._moving = bool(moves.homes)
        self._moved_within = _moved_within(program.actions[device], program, stages)
        self.placed: list[
            Action
        ] = []  # actions of one step at which the use of memory elsewhere starts or ends

    def read(self, actions: tuple[Action, ...]) -> Effects:
        """Return the effects of one step.

        Raises:
            UsageError: an action is unsupported, or uses a tensor or state that does not exist; the message
                names both.
        """
        flights, stages, effects = self._flights, self._stages, Effects()
        complete, counted = self._complete, _OF_VERSIONS if self._versions else _NONE
        self.placed = placed = []
        for position, action in enumerate(actions):
            kind, stage, microbatch, layers, subject, place, part, wait = action
            if place is not None and wait is (kind is Kind.RELOAD):
                placed.append(action)
            flight = stage, microbatch
            residency = flights.get(flight)
            usual = (kind is not Kind.BACKWARD or stage in complete) and stage not in self._incomplete
            usual = usual and flight not in self._moved_within
            if residency is not None and usual and kind not in counted:  # its effect is cached
                answer = residency.known.get((kind, layers, subject, place, part, wait, False))
                if answer is not None:
                    flights[flight], effect = answer
                    if effect is not None:
                        effects.append((position, effect))
                    continue
            effect = self._effect(action, stages[stage])
            if effect is not None:
                effects.append((position, effect))
        over = [key for key, residency in flights.items() if stages[key[0]].flights.is_over(residency)]
        for key in over:
            del flights[key]
        if self._program.endless:
            self._next_step()
        return self._without_batch(actions, effects)

    def _without_batch(self, actions: tuple[Action, ...], effects: Effects) -> Effects:
        """Return the effects with the batch and losses of a buffered device freed before its first update."""
        nbytes = sum(stage.rest.step_bytes for stage in self._stages.values())
        for number, (position, change) in enumerate(effects):
            if nbytes and actions[position].kind is Kind.STEP:
                effects[number] = position, after_freeing(change, nbytes)
                break
        return effects

    def read_again(self, actions: tuple[Action, ...], before: Effects) -> Effects:
        """Return the effects of a step equal to the one before: updates now find the optimizer's state.

        If anything else remains of the step before, it affects this step, which is then read.
        """
        if self._flights or self._born or self._program.endless or self._moving:
            return self.read(actions)
        again = [
            (
                position,
                self._later_update(actions[position]) if actions[position].kind is Kind.STEP else effect,
            )
            for position, effect in before
        ]
        return self._without_batch(actions, again)

    def _later_update(self, action: Action) -> Effect:
        """Return the effect of an update that is not the first one."""
        stage = self._stages[action.stage]
        return stage.rest.update(*(action.layers or (stage.start, stage.stop)), first=False)

    @property
    def away(self) -> BytesAway:
        """Bytes that exist before the first step, but not on the device."""
        result = [states.away for states in self._states.values()]
        return BytesAway(sum(away.parameters for away in result), sum(away.optimizer for away in result))

    def contents(self, stage: int) -> tuple[list[Residency], frozenset[int], frozenset[int]]:
        """Return the contents of a stage after the actions read so far.

        The residency of every microbatch, the layers with gradients, and the layers with optimizer state.
        """
        layers = self._stages[stage].layers
        flights = [residency for (number, _), residency in self._flights.items() if number == stage]
        return flights, layers & self._born, layers & self._stepped

    def gathered(self, stage: int) -> frozenset[int]:
        """Return the layers of a stage whose divided parameters are gathered, or in transit."""
        return self._gathering.get(stage, self._gathered[stage]).layers

    @property
    def state(self) -> object:
        """State of the ledger; equal states of an asynchronous schedule have equal later effects."""
        versions = tuple(versions.state for versions in self._versions.values())
        states = tuple(states.state for states in self._states.values())
        return (
            frozenset(self._flights.items()),
            frozenset(self._born),
            frozenset(self._stepped),
            versions,
            states,
        )

    def _next_step(self) -> None:
        """Count microbatches from the first one of the next step."""
        count = self._program.microbatches
        self._flights = {
            (stage, (m or 0) - count): residency for (stage, m), residency in self._flights.items()
        }
        for versions in self._versions.values():
            versions.shift(count)

    def _lacking(self) -> set[int]:
        """Return the stages that lack state which a forward or a backward may need."""
        away = {n for n, states in self._states.items() if not states.complete or self._gathered[n]}
        return away.union(self._gathering)

    def _effect(self, action: Action, stage: StageCost) -> Effect | None:
        """Return the effect of an action."""
        if action.kind is Kind.STEP or action.moves_state:
            result = self._of_state(action, stage)
            self._incomplete = self._lacking()
            return result
        if action.kind is Kind.STASH:
            return self._stash(action, stage)
        if action.kind in (Kind.UNSHARD, Kind.RESHARD):
            return self._gather(action, stage)
        if action.kind in COLLECTIVE:
            return self._collect(action, stage)
        return self._of_microbatch(action, stage)

    def _of_microbatch(self, action: Action, stage: StageCost) -> Effect | None:
        """Return the effect of an action on a microbatch."""
        last, earlier = (
            self._program.microbatches - 1,
            action.microbatch is not None and action.microbatch < 0,
        )
        if action.microbatch is None or action.microbatch > last or (earlier and not self._program.endless):
            self._refuse(f"{action} needs a microbatch number from 0 to {last}")
        key = action.stage, action.microbatch
        residency = self._flights.get(key) or stage.flights.begin(action.microbatch)
        try:
            if action.stage in self._incomplete and action.kind in COMPUTE:
                versions, layers = (
                    self._versions.get(action.stage),
                    action.layers or (stage.start, stage.stop),
                )
                newest = versions is None or versions.goes_through_newest(action.microbatch)
                self._states[action.stage].conditions.check_here(action, layers, newest=newest)
                self._gathered[action.stage].check(action, range(*layers))
            moved: tuple[Subject, ...] = self._program.moved(action) if action.kind in COPIES else ()
            if moved and stage.storages.buffered:
                return None  # the passes have the effects of moves within them
            if action.kind is Kind.FORWARD:
                moved = self._moved_within.get(key, ())
            if moved and moved[0].what == "versions":
                return self._move_versions(action, stage, moved)
            is_first = action.kind is Kind.BACKWARD and self._bears_gradients(action, stage)
            gathering = self._gathering.get(action.stage) if action.kind in _OF_VERSIONS else None
            gathers = () if gathering is None else gathering.passing(action)
            self._flights[key], effect = stage.flights.apply(
                residency, action, moved, is_first=is_first, gathers=gathers
            )
        except UsageError as error:
            self._refuse(str(error))
        if self._versions and action.kind in _OF_VERSIONS:
            self._check_weights(action, action.microbatch, stage)
        if action.kind is Kind.BACKWARD:
            self._born.update(range(*(action.layers or (stage.start, stage.stop))))
            if self._born >= stage.layers:
                self._complete.add(action.stage)
        return self._with_versions(action, stage, effect) if self._versions else effect

    def _with_versions(self, action: Action, stage: StageCost, found: Effect | None) -> Effect | None:
        """Return the effect of an action, with the weights that it frees at the end of a backward."""
        first = stage.start if action.layers is None else action.layers[0]
        if action.microbatch is None:
            return found
        try:
            if action.kind in FORWARDS and first == stage.start:
                self._versions[action.stage].forward(action.microbatch)
            elif action.kind is Kind.BACKWARD and found is not None:
                freed = self._versions[action.stage].backward(action.microbatch, first)
                return freeing_versions(found, freed) if freed else found
        except UsageError as error:
            self._refuse(f"{action} {error}")
        return found

    def _check_weights(self, action: Action, microbatch: int, stage: StageCost) -> None:
        """Check that the weights of a pass are on the device.

        Raises:
            UsageError: they are away.
        """
        try:
            layers = range(*(action.layers or (stage.start, stage.stop)))
            self._versions[action.stage].check_present(microbatch, layers)
        except UsageError as error:
            self._refuse(f"{action} {error}")

    def _move_versions(self, action: Action, stage: StageCost, moved: tuple[Subject, ...]) -> Effect | None:
        """Return the effect of moving weights of a microbatch in flight off the device, or back.

        Raises:
            UsageError: the weights cannot move; the message names the action.
        """
        versions, microbatch, place = self._versions.get(action.stage), action.microbatch, action.place
        if versions is None or microbatch is None or place is None:
            raise UsageError(f"{action} lacks a place, or offloads weight versions in a program without them")
        layers, nbytes = [subject.layer for subject in moved], sum(map(stage.storages.nbytes, moved))
        try:
            match action.kind, action.wait:
                case Kind.OFFLOAD, False:
                    versions.leave(microbatch, layers, place)
                case Kind.OFFLOAD, True:
                    versions.left(microbatch, layers)
                    return effect(versions=-nbytes)
                case Kind.RELOAD, False:
                    versions.come_back(microbatch, layers, place)
                    return effect(versions=nbytes)
                case _:
                    versions.are_back(microbatch, layers)
        except UsageError as error:
            raise UsageError(f"{action} {error}") from error
        return None

    def _stash(self, action: Action, stage: StageCost) -> Effect | None:
        """Return the effect of a copy of the weights, or of forwards that start to use it."""
        versions = self._versions.get(action.stage)
        if versions is None:
            self._refuse(f"{action} keeps weights for later steps, but this program ends with its step")
        self._check_here(action, action.layers or (stage.start, stage.stop))
        try:
            return effect(versions=-versions.adopt() if action.wait else versions.stash(action.layers))
        except UsageError as error:
            self._refuse(f"{action} {error}")

    def _check_here(self, action: Action, layers: tuple[int, int]) -> None:
        """Check that the state which an action needs of its stage is on the device.

        Raises:
            UsageError: it is away.
        """
        try:
            self._states[action.stage].conditions.check_here(action, layers)
        except UsageError as error:
            self._refuse(str(error))

    def _is_later(self, action: Action, stage: StageCost) -> bool:
        """Return whether all layers of this backward have gradients already."""
        layers = action.layers
        return self._born >= stage.layers if layers is None else self._born.issuperset(range(*layers))

    def _bears_gradients(self, action: Action, stage: StageCost) -> bool | frozenset[int]:
        """Return whether this backward is the step's first for its layers.

        If only owners keep gradients and some layers have them, the layers for which it is the first.
        """
        if self._is_later(action, stage):
            return False
        layers = range(*(action.layers or (stage.start, stage.stop)))
        if not self._born.isdisjoint(layers):
            if stage.divides_gradients:
                return frozenset(layers) - self._born
            self._refuse(
                f"{action} is the first backward of the step only for some of its layers: split all "
                "backwards at the same layers"
            )
        return True

    def _collect(self, action: Action, stage: StageCost) -> Effect | None:
        """Return the effect of a collective; the wait for a reduce-scatter frees other owners' gradients."""
        layers = range(*(action.layers or (stage.start, stage.stop)))
        summed = layers if action.kind is Kind.REDUCE else [n for n in layers if stage.keeps_gradients(n)]
        if not action.wait and not self._born.issuperset(summed):
            self._refuse(f"{action} lacks gradients: the backward of every layer must come before it")
        try:
            for number, states in self._states.items():
                states.conditions.check_here(action, (self._stages[number].start, self._stages[number].stop))
        except UsageError as error:
            self._refuse(str(error))
        if action.stage in self._gathering and action.kind is Kind.REDUCE and action.subject is None:
            return None if action.wait else self._gathering[action.stage].reduce()
        if not (action.wait and action.kind is Kind.REDUCE and stage.divides_gradients):
            return None
        others = [layer for layer in layers if not stage.keeps_gradients(layer)]
        self._born.difference_update(others)
        self._complete.discard(action.stage)
        return effect(gradients=-sum(stage.rest.whole_bytes_of("gradients", n, n + 1) for n in others))

    def _gather(self, action: Action, stage: StageCost) -> Effect | None:
        """Return the effect of an all-gather of parameters, or of freeing those of other owners."""
        if action.stage in self._gathering:  # of a microbatch: its pass allocates them, layer by layer
            return None if action.microbatch is not None else self._gathering[action.stage].at_once(action)
        try:
            first, end = action.layers or (stage.start, stage.stop)
            self._states[action.stage].conditions.check_here(action, (first, end))
            changed = self._gathered[action.stage].carry_out(action, range(first, end))
        except UsageError as error:
            self._refuse(str(error))
        nbytes = sum(map(stage.rest.unsharded_bytes, changed))
        sign = -1 if action.kind is Kind.RESHARD else 1
        return effect(parameters=sign * nbytes) if nbytes else None

    def _of_state(self, action: Action, stage: StageCost) -> Effect | None:
        """Return the effect of an update, or of a copy of state."""
        try:
            if action.kind is Kind.STEP:
                return self._update(action, stage)
            return self._states[action.stage].move(action, born=self._born, stepped=self._stepped)
        except UsageError as error:
            self._refuse(str(error))

    def _update(self, action: Action, stage: StageCost) -> Effect | None:
        """Return the effect of an update of a stage or of a run of its layers, here or at another place.

        Raises:
            UsageError: the schedule does not have this update, or its gradients or state do not exist.
        """
        if action.microbatch is not None and not self._program.endless:
            raise UsageError(
                f"{action} has a number, but this program updates once, at its end: write it without a number"
            )
        start, stop = layers = action.layers or (stage.start, stage.stop)
        if not stage.start <= start < stop <= stage.stop:
            raise UsageError(
                f"{action} is outside its stage, which holds {layers_text(stage.start, stage.stop)}"
            )
        if action.stage in self._versions:
            try:
                self._versions[action.stage].check_update(start, stop)
            except UsageError as error:
                raise UsageError(f"{action} {error}: a STASH must come before it") from error
        if action.place is not None:
            self._update_elsewhere(action, layers, stage)
            return None
        self._states[action.stage].conditions.update(action, layers)
        self._use_gradients(action, layers, stage)
        return stage.rest.update(start, stop, first=self._is_first_update(action, layers))

    def _update_elsewhere(self, action: Action, layers: tuple[int, int], stage: StageCost) -> None:
        """Start or end an update at another place, which changes no bytes here."""
        self._states[action.stage].conditions.update_elsewhere(action, layers)
        if not action.wait:
            self._use_gradients(action, layers, stage)

    def _use_gradients(self, action: Action, layers: tuple[int, int], stage: StageCost) -> None:
        """Consume the gradients of these layers in an update."""
        if not self._born.issuperset(n for n in range(*layers) if stage.keeps_gradients(n)):
            raise UsageError(f"{action} lacks gradients: the backward of every layer must come before it")
        self._born.difference_update(range(*layers))
        self._complete.discard(action.stage)

    def _is_first_update(self, action: Action, layers: tuple[int, int]) -> bool:
        """Return whether this update creates the optimizer state of these layers."""
        before = self._stepped.intersection(range(*layers))
        if 0 < len(before) < layers[1] - layers[0]:
            raise UsageError(
                f"{action} is the first update only for some of its layers: split all updates at the same "
                "layers"
            )
        self._stepped.update(range(*layers))
        return not before

    def _refuse(self, reason: str) -> NoReturn:
        raise UsageError(f"device {self._device}: {reason}")


def _moved_within(
    actions: Iterable[Action], program: UncheckedProgram, stages: Mapping[int, StageCost]
) -> dict[tuple[int, int | None], tuple[Subject, ...]]:
    """Return the saved tensors that buffered stages move in a pass, by stage and microbatch."""
    result = dict[tuple[int, int | None], tuple[Subject, ...]]()
    for action in actions:
        if action.kind is Kind.OFFLOAD and not action.wait and stages[action.stage].storages.buffered:
            key = action.stage, action.microbatch
            result[key] = result.get(key, ()) + program.moved(action)
    return result


def _begun(actions: Sequence[Action], effects: Effects, nbytes: int) -> Effects:
    """Return a step's effects with `nbytes` for a moment, after it has loaded its data."""
    loads = sum(1 for _ in takewhile(lambda action: action.kind is Kind.LOAD, actions))
    before = [one for one in effects if one[0] < loads]
    return [*before, (max(loads - 1, 0), effect(peak_bytes=nbytes)), *effects[len(before) :]]


# ---- Readings


class LedgerReading(NamedTuple):
    """Result of a device's ledger for the first steps of its program.

    The effects of the distinct steps, the last step's actions that name a place, and state away before the
    first step.
    """

    effects: list[Effects]
    placed: list[Action]
    away: BytesAway


def reading(
    device: int,
    stages: Mapping[int, StageCost],
    programs: Sequence[UncheckedProgram],
    *,
    steps: int,
    distinct: int,
    beginning: int = 0,
) -> LedgerReading:
    """Return the reading of a device with these stages for `steps` steps; at most `distinct` of them differ.

    The last of the programs repeats. The first step has `beginning` more bytes until its data is loaded.

    Raises:
        UsageError: an action uses a tensor or state that does not exist at that time.
    """
    endless = programs[-1].endless
    ledger = Ledger(device, stages, programs[-1])
    result, away = list[Effects](), ledger.away
    before: object = None
    for step in range(min(steps, distinct)):
        before = ledger.state if endless else None
        actions = programs[min(step, len(programs) - 1)].actions[device]
        result.append(ledger.read_again(actions, result[-1]) if result else ledger.read(actions))
    settled = not endless or steps < distinct
    assert settled or before == ledger.state, "the last differing step leaves the state unchanged"
    if beginning and stages:
        result[0] = _begun(programs[0].actions[device], result[0], beginning)
    return LedgerReading(result, ledger.placed, away)
