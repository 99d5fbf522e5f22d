"""Weight versions: which of a stage's weights are in memory while it is updated with microbatches in flight.

A microbatch goes backward through the weights of its own forward, however many updates have come between. So a stage
may hold several versions of its weights:

    newest      what the optimizer updates, in place
    current     what forwards use: the newest, but for the time from a STASH to its join
    in flight   those that a microbatch in flight has gone forward with

A STASH copies the newest weights, and the copy is the newest from then on. A version that is neither the newest nor
current is freed when the last microbatch that uses it has gone backward. (PipeDream, SOSP 2019, section 3.3; two
versions with gradients of many microbatches: PipeDream-2BW, ICML 2021.)
"""

from __future__ import annotations

from pipefit.errors import UsageError


class StageVersions:
    """The versions of one stage, numbered from 0; each takes `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._newest = self._current = 0
        self._used: dict[int, int] = {}  # by microbatch in flight, the version that it went forward with

    @property
    def count(self) -> int:
        """How many versions are in memory."""
        return len({self._newest, self._current, *self._used.values()})

    @property
    def state(self) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        """Equal at two moments at which the same comes next: versions are counted back from the newest."""
        used = tuple(sorted((m, self._newest - version) for m, version in self._used.items()))
        return self.count, self._newest - self._current, used

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
