"""The location of a stage's state: the offloaded parts, and the bytes this frees.

State belongs to no microbatch. One OFFLOAD or RELOAD moves a state of one or several layers, which has a
home: memory at the target place, reserved for the whole run. The state is in one of these conditions:

    on the device        as without offloading
    on its way out       from an OFFLOAD to its join, which frees the device's memory
    away                 optimizer state and parameters begin so: before the first step, their homes have
    received what
                         exists by then
    on its way back      from a RELOAD, which allocates, to its join
    being updated        parameters, and gradients that are away, from the STEP at a place to its join
    out of date          parameters that have been updated at a place, until they are reloaded

Parameters that are updated at a place keep their memory on the device. Their optimizer state is never on the
device, and their gradients are freed at the place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.memory.model_state import StageRest
from pipefit.memory.storages import Effect, Whereabouts, effect
from pipefit.schema.actions import COPIES, STATES, Action, Bundle, Kind, Subject
from pipefit.schema.devices import Place
from pipefit.schema.program import UncheckedProgram
from pipefit.texts import layers_text

# ---- Weight versions: the weights of a stage that are in memory while it is updated with microbatches in
# flight.
#
# A microbatch goes backward through the weights of its own forward, although updates have happened since. So
# a stage may hold several versions of its weights:
#
#     newest      updated by the optimizer, in place
#     current     used by forwards: the newest, except between a STASH and its join
#     in flight   used by the forward of a microbatch in flight
#
# A STASH copies the newest weights, of all layers or run by run, and the copy becomes the newest. In a
# version that is neither newest nor current, a layer is freed after the last microbatch that uses it has gone
# backward through it. Layers of any version but the newest may be offloaded and reloaded, each by the name of
# a microbatch in flight that uses them. (PipeDream, SOSP 2019, section 3.3; two versions with gradients of
# many microbatches: PipeDream-2BW, ICML 2021.)


class _Absent(NamedTuple):
    """A moved layer of one weight version: the microbatch that names it, its state, and the place."""

    microbatch: int
    state: Whereabouts
    place: Place | None


class _VersionNeed(NamedTuple):
    """The need of a microbatch in flight: the layers of a version up to `end`.

    It has gone backward through the others.
    """

    version: int
    end: int


class StageVersions:
    """The weight versions of one stage, numbered from 0.

    `nbytes` has one version's bytes of every layer from `start` on.
    """

    def __init__(self, start: int, nbytes: Sequence[int]) -> None:
        self._start, self._stop = start, start + len(nbytes)
        self._sums = (0, *accumulate(nbytes))
        self._newest = self._current = 0
        self._copied = frozenset(range(start, self._stop))  # layers whose newest version is a separate copy
        self._held = {0: self._stop}  # by version in memory, the end of its layers
        self._used: dict[int, _VersionNeed] = {}  # by microbatch in flight
        self._absent: dict[tuple[int, int], _Absent] = {}  # by version and layer

    @property
    def count(self) -> int:
        """The number of versions that are in memory at least in part."""
        return len(self._held)

    @property
    def state(self) -> object:
        """A key that is equal at two moments with equal futures: versions are counted back from the
        newest.
        """
        held = frozenset((self._newest - version, end) for version, end in self._held.items())
        used = frozenset((m, self._newest - version, end) for m, (version, end) in self._used.items())
        absent = (
            (self._newest - version, layer, *absent) for (version, layer), absent in self._absent.items()
        )
        return held, self._newest - self._current, used, frozenset(absent)

    def goes_through_newest(self, microbatch: int) -> bool:
        """Return whether a microbatch has used, or would use now, the weights that updates change."""
        use = self._used.get(microbatch)
        return (self._current if use is None else use.version) == self._newest

    def forward(self, microbatch: int) -> None:
        """Start the forward of a microbatch with the current weights."""
        self._used[microbatch] = _VersionNeed(self._current, self._stop)

    def backward(self, microbatch: int, first: int | None = None) -> int:
        """End the backward of a microbatch through all layers from `first` on.

        Returns the bytes that this frees.
        """
        version = self._used[microbatch].version
        if first is None or first == self._start:
            del self._used[microbatch]
        else:
            self._used[microbatch] = _VersionNeed(version, first)
        return self._free(version)

    def stash(self, layers: tuple[int, int] | None = None) -> int:
        """Copy the newest weights, all or those of a run of layers; return the bytes of the copy.

        Raises:
            UsageError: they have been copied already, and forwards do not use the copy yet.
        """
        first, end = layers or (self._start, self._stop)
        if self._newest == self._current:
            self._newest, self._copied = self._newest + 1, frozenset()
            self._held[self._newest] = self._stop
        if not self._copied.isdisjoint(range(first, end)):
            raise UsageError("copies weights a second time: the WAIT of the first copy must come before it")
        self._copied |= frozenset(range(first, end))
        return self._bytes(first, end)

    def adopt(self) -> int:
        """Make forwards use the newest weights; return the bytes that this frees."""
        self._check_copied()
        before, self._current = self._current, self._newest
        return self._free(before)

    def check_update(self, first: int, end: int) -> None:
        """Check that the weights of these layers, which an update will change, are not needed any more.

        Raises:
            UsageError: forwards or a microbatch in flight still need them.
        """
        if not self._copied.issuperset(range(first, end)):
            raise UsageError("would change weights that forwards still use")
        for microbatch, use in self._used.items():
            if use.version == self._newest:
                raise UsageError(f"would change weights that microbatch {microbatch} needs for its backward")

    def _check_copied(self) -> None:
        """Check that all layers of the newest version have been copied.

        Coming forwards use all of them.

        Raises:
            UsageError: some have not.
        """
        if len(self._copied) < self._stop - self._start:
            missing = min(frozenset(range(self._start, self._stop)) - self._copied)
            raise UsageError(
                f"comes before the STASH of layer {missing}: copy the weights of all layers first"
            )

    def _free(self, version: int) -> int:
        """Free the unused layers of a version that is neither newest nor current; return their bytes."""
        if version in (self._newest, self._current):
            return 0
        before = self._held.pop(version)
        end = max((use.end for use in self._used.values() if use.version == version), default=self._start)
        if end > self._start:
            self._held[version] = end
        return self._bytes(end, before)

    def _bytes(self, first: int, end: int) -> int:
        return self._sums[end - self._start] - self._sums[first - self._start]

    def shift(self, microbatches: int) -> None:
        """Renumber microbatches from the one that comes `microbatches` later."""
        self._used = {microbatch - microbatches: use for microbatch, use in self._used.items()}
        for key, absent in self._absent.items():
            self._absent[key] = absent._replace(microbatch=absent.microbatch - microbatches)

    # ---- Offloading

    def leave(self, microbatch: int, layers: Iterable[int], place: Place | None) -> None:
        """Start offloading weights that a microbatch's forward used; nothing is freed yet.

        Raises:
            UsageError: they are in use, away already, or those of no microbatch in flight.
        """
        version = self._version(microbatch)
        for layer in layers:
            if version == self._newest or (version == self._current and layer not in self._copied):
                raise UsageError("offloads weights that updates would change: a STASH must come before it")
            if layer >= self._used[microbatch].end:
                raise UsageError(f"offloads weights of layer {layer}, whose backward has already run")
            if known := self._absent.get((version, layer)):
                raise UsageError(f"offloads a version of layer {layer} that is {known.state} already")
            self._absent[version, layer] = _Absent(microbatch, Whereabouts.LEAVING, place)

    def left(self, microbatch: int, layers: Iterable[int]) -> None:
        """Join an offload: the weights on the device are freed."""
        for layer in layers:
            key = self._version(microbatch), layer
            self._absent[key] = self._absent[key]._replace(state=Whereabouts.AWAY)

    def come_back(self, microbatch: int, layers: Iterable[int], place: Place | None) -> None:
        """Start reloading the weights, into memory that is allocated now.

        Raises:
            UsageError: they are not away at that place, or were offloaded by the name of another microbatch.
        """
        for layer in layers:
            key = self._version(microbatch), layer
            result = self._absent.get(key)
            if result != _Absent(microbatch, Whereabouts.AWAY, place):
                state = Whereabouts.HERE if result is None else f"{result.state} (@{result.place})"
                raise UsageError(f"reloads a version of layer {layer} that is {state}")
            self._absent[key] = _Absent(microbatch, Whereabouts.RETURNING, place)

    def are_back(self, microbatch: int, layers: Iterable[int]) -> None:
        """Join a reload."""
        for layer in layers:
            del self._absent[self._version(microbatch), layer]

    def check_present(self, microbatch: int, layers: Iterable[int]) -> None:
        """Check that the weights for a pass of a microbatch are on the device.

        Raises:
            UsageError: some are not.
        """
        use = self._used.get(microbatch)
        for layer in layers if self._absent else ():
            if absent := self._absent.get((self._current if use is None else use.version, layer)):
                raise UsageError(
                    f"needs a version of layer {layer} that is {absent.state} (@{absent.place}): RELOAD it "
                    "and wait for the reload first"
                )

    def _version(self, microbatch: int) -> int:
        if microbatch not in self._used:
            raise UsageError(f"refers to weights of microbatch {microbatch}, which is not in flight")
        return self._used[microbatch].version


Layers = tuple[int, int]  # half-open


class Condition(StrEnum):
    """The condition of a state, as errors name it."""

    HERE = "on the device"
    LEAVING = "on its way out"
    AWAY = "away"
    RETURNING = "on its way back"
    UPDATING = "being updated"
    STALE = "out of date"


class BytesAway(NamedTuple):
    """Bytes that are not on the device before the first step."""

    parameters: int
    optimizer: int


class Home(NamedTuple):
    """The memory at `place` for the state `subject` of a stage."""

    stage: int
    subject: Subject | Bundle
    place: Place


class HomeState(NamedTuple):
    """The contents of a home: a state of `layers`, by its name in actions."""

    kind: str
    layers: Layers

    def __str__(self) -> str:
        start, stop = self.layers
        what = "optimizer state" if self.kind == "optimizer" else self.kind
        return f"the {what} of {layers_text(start, stop)}"


@dataclass(frozen=True, slots=True)
class StateMoves:
    """The state moves of a device's program: the contents of every home, and the places of updates by
    layers.
    """

    homes: Mapping[Home, HomeState] = field(default_factory=dict)
    updates: Mapping[tuple[int, Layers], Place] = field(default_factory=dict)  # by stage and layers
    layers_elsewhere: frozenset[int] = field(init=False)  # layers that are updated at another place

    def __post_init__(self) -> None:
        elsewhere = frozenset(layer for _, layers in self.updates for layer in range(*layers))
        object.__setattr__(self, "layers_elsewhere", elsewhere)

    def of_stage(self, stage: int) -> StateMoves:
        """Return the moves of one stage."""
        return StateMoves(
            {home: kept for home, kept in self.homes.items() if home.stage == stage},
            {key: place for key, place in self.updates.items() if key[0] == stage},
        )

    def begins_away(self, kept: HomeState) -> bool:
        """Return whether a state is away before the first step."""
        moves = kept.kind == "parameters" and not self.updated_elsewhere(kept.layers)
        return moves or kept.kind == "optimizer"

    def updated_elsewhere(self, layers: Layers) -> bool:
        """Return whether some of these layers are updated at another place."""
        return not self.layers_elsewhere.isdisjoint(range(*layers))


def state_moves(program: UncheckedProgram, device: int, stages: Mapping[int, Layers]) -> StateMoves:
    """Return the state moves of `program` on a device with these `stages`, each with its layers.

    Raises:
        UsageError: an action moves several states at once, layers that are not consecutive or not in its
            stage, or a state
        that another action moves too.
    """
    homes, updates = dict[Home, HomeState](), dict[tuple[int, Layers], Place]()
    owners = dict[tuple[str, int], Home]()
    for action in program.actions[device]:
        if action.moves_state:
            home = home_of(action)
            kept = homes[home] = homes.get(home) or _kept(action, program.moved(action), stages[action.stage])
            for layer in range(*kept.layers):
                if owners.setdefault((kept.kind, layer), home) != home:
                    raise UsageError(
                        f"{action} offloads {layer}.{kept.kind}, which another action offloads too"
                    )
        elif action.kind is Kind.STEP and action.place is not None:
            updates[action.stage, action.layers or stages[action.stage]] = action.place
    return StateMoves(homes, updates)


def home_of(action: Action) -> Home:
    """Return the home of the state that an OFFLOAD or RELOAD moves.

    Raises:
        UsageError: the action names no place.
    """
    if action.place is None:
        raise UsageError(f"{action} lacks a place: write @host, or @device3 for a peer")
    assert action.subject is not None, "programs refuse copies of nothing"
    return Home(action.stage, action.subject, action.place)


def _kept(action: Action, subjects: Iterable[Subject], stage: Layers) -> HomeState:
    """Return the content that an action moves: one state of consecutive layers."""
    layers, kinds = [subject.layer for subject in subjects], {str(subject.what) for subject in subjects}
    start, stop = layers[0], layers[-1] + 1
    if len(kinds) > 1 or not kinds <= {*STATES} or layers != list(range(start, stop)):
        raise UsageError(
            f"{action} offloads state that does not belong to a microbatch: name one of {', '.join(STATES)} "
            "of consecutive layers, such as [5.optimizer]"
        )
    if not stage[0] <= start < stop <= stage[1]:
        raise UsageError(f"{action} is outside its stage, which holds {layers_text(*stage)}")
    if kinds == {"versions"}:
        raise UsageError(f"{action} offloads weight versions, which is not supported yet")
    return HomeState(kinds.pop(), (start, stop))


class StateConditions:
    """The conditions of all states of one stage at a point of its program; ledger and runtime both use it."""

    def __init__(self, moves: StateMoves) -> None:
        self._moves = moves
        self._needs: dict[tuple[Kind, Layers], tuple[tuple[Home, ...], frozenset[Home]]] = {}
        self._by_layer: dict[int, list[Home]] = {}
        self._by_content: dict[tuple[HomeState, Place], Home] = {}
        for home, kept in moves.homes.items():
            self._by_content.setdefault((kept, home.place), home)
            for layer in range(*kept.layers):
                self._by_layer.setdefault(layer, []).append(home)
        self._places = {home: number for number, home in enumerate(moves.homes)}
        self._elsewhere = set[Home]()  # homes whose state is not on the device, or not up to date
        self._missing = set[Home]()  # those of them that passes need
        self._of: dict[Home, Condition] = {}
        self.reset()

    def reset(self) -> None:
        """Restore the conditions between steps."""
        for home, kept in self._moves.homes.items():
            self.put(home, Condition.AWAY if self._moves.begins_away(kept) else Condition.HERE)

    @property
    def of(self) -> Mapping[Home, Condition]:
        """The condition of each home's state."""
        return self._of

    def put(self, home: Home, condition: Condition) -> None:
        """Set the condition of a home's state."""
        self._of[home] = condition
        if condition is Condition.HERE:
            self._elsewhere.discard(home)
            self._missing.discard(home)
            return
        self._elsewhere.add(home)
        if self._moves.homes[home].kind != "optimizer":
            self._missing.add(home)

    @property
    def complete(self) -> bool:
        """True if all states that a forward or a backward may need are on the device, and up to date."""
        return not self._missing

    def behind(self, action: Action) -> Condition:
        """Return the condition of a state after an OFFLOAD, a RELOAD or the join of one.

        Raises:
            UsageError: the state is elsewhere than the action needs it, or the program does not move it.
        """
        home = home_of(action)
        if home not in self._of:
            raise UsageError(
                f"{action} offloads state for which this run has not reserved memory: lower the plan again"
            )
        condition, (needed, after) = self._of[home], _COPIES[action.kind, action.wait]
        if condition is not needed and not (condition is Condition.STALE and needed is Condition.AWAY):
            raise UsageError(f"{action} copies {self._moves.homes[home]}, which is {condition}")
        return after

    def check_here(self, action: Action, layers: Layers, *, newest: bool = True) -> None:
        """Check that the states for an action of these layers are on the device and up to date.

        Parameters are checked only if the action uses the `newest` weights.

        Raises:
            UsageError: a state is not; says what must come before the action.
        """
        if action.kind is Kind.STASH and action.wait:
            return
        key = action.kind, layers
        if key not in self._needs:
            needed = tuple(self._needed(*key))
            self._needs[key] = needed, frozenset(needed)
        in_order, needs = self._needs[key]
        if self._elsewhere.isdisjoint(needs):
            return
        for home in in_order:
            if newest or self._moves.homes[home].kind != "parameters":
                self._check(action, home)

    def _needed(self, kind: Kind, layers: Layers) -> Iterator[Home]:
        """Yield the homes of the states that an action of this kind and of these layers needs."""
        kinds = _NEEDS.get(kind, ())
        result = {home for layer in range(*layers) for home in self._by_layer.get(layer, ())}
        for home in sorted(result, key=self._places.__getitem__):
            if self._moves.homes[home].kind in kinds:
                yield home

    def _check(self, action: Action, home: Home) -> None:
        """Refuse an action unless its state of a home is on the device and up to date."""
        if (condition := self._of[home]) is not Condition.HERE:
            reload = Action(Kind.RELOAD, home.stage, subject=home.subject, place=home.place)
            raise UsageError(
                f"{action} needs {self._moves.homes[home]}, which is {condition} (@{home.place}): "
                f"{reload.join} must "
                "come before it"
            )

    def update(self, action: Action, layers: Layers) -> None:
        """Check an update of these layers on the device.

        Raises:
            UsageError: a needed state is not there, or another place updates some of them.
        """
        if self._moves.updated_elsewhere(layers):
            raise UsageError(
                f"{action} updates layers that are also updated at another place in this program"
            )
        self.check_here(action, layers)

    def update_elsewhere(self, action: Action, layers: Layers) -> None:
        """Start or join an update of these layers at another place.

        Raises:
            UsageError: their gradients are not there, or their parameters are not on the device.
        """
        gradients, parameters = (self._home(action, layers, kind) for kind in ("gradients", "parameters"))
        if action.wait:
            self.put(gradients, Condition.HERE)
            self.put(parameters, Condition.STALE)
            return
        if self._of[gradients] is not Condition.AWAY:
            offload = Action(Kind.OFFLOAD, action.stage, subject=gradients.subject, place=gradients.place)
            raise UsageError(f"{action} needs missing gradients: {offload.join} must come before it")
        self._check(action, parameters)
        self.put(gradients, Condition.UPDATING)
        self.put(parameters, Condition.UPDATING)

    def _home(self, action: Action, layers: Layers, kind: str) -> Home:
        """Return the home of a state of exactly these layers, at the place of their update."""
        home = None if action.place is None else self._by_content.get((HomeState(kind, layers), action.place))
        if home is not None:
            return home
        needed = "OFFLOAD of their gradients" if kind == "gradients" else "RELOAD of their parameters"
        raise UsageError(
            f"{action} needs an {needed} with {action.place}, of exactly these layers, in its program"
        )


