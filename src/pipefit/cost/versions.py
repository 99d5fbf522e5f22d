"""Weight versions: which of a stage's weights are in memory while it is updated with microbatches in flight.

A microbatch goes backward through the weights of its own forward, however many updates have come between. So a stage
may hold several versions of its weights:

    newest      what the optimizer updates, in place
    current     what forwards use: the newest, but for the time from a STASH to its join
    in flight   those that a microbatch in flight has gone forward with

A STASH copies the newest weights, and the copy is the newest from then on. A version that is neither the newest nor
current is freed when the last microbatch that uses it has gone backward. Until then its layers may be moved away and
back, each by the name of a microbatch that goes through them. (PipeDream, SOSP 2019, section 3.3; two versions with
gradients of many microbatches: PipeDream-2BW, ICML 2021.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipefit.cost.residency import Whereabouts
from pipefit.errors import UsageError
from pipefit.places import Place


class _Absent(NamedTuple):
    """A layer's weights of one version that are moved: by the name of which microbatch, and where."""

    microbatch: int
    state: Whereabouts
    place: Place | None


class StageVersions:
    """The versions of one stage, numbered from 0; each takes `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._newest = self._current = 0
        self._used: dict[int, int] = {}  # by microbatch in flight, the version that it went forward with
        self._absent: dict[tuple[int, int], _Absent] = {}  # by version and layer

    @property
    def count(self) -> int:
        """How many versions are in memory."""
        return len({self._newest, self._current, *self._used.values()})

    @property
    def state(self) -> object:
        """Equal at two moments at which the same comes next: versions are counted back from the newest."""
        used = tuple(sorted((m, self._newest - version) for m, version in self._used.items()))
        absent = ((self._newest - version, layer, *absent) for (version, layer), absent in self._absent.items())
        return self.count, self._newest - self._current, used, frozenset(absent)

    def forward(self, microbatch: int) -> None:
        """A microbatch begins its forward, with the current weights."""
        self._used[microbatch] = self._current

    def backward(self, microbatch: int) -> int:
        """A microbatch has ended its backward; the bytes that this frees."""
        before = self.count
        del self._used[microbatch]
        return (before - self.count) * self.nbytes

    def stash(self) -> int:
        """The newest weights are copied; the bytes of the copy."""
        self._newest += 1
        return self.nbytes

    def adopt(self) -> int:
        """Forwards use the newest weights from now on; the bytes that this frees."""
        before = self.count
        self._current = self._newest
        return (before - self.count) * self.nbytes

    def check_update(self) -> None:
        """Check that no microbatch in flight needs the weights that an update is about to change.

        Raises:
            UsageError: one does; names it.
        """
        for microbatch, version in self._used.items():
            if version == self._newest:
                raise UsageError(f"would change weights that microbatch {microbatch} needs for its backward")

    def shift(self, microbatches: int) -> None:
        """Count microbatches from one that comes `microbatches` later."""
        self._used = {microbatch - microbatches: version for microbatch, version in self._used.items()}
        for key, absent in self._absent.items():
            self._absent[key] = absent._replace(microbatch=absent.microbatch - microbatches)

    # ---------------------------------------------------------------- away and back

    def leave(self, microbatch: int, layers: Iterable[int], place: Place | None) -> None:
        """Weights that a microbatch went forward with start to be copied away; nothing is freed yet.

        Raises:
            UsageError: they are in use, away already, or those of no microbatch in flight.
        """
        version = self._version(microbatch)
        if version in (self._newest, self._current):
            raise UsageError("moves weights that forwards or updates still use: a WAIT_STASH must come before it")
        for layer in layers:
            if known := self._absent.get((version, layer)):
                raise UsageError(f"moves a version of layer {layer} that is {known.state} already")
            self._absent[version, layer] = _Absent(microbatch, Whereabouts.LEAVING, place)

    def left(self, microbatch: int, layers: Iterable[int]) -> None:
        """The copies have arrived, and the weights here are freed."""
        for layer in layers:
            key = self._version(microbatch), layer
            self._absent[key] = self._absent[key]._replace(state=Whereabouts.AWAY)

    def come_back(self, microbatch: int, layers: Iterable[int], place: Place | None) -> None:
        """The weights start to be copied back, into memory that is allocated now.

        Raises:
            UsageError: they are not away at that place, or went by the name of another microbatch.
        """
        for layer in layers:
            key = self._version(microbatch), layer
            found = self._absent.get(key)
            if found != _Absent(microbatch, Whereabouts.AWAY, place):
                state = Whereabouts.HERE if found is None else f"{found.state} (@{found.place})"
                raise UsageError(f"brings back a version of layer {layer} that is {state}")
            self._absent[key] = _Absent(microbatch, Whereabouts.RETURNING, place)

    def are_back(self, microbatch: int, layers: Iterable[int]) -> None:
        """The weights are there again."""
        for layer in layers:
            del self._absent[self._version(microbatch), layer]

    def check_present(self, microbatch: int, layers: Iterable[int]) -> None:
        """Check that the weights which a microbatch needs in a backward or a second forward are there.

        Raises:
            UsageError: some are not.
        """
        for layer in layers if self._absent else ():
            if absent := self._absent.get((self._version(microbatch), layer)):
                raise UsageError(
                    f"needs a version of layer {layer} that is {absent.state} (@{absent.place}): RELOAD it and join "
                    "the reload before"
                )

    def _version(self, microbatch: int) -> int:
        if microbatch not in self._used:
            raise UsageError(f"is about weights of microbatch {microbatch}, which is not in flight")
        return self._used[microbatch]
