"""Weight versions: the weights of a stage that are in memory while it is updated with microbatches in flight.

A microbatch goes backward through the weights of its own forward, although updates have happened since. So a
stage may hold several versions of its weights:

    newest      updated by the optimizer, in place
    current     used by forwards: the newest, except between a STASH and its join
    in flight   used by the forward of a microbatch in flight

A STASH copies the newest weights, of all layers or run by run, and the copy becomes the newest. In a version
that is neither newest nor current, a layer is freed after the last microbatch that uses it has gone backward
through it. Layers of any version but the newest may be offloaded and reloaded, each by the name of a
microbatch in flight that uses them. (PipeDream, SOSP 2019, section 3.3; two versions with gradients of many
microbatches: PipeDream-2BW, ICML 2021.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.memory.storages import Whereabouts
from pipefit.schema.devices import Place


class _Absent(NamedTuple):
    """A moved layer of one weight version: the microbatch that names it, its state, and the place."""

    microbatch: int
    state: Whereabouts
    place: Place | None


class _Use(NamedTuple):
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
        self._used: dict[int, _Use] = {}  # by microbatch in flight
        self._absent: dict[tuple[int, int], _Absent] = {}  # by version and layer

    @property
    def count(self) -> int:
        """The number of versions that are in memory at least in part."""
        return len(self._held)

    @property
    def state(self) -> object:
        """A key that is equal at two moments with equal futures: versions are counted back from the newest."""
        held = frozenset((self._newest - version, end) for version, end in self._held.items())
        used = frozenset((m, self._newest - version, end) for m, (version, end) in self._used.items())
        absent = ((self._newest - version, layer, *absent) for (version, layer), absent in self._absent.items())
        return held, self._newest - self._current, used, frozenset(absent)

    def goes_through_newest(self, microbatch: int) -> bool:
        """Return whether a microbatch has used, or would use now, the weights that updates change."""
        use = self._used.get(microbatch)
        return (self._current if use is None else use.version) == self._newest

    def forward(self, microbatch: int) -> None:
        """Start the forward of a microbatch with the current weights."""
        self._used[microbatch] = _Use(self._current, self._stop)

    def backward(self, microbatch: int, first: int | None = None) -> int:
        """End the backward of a microbatch through all layers from `first` on.

        Returns the bytes that this frees.
        """
        version = self._used[microbatch].version
        if first is None or first == self._start:
            del self._used[microbatch]
        else:
            self._used[microbatch] = _Use(version, first)
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
            raise UsageError(f"comes before the STASH of layer {missing}: copy the weights of all layers first")

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
                raise UsageError("moves weights that updates would change: a STASH must come before it")
            if layer >= self._used[microbatch].end:
                raise UsageError(f"moves weights of layer {layer}, through which it has gone backward")
            if known := self._absent.get((version, layer)):
                raise UsageError(f"moves a version of layer {layer} that is {known.state} already")
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
            found = self._absent.get(key)
            if found != _Absent(microbatch, Whereabouts.AWAY, place):
                state = Whereabouts.HERE if found is None else f"{found.state} (@{found.place})"
                raise UsageError(f"brings back a version of layer {layer} that is {state}")
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
                    f"needs a version of layer {layer} that is {absent.state} (@{absent.place}): RELOAD it and join "
                    "the reload before"
                )

    def _version(self, microbatch: int) -> int:
        if microbatch not in self._used:
            raise UsageError(f"is about weights of microbatch {microbatch}, which is not in flight")
        return self._used[microbatch].version