_COPIES = {  # by kind and whether it is a WAIT: the condition before and after a copy
    (Kind.OFFLOAD, False): (Condition.HERE, Condition.LEAVING),
    (Kind.OFFLOAD, True): (Condition.LEAVING, Condition.AWAY),
    (Kind.RELOAD, False): (Condition.AWAY, Condition.RETURNING),
    (Kind.RELOAD, True): (Condition.RETURNING, Condition.HERE),
}
assert {kind for kind, _ in _COPIES} == COPIES
_NEEDS = {  # by kind of action, the states that must be on the device
    **dict.fromkeys(
        (Kind.FORWARD, Kind.FORWARD_ONLY, Kind.RECOMPUTE, Kind.STASH, Kind.UNSHARD), ("parameters",)
    ),
    Kind.BACKWARD: ("parameters", "gradients"),
    **dict.fromkeys((Kind.REDUCE, Kind.AGREE), ("gradients",)),
    Kind.STEP: ("parameters", "gradients", "optimizer"),
}


class StageStates:
    """The state moves of one stage at a point of its program, with the bytes that they allocate and free."""

    def __init__(self, rest: StageRest, moves: StateMoves) -> None:
        self._rest, self._moves, self.conditions = rest, moves, StateConditions(moves)

    @property
    def complete(self) -> bool:
        """True if all states that a forward or a backward may need are on the device."""
        return self.conditions.complete

    @property
    def state(self) -> object:
        """A key that is equal at two moments with equal conditions."""
        return tuple(self.conditions.of.values())

    @property
    def away(self) -> BytesAway:
        """The bytes that exist before the first step and are not on the device."""
        kept = [kept for kept in self._moves.homes.values() if self._moves.begins_away(kept)]
        early = [home_state.layers for home_state in kept if home_state.kind == "optimizer"]
        early += [layers for _, layers in self._moves.updates]
        return BytesAway(
            sum(self._bytes(one, set()) for one in kept if one.kind == "parameters"),
            sum(self._rest.bytes_of("early optimizer", *layers) for layers in early),
        )

    def move(self, action: Action, *, born: set[int], stepped: set[int]) -> Effect | None:
        """Return the effect of an OFFLOAD, a RELOAD or the join of one.

        `born` layers have gradients, `stepped` layers have optimizer state.

        Raises:
            UsageError: the state is elsewhere, or does not exist.
        """
        home = home_of(action)
        kept = self._moves.homes[home]
        own = (n for n in range(*kept.layers) if self._rest.share is None or self._rest.share.owns(n))
        if kept.kind == "gradients" and not action.wait and not born.issuperset(own):
            raise UsageError(f"{action} lacks gradients: the backward of every layer must come before it")
        self.conditions.put(home, self.conditions.behind(action))
        if action.wait != (action.kind is Kind.OFFLOAD):
            return None
        nbytes = self._bytes(kept, stepped) * (1 if action.kind is Kind.RELOAD else -1)
        if kept.kind == "parameters":  # parameters that are updated elsewhere keep their memory
            return None if self._moves.updated_elsewhere(kept.layers) else effect(parameters=nbytes)
        return effect(gradients=nbytes) if kept.kind == "gradients" else effect(optimizer=nbytes)

    def _bytes(self, kept: HomeState, stepped: set[int]) -> int:
        """Return the bytes of a state now."""
        if kept.kind != "optimizer":
            return sum(self._rest.state_bytes_of(Subject(layer, kept.kind)) for layer in range(*kept.layers))
        return sum(
            self._rest.bytes_of("optimizer" if layer in stepped else "early optimizer", layer, layer + 1)
            for layer in range(*kept.layers)
        )


def unchanged(program: UncheckedProgram, actions: Sequence[Action]) -> frozenset[int]:
    """Return the positions of OFFLOADs that copy nothing, because their parameters are unchanged.

    Parameters are unchanged if no update has come since their last OFFLOAD or the start. The joins of these
    OFFLOADs free the device's memory nevertheless.
    """
    updated, all_updated = dict[tuple[int, int], int](), dict[int, int]()  # positions of last updates
    left = dict[Home, int]()  # position of the last OFFLOAD
    result = set[int]()
    for position, action in enumerate(actions):
        if action.kind is Kind.STEP and action.place is None and action.layers is None:
            all_updated[action.stage] = position
        elif action.kind is Kind.STEP and action.place is None:
            updated.update(
                dict.fromkeys(((action.stage, layer) for layer in range(*action.layers or ())), position)
            )
        elif action.kind is Kind.OFFLOAD and action.moves_state and not action.wait:
            subjects, home = program.moved(action), home_of(action)
            changed = (updated.get((action.stage, subject.layer), -1) for subject in subjects)
            last = max(all_updated.get(action.stage, -1), *changed)
            if subjects[0].what == "parameters" and last <= left.get(home, -1):
                result.add(position)
            left[home] = position
    return frozenset(result)
