"""The choice: which submodules recompute or offload what they save, so that a loop keeps its budget.

A decision is a 0/1 variable `(submodule, technique)`; at most one holds on each path of nested calls. A
storage that has died naturally is alive during operation t if one of its *claims* covers t:

- a saver that keeps it, from its save to its last use: 1 - (the sum of the decisions around the saver);
- a decision that has brought it back, from the call's first use in backward to the saver's last use;
- an argument of a recomputed call, until that call's backward ends.

So the bytes at t are a constant plus, for every set of claims, its bytes times the maximum of the claims. The
maximum is a variable that is at least each of them. A recomputation adds one row: the bytes before the call's
backward, plus the call's own growth. Rows are added where a solution violates them, until none does. (Integer
linear programme; HiGHS through `scipy.optimize.milp`.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from pipefit.own_loop.recording import LoopRecording, ModuleCall
from pipefit.schema.plan import LoopDecision, Technique

SMALLEST_BYTES = 1024  # a smaller storage is not worth a copy
_COPY_SECONDS = 1e-5  # to start the copies of a call
_CALL_SECONDS = 2e-4  # of Python, for a recomputed or offloaded call; hidden while a GPU computes
_SEARCH_SECONDS = 10.0
_ROWS_AT_ONCE = 24


class Variable(NamedTuple):
    """A decision that may be taken."""

    name: str
    technique: Technique


class Claim(NamedTuple):
    """A linear expression of decisions that is 1 if a storage stays: `constant` + `sign` * their sum."""

    constant: int
    variables: frozenset[Variable]

    def holds(self, chosen: frozenset[Variable]) -> bool:
        """Return whether a storage is claimed under these decisions."""
        return (len(self.variables & chosen) > 0) != bool(self.constant)


class Interval(NamedTuple):
    """A claim on a storage in operations `start` to `stop - 1`; the call `returned` brings it back."""

    claim: Claim
    start: int
    stop: int
    returned: int | None = None


class MemoryBound(NamedTuple):
    """Bytes at a moment: `base`, plus those of each set of claims, plus those of each variable."""

    base: int
    claims: Mapping[frozenset[Claim], int]
    extra: Mapping[Variable, int]


@dataclass(frozen=True)
class Choices:
    """All decisions over a recording.

    Args:
        copy_bytes_per_second: rate to the host and back; 0 if nothing can be offloaded.
        overlaps: whether copies run while the device computes.
    """

    recording: LoopRecording
    copy_bytes_per_second: float
    overlaps: bool

    # ---------------------------------------------------------------- variables and their costs

    @cached_property
    def refused(self) -> dict[str, str]:
        """Submodules that cannot be recomputed, with the reason."""
        return {call.name: call.refusal for call in self.recording.calls if call.refusal}

    @cached_property
    def variables(self) -> tuple[Variable, ...]:
        """Every possible decision that changes something."""
        recording = self.recording
        names = dict.fromkeys(call.name for call in recording.calls if call.back is not None)
        result = [Variable(name, "recompute") for name in names if name not in self.refused]
        if self.copy_bytes_per_second:
            result += [Variable(name, "offload") for name in names if self.moved[name]]
        return tuple(result)

    @cached_property
    def moved(self) -> dict[str, tuple[int, ...]]:
        """For each submodule, the numbers of the saved tensors that it can offload to some use."""
        result: dict[str, set[int]] = defaultdict(set)
        for saved in self.recording.saved:
            storage = self.recording.storages[saved.storage]
            if storage.lasting or storage.nbytes < SMALLEST_BYTES or saved.used is None:
                continue
            for call, number in saved.numbers:
                back = self.recording.calls[call].back
                if back is not None and storage.natural < back:
                    result[self.recording.calls[call].name].add(number)
        return defaultdict(tuple, {name: tuple(sorted(numbers)) for name, numbers in result.items()})

    @cached_property
    def seconds(self) -> dict[Variable, float]:
        """Seconds that each decision adds to a later step."""
        recording, total = self.recording, np.concatenate(([0.0], np.cumsum(self.recording.seconds)))
        result = dict.fromkeys(self.variables, 0.0)
        away, fixed = self._copied_bytes, 0.0 if self.overlaps else _CALL_SECONDS
        for number, call in enumerate(recording.calls):
            if call.enter < recording.ends[0] or call.back is None:
                continue
            forward = float(total[call.exit] - total[call.enter])
            backward = float(total[min(call.done, len(total) - 1)] - total[call.back])
            if (again := Variable(call.name, "recompute")) in result:
                result[again] += forward + fixed
            if (moves := Variable(call.name, "offload")) in result:
                copy = away[number] / self.copy_bytes_per_second
                hidden = min(copy, forward) + min(copy, backward) if self.overlaps else 0.0
                result[moves] += 2 * copy - hidden + _COPY_SECONDS + fixed
        return {variable: cost / (len(recording.ends) - 1) for variable, cost in result.items()}

    @cached_property
    def _copied_bytes(self) -> dict[int, int]:
        """Bytes that each call copies to the host if it offloads."""
        storages: dict[int, set[int]] = defaultdict(set)
        for saved in self.recording.saved:
            for call, number in saved.numbers:
                if number in self.moved[self.recording.calls[call].name]:
                    storages[call].add(saved.storage)
        sizes = self.recording.storages
        return defaultdict(int, {c: sum(sizes[s].nbytes for s in every) for c, every in storages.items()})

    # ---------------------------------------------------------------- bytes over time

    def _around(self, path: Iterable[int], number_in: Mapping[int, int] | None) -> frozenset[Variable]:
        """Return the decisions for calls on a path that take a saved tensor away.

        `number_in` is the tensor's number in each call.
        """
        known, result = set(self.variables), set[Variable]()
        for call in path:
            name = self.recording.calls[call].name
            result.add(Variable(name, "recompute"))
            if number_in is None or number_in[call] in self.moved[name]:
                result.add(Variable(name, "offload"))
        return frozenset(result & known)

    @cached_property
    def intervals(self) -> dict[int, list[Interval]]:
        """Claims on each storage after its natural death. Negative numbers are states that a call keeps."""
        recording, calls = self.recording, self.recording.calls
        known, result = set(self.variables), defaultdict[int, list[Interval]](list)
        last: dict[int, int] = {}
        for saved in recording.saved:
            last[saved.storage] = max(last.get(saved.storage, -1), -1 if saved.used is None else saved.used)
        for saved in recording.saved:
            storage = recording.storages[saved.storage]
            if storage.lasting:
                continue
            numbers = dict(saved.numbers)
            around = self._around(numbers, numbers)
            released = saved.used is None or saved.used == last[saved.storage]
            stop = storage.died if released else saved.used + 1  # type: ignore[operator]
            result[saved.storage].append(Interval(Claim(1, around), storage.natural, stop))
            for call in numbers:
                back = calls[call].back
                own = self._around([call], numbers)
                if back is not None and own and stop > back:
                    result[saved.storage].append(
                        Interval(Claim(0, own), max(back, storage.natural), stop, call)
                    )
        for number, own_call in enumerate(calls):
            again = Variable(own_call.name, "recompute")
            if own_call.back is None or again not in known:
                continue
            claim = Claim(0, frozenset([again]))
            for storage_number in own_call.args:
                storage = recording.storages[storage_number]
                if not storage.lasting:
                    result[storage_number].append(Interval(claim, storage.natural, own_call.done))
            result[-1 - number].append(Interval(claim, own_call.exit, own_call.done))
        return {key: [i for i in every if i.stop > i.start] for key, every in result.items()}

    def _nbytes(self, key: int) -> int:
        """Return the bytes of a storage, or of the random state and the buffers that a call keeps."""
        if key >= 0:
            return self.recording.storages[key].nbytes
        call = self.recording.calls[-1 - key]
        return self.recording.state_bytes + sum(nbytes for _, nbytes in call.buffers)

    @cached_property
    def _held_by_graph(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Bytes during each operation that the plain loop holds beyond their natural deaths."""
        change = np.zeros(len(self.recording.high) + 2, np.int64)
        for key in self.intervals:
            if key >= 0:
                storage = self.recording.storages[key]
                change[storage.natural] += storage.nbytes
                change[storage.died] -= storage.nbytes
        return np.cumsum(change)[: len(self.recording.high)]

    @cached_property
    def _growth(self) -> dict[int, int]:
        """Most bytes that a call's forward adds to those before it, if nothing from before dies."""
        recording, result = self.recording, dict[int, int]()
        deaths = sorted((s.died, s.born, s.nbytes) for s in recording.storages)
        for number, call in enumerate(recording.calls):
            if call.exit <= call.enter:
                result[number] = 0
                continue
            gone = np.zeros(call.exit - call.enter + 1, np.int64)
            for died, born, nbytes in deaths:
                if call.enter < died < call.exit and born < call.enter:
                    gone[died - call.enter] += nbytes
            level = recording.high[call.enter : call.exit] + np.cumsum(gone)[:-1]
            result[number] = max(0, int(level.max()) - int(recording.before[call.enter]))
        return result

    def curve(self, chosen: frozenset[Variable]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the bytes during each operation under these decisions, recomputations excluded."""
        change = np.zeros(len(self.recording.high) + 2, np.int64)
        for key, intervals in self.intervals.items():
            nbytes = self._nbytes(key)
            for start, stop in _joined(i for i in intervals if i.claim.holds(chosen)):
                change[start] += nbytes
                change[stop] -= nbytes
        return self.recording.high - self._held_by_graph + np.cumsum(change)[: len(self.recording.high)]

    def row(self, at: int) -> MemoryBound:
        """Return the bytes during operation `at`."""
        base = int(self.recording.high[at] - self._held_by_graph[at])
        return MemoryBound(base, self._claims(at), {})

    def _claims(self, at: int, unless: int | None = None) -> dict[frozenset[Claim], int]:
        """Return the bytes of each set of claims at `at`, except for returns by the call `unless`."""
        result: dict[frozenset[Claim], int] = defaultdict(int)
        for key, intervals in self.intervals.items():
            here = (i for i in intervals if i.start <= at < i.stop)
            claims = frozenset(i.claim for i in here if unless is None or i.returned != unless)
            if claims:
                result[claims] += self._nbytes(key)
        return result

    @cached_property
    def recomputations(self) -> list[MemoryBound]:
        """Rows of the recomputation of every call: the bytes before its backward, and its growth."""
        recording, result = self.recording, list[MemoryBound]()
        for number, call in enumerate(recording.calls):
            again = Variable(call.name, "recompute")
            if call.back is None or again not in self.seconds or call.back >= len(recording.high):
                continue
            at = call.back
            extra = self._growth[number] + self._nbytes(-1 - number)
            base = int(recording.before[at] - self._held_by_graph[at])
            result.append(MemoryBound(base, self._claims(at, number), {again: extra}))
        return result

    def peak(self, chosen: frozenset[Variable]) -> int:
        """Return the expected peak under these decisions."""
        return max(int(self.curve(chosen).max()), *(value_of(row, chosen) for row in self.recomputations), 0)

    # ---------------------------------------------------------------- the programme

    def fitting(self, budget_bytes: int) -> frozenset[Variable] | None:
        """Return the cheapest decisions with an expected peak within the budget; None if there are none."""
        return self._solve(budget_bytes)

    def smallest(self) -> frozenset[Variable]:
        """Return the decisions with the least expected peak."""
        result = self._solve(None)
        return frozenset() if result is None else result

    def _solve(self, budget_bytes: int | None) -> frozenset[Variable] | None:
        programme = _Programme(self, budget_bytes)
        chosen: frozenset[Variable] | None = frozenset()
        for _ in range(200):
            limit = budget_bytes if budget_bytes is not None else programme.least
            assert chosen is not None
            if not programme.add(self._violated(chosen, limit)):
                return self._needed(chosen, limit) if programme.stopped else chosen
            chosen = programme.solve()
            if chosen is None:
                return None
        return chosen

    def _needed(self, chosen: frozenset[Variable], limit: int) -> frozenset[Variable]:
        """Drop decisions that the limit does not need, the most expensive first."""
        for variable in sorted(chosen, key=lambda one: (self.seconds[one], one), reverse=True):
            fewer = chosen - {variable}
            if next(self._violated(fewer, limit), None) is None:
                chosen = fewer
        return chosen

    def _violated(self, chosen: frozenset[Variable], limit: int) -> Iterator[tuple[int, MemoryBound]]:
        """Yield rows above the limit: the highest operation of each of some parts of the loop."""
        curve = self.curve(chosen)
        for part in np.array_split(np.arange(len(curve)), min(_ROWS_AT_ONCE, len(curve))):
            at = int(part[0]) + int(curve[part].argmax())
            if curve[at] > limit:
                yield at, self.row(at)
        for number, row in enumerate(self.recomputations):
            if value_of(row, chosen) > limit:
                yield -1 - number, row

    def decisions(self, chosen: frozenset[Variable]) -> tuple[LoopDecision, ...]:
        """Return the decisions, in the order of the calls."""
        order = dict.fromkeys(call.name for call in self.recording.calls)
        buffers: dict[str, dict[str, None]] = defaultdict(dict)
        for call in self.recording.calls:
            buffers[call.name].update(dict.fromkeys(name for name, _ in call.buffers))
        by_name = {variable.name: variable for variable in chosen}
        return tuple(
            LoopDecision(
                name=name,
                technique=by_name[name].technique,
                moved=self.moved[name] if by_name[name].technique == "offload" else (),
                buffers=tuple(buffers[name]) if by_name[name].technique == "recompute" else (),
                saved_bytes=self._freed(by_name[name], chosen),
                seconds=self.seconds[by_name[name]],
            )
            for name in order
            if name in by_name
        )

    def _freed(self, variable: Variable, chosen: frozenset[Variable]) -> int:
        """Return the bytes that a decision takes off the moment when a later step holds most."""
        steady = slice(self.recording.ends[0], None)
        without = self.curve(chosen - {variable})[steady]
        return int((without - self.curve(chosen)[steady]).max(initial=0))


def _joined(intervals: Iterable[Interval]) -> Iterator[tuple[int, int]]:
    """Yield the union of intervals as disjoint ones."""
    start, stop = -1, -1
    for one in sorted((i.start, i.stop) for i in intervals):
        if one[0] > stop:
            if stop > start:
                yield start, stop
            start, stop = one
        else:
            stop = max(stop, one[1])
    if stop > start:
        yield start, stop


def value_of(row: MemoryBound, chosen: frozenset[Variable]) -> int:
    """Return the bytes of a row under these decisions."""
    claimed = sum(n for claims, n in row.claims.items() if any(c.holds(chosen) for c in claims))
    return row.base + claimed + sum(n for variable, n in row.extra.items() if variable in chosen)


class _Programme:
    """An integer programme that grows by rows.

    Its columns are the decisions, one for each set of several claims, and the peak in MiB where that is to be
    least.
    """

    def __init__(self, choices: Choices, budget_bytes: int | None) -> None:
        self._budget = budget_bytes
        self.least = 0  # of the peak, by the last solution
        self.stopped = False  # whether the time limit ended the last search
        self._columns: dict[object, int] = {v: number for number, v in enumerate(choices.variables)}
        self._binary = len(self._columns)
        self._variables = choices.variables
        self._costs = choices.seconds
        self._entries: list[tuple[dict[int, float], float]] = []  # coefficients, and their largest sum
        self._known: set[int] = set()
        if budget_bytes is None:
            self._columns["peak"] = len(self._columns)
        paths = {
            frozenset(v for call in call.path for v in self._of(choices, choices.recording.calls[call]))
            for call in choices.recording.calls
        }
        for path in paths:
            if len(path) > 1:
                self._entries.append(({self._columns[v]: 1.0 for v in path}, 1.0))

    def _of(self, choices: Choices, call: ModuleCall) -> Iterator[Variable]:
        for technique in ("recompute", "offload"):
            variable = Variable(call.name, technique)
            if variable in self._columns:
                yield variable

    def add(self, rows: Iterable[tuple[int, MemoryBound]]) -> bool:
        """Add rows; return whether any is new."""
        new = False
        for key, row in rows:
            if key not in self._known:
                self._known.add(key)
                self._add(row)
                new = True
        return new

    def _add(self, row: MemoryBound) -> None:
        """Add the row in MiB, so that coefficients are near 1."""
        unit = float(1 << 20)
        coefficients: dict[int, float] = defaultdict(float)
        base = float(row.base)
        for claims, nbytes in row.claims.items():
            if _covered(claims):
                base += nbytes
            elif len(claims) == 1:
                (claim,) = claims
                base += nbytes * claim.constant
                for variable in claim.variables:
                    coefficients[self._columns[variable]] += nbytes * (-1 if claim.constant else 1) / unit
            else:
                coefficients[self._maximum(claims)] += nbytes / unit
        for variable, nbytes in row.extra.items():
            coefficients[self._columns[variable]] += nbytes / unit
        if self._budget is None:
            coefficients[self._columns["peak"]] -= 1.0
        self._entries.append((coefficients, ((self._budget or 0) - base) / unit))

    def _maximum(self, claims: frozenset[Claim]) -> int:
        """Return the column that is at least every claim."""
        if claims not in self._columns:
            column = self._columns[claims] = len(self._columns)
            for claim in claims:
                sign = 1.0 if claim.constant else -1.0  # 1 - sum <= y, or sum <= y
                entry = {self._columns[v]: -sign for v in claim.variables}
                self._entries.append(({**entry, column: -1.0}, -float(claim.constant)))
        return self._columns[claims]

    def solve(self) -> frozenset[Variable] | None:
        """Return the best decisions; None if there are none."""
        count = len(self._columns)
        if not count:  # nothing to decide
            return None
        cells = [(r, c, v) for r, (entry, _) in enumerate(self._entries) for c, v in entry.items()]
        shape = len(self._entries), count
        rows, columns, values = zip(*cells, strict=True) if cells else ((), (), ())
        matrix = csr_array((values, (rows, columns)), shape=shape)
        limits = np.array([limit for _, limit in self._entries])
        costs, upper = np.zeros(count), np.ones(count)
        scale = sum(self._costs.values()) or 1.0
        for variable in self._variables:
            costs[self._columns[variable]] = self._costs[variable] / scale + 1e-6
        integral = np.zeros(count)
        integral[: self._binary] = 1
        if self._budget is None:
            costs[: self._binary] = 1e-9
            costs[self._columns["peak"]], upper[self._columns["peak"]] = 1.0, np.inf
        result = milp(
            costs,
            constraints=LinearConstraint(matrix, -np.inf, limits),
            integrality=integral,
            bounds=Bounds(np.zeros(count), upper),
            options={"time_limit": _SEARCH_SECONDS, "mip_rel_gap": 1e-6, "presolve": False},
        )
        self.stopped = result.status == 1
        if result.x is None:
            return None
        if self._budget is None:
            self.least = int(np.ceil(result.x[self._columns["peak"]] * (1 << 20)))
        return frozenset(v for v in self._variables if result.x[self._columns[v]] > 0.5)


def _covered(claims: frozenset[Claim]) -> bool:
    """Return whether one of the claims always holds: a saver keeps a storage, or its decision returns it."""
    returned = {variable for claim in claims if not claim.constant for variable in claim.variables}
    return any(claim.constant and claim.variables <= returned for claim in claims)
