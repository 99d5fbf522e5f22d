"""Profiles on demand of a planner, for each microbatch size and number of tensor-parallel ranks.

Of the sizes that the planner chooses from, the smallest and the largest are traced, and chains for sizes in
between are derived from these two if possible (`fake_cuda.chain`). `checked` compares the sizes of a
plan with traces. Sizes that will be needed are profiled in parallel with the first one (`pipefit.processes`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from pipefit.capture import Chain, EqualBlocks, Task, recording, rows_of, with_fewer_blocks
from pipefit.fake_cuda.chain import Chains, built_without_bytes
from pipefit.fake_cuda.target import FakeTarget, run_a_backward
from pipefit.processes import beside, forks_left, uncollected
from pipefit.profiler.fake import Progress, profile_sizes
from pipefit.profiler.feedback import measured_coupling, with_coupling
from pipefit.schema.layer_costs import LayerCost, SharedBuffer, SharedParameter
from pipefit.schema.profile import MOST_THREADS, Measurement, ModelProfile, Target
from pipefit.schema.validation import whole
from pipefit.texts import counted

T = TypeVar("T")

_MOST_KEPT = 0.7  # share of blocks of a copy, which is profiled once more than the model would be
_MANY = 3  # cores, at least, to profile in another process

_Wanted = tuple[int, tuple[int, ...], bool]  # microbatch size, numbers of ranks, sequence parallelism


class OnDemand:
    """A function that profiles `task` once for each combination of size, ranks and `sequences`.

    Arguments are those of `profile`. `sizes` are those that may be needed, if known; `ahead` is the order in
    which they will be. `chains` are the task's existing chains, if any.
    """

    def __init__(
        self,
        task: Task,
        *,
        target: Target = "cpu",
        threads: int = 1,
        progress: Progress | None = None,
        sizes: Iterable[int] = (),
        ahead: Sequence[int] = (),
        chains: Chains | None = None,
    ) -> None:
        whole("threads", threads, 1, MOST_THREADS)
        self.sizes = tuple(sorted(sizes))
        self.chains = chains or Chains(task, self.sizes)
        self._task, self._target, self._threads, self._progress = task, target, threads, progress
        self._known: dict[_Wanted, ModelProfile] = {}
        self._ahead = () if target == "cpu" else tuple(ahead)
        self._coupling: str | None = None  # result of comparing microbatches with their halves
        self._begun: dict[_Wanted, Callable[[], ModelProfile]] = {}

    def __call__(
        self, microbatch_size: int, tensor: Sequence[int] = (), *, sequences: bool = False
    ) -> ModelProfile:
        """Return the profile of whole layers, and of layers divided between each of these numbers of ranks.

        With `sequences`, ranks divide positions too.
        """
        wanted = microbatch_size, tuple(sorted({degree for degree in tensor if degree > 1})), sequences
        if wanted not in self._known:
            self._say("tracing the model")
            with _profiling():
                self._begin(wanted)
                begun = self._begun.pop(wanted, None) or self._first(wanted)
                profile = begun()
                if microbatch_size > 1 and self._coupling is None:
                    self._coupling = measured_coupling(self._task, profile)
                self._known[wanted] = with_coupling(profile, self._coupling or "")
        self.say_searched(*wanted)
        return self._known[wanted]

    def say_searched(self, size: int, ranks: Sequence[int], sequences: bool) -> None:
        """Report that plans are searched for microbatches of this size."""
        along = " with sequence parallelism" if sequences else ""
        shards = f", {counted(max(ranks), 'shard')}{along}" if ranks else ""
        self._say(f"plans of microbatches of {counted(size, 'sample')}{shards}")

    def report_to(self, progress: Progress | None) -> None:
        """Report progress to `progress` from now on."""
        self._progress = progress

    def _say(self, what: str) -> None:
        """Report the current activity, of unknown duration."""
        if self._progress is not None:
            self._progress(0, 0, what)

    def _begin(self, first: _Wanted) -> None:
        """Begin to profile other sizes in parallel with the first one."""
        others = [(size, *first[1:]) for size in self._ahead if size != first[0]]
        self._ahead = ()
        if others:
            with FakeTarget(self._target) as fake:
                self.chains.family(fake)
            works = (partial(self._made, wanted, None) for wanted in others)
            self._begun = dict(zip(others, profiled_beside(self._target, *works), strict=True))

    def _first(self, wanted: _Wanted) -> Callable[[], ModelProfile]:
        """Return a function that makes an awaited profile, in another process if enough cores are free.

        Torch refuses backwards in all forks of a process that has run one, so this process avoids them.
        """
        if self._target == "cpu" or forks_left() < _MANY:
            return partial(self._made, wanted, self._progress)
        with FakeTarget(self._target) as fake:
            self.chains.unrun(wanted[0], fake)
        return profiled_beside(self._target, partial(self._made, wanted, None))[0]

    def chain(self) -> Chain:
        """Return the chain of the smallest size, at the cost of a trace but no profile."""
        self._say("tracing the model")
        with _profiling(), FakeTarget(self._target) as fake:
            return self.chains.of(min(self.sizes, default=1), fake)

    def _made(self, wanted: _Wanted, progress: Progress | None) -> ModelProfile:
        size, ranks, sequences = wanted
        return profile_sizes(
            self._task,
            [size],
            target=self._target,
            threads=self._threads,
            tensor=ranks,
            sequences=sequences,
            progress=progress,
            chains=self.chains,
        )

    def checked(self, sizes: Iterable[int] | None = None) -> Callable[[], bool]:
        """Begin to trace the model at these sizes; return a function that compares traces with profiles.

        By default the sizes are all that have been requested. The function returns False if one differs, as
        for a model that reads its number of samples; then all profiles are dropped, and new ones are made
        from traces.
        """
        self._begun = {}
        wanted = sorted({size for size, *_ in self._known} if sizes is None else set(sizes))
        fake = FakeTarget(self._target)
        with _profiling(), fake:
            checked = self.chains.checked(wanted, fake)

        def found() -> bool:
            with _profiling(), fake:
                as_traced = checked()
            if not as_traced:
                self._known.clear()
            return as_traced

        return found


def profiled_beside(target: Target, *works: Callable[[], T]) -> tuple[Callable[[], T], ...]:
    """Start works that profile in other processes (`pipefit.processes`); works for the CPU do not fork.

    Kernels on the CPU use threads, which a fork does not have.
    """
    return beside(*works, forks=target != "cpu", check=run_a_backward)


@contextmanager
def _profiling() -> Iterator[None]:
    """Name profiling in errors of the body, and restore the caller's random generators.

    A trace makes millions of objects and frees few, so collecting garbage would take half of its time.
    """
    with recording("profiling"), torch.random.fork_rng(devices=[]), uncollected():
        yield


# ---- Profiles of models with more equal blocks than were traced: those of few, with the costs of a block
# repeated.
#
# A model whose setting says how many equal blocks it has is profiled at three neighbouring values. The second
# profile is the first with some blocks inserted; where inserting them twice gives the third, name by name and
# cost by cost, the profile at any further value follows by inserting them more often. It is exact as long as
# the model repeats itself, which the caller checks by a trace of the value that matters (`same_costs`).
# Fingerprints of such profiles have the right lengths alone.

S = TypeVar("S", SharedParameter, SharedBuffer)

_NUMBERS = re.compile(r"(\d+)")


class NotRepeated(Exception):
    """The profiles that were traced do not follow from each other by repeating blocks."""


class Repeated:
    """A function that profiles a model, as `OnDemand` is, from three neighbouring ones with fewer blocks.

    Of their rising numbers of blocks the first is `times` steps before the model's. It raises `NotRepeated`
    where the three do not follow from each other.
    """

    def __init__(self, traced: Sequence[OnDemand], times: int) -> None:
        self._traced, self._times = tuple(traced), times
        self.sizes = traced[0].sizes
        self._known: dict[object, ModelProfile] = {}
        self._place: tuple[int, int] | None = None  # of the inserted layers, by the first profiles made

    def __call__(
        self, microbatch_size: int, tensor: Sequence[int] = (), *, sequences: bool = False
    ) -> ModelProfile:
        """The profile that `OnDemand` would make, but for its fingerprint."""
        wanted = microbatch_size, tuple(sorted({degree for degree in tensor if degree > 1})), sequences
        if wanted not in self._known:
            traced = (on_demand(microbatch_size, tensor, sequences=sequences) for on_demand in self._traced)
            first, second = next(traced), next(traced)
            every = {(one.start, one.count): one for one in _Insertion.between(first, second)}
            insertion = every.get(self._place) if self._place else None
            insertion = insertion or _growing(first, second, next(traced))
            self._place = insertion.start, insertion.count
            self._known[wanted] = insertion.repeated(self._times)
        self._traced[0].say_searched(*wanted)
        return self._known[wanted]

    def report_to(self, progress: Progress | None) -> None:
        """Tell `progress` from now on what is done."""
        for on_demand in self._traced:
            on_demand.report_to(progress)

    def checked(self, sizes: Iterable[int] | None = None) -> Callable[[], bool]:
        """As `OnDemand.checked`, of the models that were traced."""
        wanted = None if sizes is None else tuple(sizes)
        every = [on_demand.checked(wanted) for on_demand in self._traced]

        def found() -> bool:
            as_traced = [one() for one in every]  # all of them are asked: each forgets what it is wrong about
            if not all(as_traced):
                self._known.clear()
            return all(as_traced)

        return found


def with_few_blocks(task: Task, target: Target) -> tuple[Task, tuple[EqualBlocks, ...]] | None:
    """Return a copy of `task` with three blocks of every kind, and the lists that it shortens.

    One of three is between equal blocks. Return None if that leaves most of the lists' blocks.

    Raises:
        UsageError: the model cannot be built.
    """
    with _profiling():
        module = task.module
        if not isinstance(module, nn.Module):
            with FakeTarget(target) as fake:
                module = built_without_bytes(replace(task, precision=None), fake)
        rows = rows_of(module, 3)
        outermost = tuple(row for row in rows if not any(_is_inside(row.path, other.path) for other in rows))
        most = _MOST_KEPT * sum(row.blocks for row in outermost)
        if not all(row.stand_ins for row in outermost) or sum(row.kept for row in outermost) >= most:
            return None
        few = with_fewer_blocks(replace(task, module=module), outermost)
    return replace(few, name=task.name), outermost


def _is_inside(path: str, around: str) -> bool:
    return path != around and path.startswith(f"{around}." if around else "")


def stretched(few: ModelProfile, rows: Sequence[EqualBlocks]) -> ModelProfile:
    """Return the profile of a model, but for its fingerprint, from that of `with_few_blocks`.

    It is exact if the model repeats itself, which the caller checks in one precision (`same_costs`).

    Raises:
        UsageError: layers do not pass on what equal blocks would take.
    """
    return _written(few, _spread(few.layers, rows), _spread([block.name for block in few.blocks], rows))


class _Spread(NamedTuple):
    """A layer or block of a model: its name, and the place in a smaller model of the one that stands for it.

    `source` begins the names in the block of the smaller model, `block` those in the block of the model.
    `repeat` numbers blocks without these names.
    """

    name: str
    place: int
    source: str = ""
    block: str = ""
    repeat: int = 0

    @property
    def of_block(self) -> tuple[str, str, int]:
        """A key of its block; false values if it is in none that stands for several."""
        return self.source, self.block, self.repeat


_NO_BLOCK = "", "", 0


def _written(few: ModelProfile, layers: Sequence[_Spread], blocks: Sequence[_Spread]) -> ModelProfile:
    """Return the profile of a model, but for its fingerprint, from that of a smaller one."""
    digests = few.fingerprint.layers, few.fingerprint.parameters
    of_layers, of_parameters = (tuple(one[layer.place] for layer in layers) for one in digests)
    return replace(
        few,
        layers=tuple(layer.name for layer in layers),
        blocks=tuple(replace(few.blocks[block.place], name=block.name) for block in blocks),
        fingerprint=replace(few.fingerprint, layers=of_layers, parameters=of_parameters),
        measurements=tuple(_written_measurement(few, measured, layers) for measured in few.measurements),
    )


def _written_measurement(few: ModelProfile, measured: Measurement, layers: Sequence[_Spread]) -> Measurement:
    kinds: dict[LayerCost, int] = {}
    known: dict[object, int] = {}  # as costs take long to compare
    numbers = list[int]()
    for layer in layers:
        key = measured.layers[layer.place], layer.source, layer.block
        if key not in known:
            known[key] = kinds.setdefault(_in_block(measured.costs[layer.place], layer), len(kinds))
        numbers.append(known[key])
    return replace(
        measured,
        kinds=tuple(kinds),
        layers=tuple(numbers),
        shared=_spread_shared(few, measured.shared, layers),
        shared_buffers=_spread_shared(few, measured.shared_buffers, layers),
    )


def _spread(names: Sequence[str], rows: Sequence[EqualBlocks]) -> list[_Spread]:
    """Return the layers or blocks of a model for those of a copy."""
    result = [_Spread(name, place) for place, name in enumerate(names)]
    for row in rows:
        blocks = [row.block(one.name) for one in result]
        inside = [number for number, block in enumerate(blocks) if block]
        if not inside:
            continue
        start, stop, current = inside[0], inside[-1] + 1, ""
        runs: dict[str, list[_Spread]] = {}
        for one, block in zip(result[start:stop], blocks[start:stop], strict=True):
            current = block or current
            runs.setdefault(current, []).append(one)
        stand_ins = dict(row.stand_ins)
        every = (
            _Spread(_renamed(one.name, *beginnings), one.place, *beginnings)
            for name in row.names
            for beginnings in [(row.around + stand_ins.get(name, name), row.around + name)]
            for one in runs.get(stand_ins.get(name, name), ())
        )
        result = [*result[:start], *every, *result[stop:]]
    return list(_numbered(result))


def _numbered(names: Iterable[_Spread]) -> Iterator[_Spread]:
    """Yield the layers or blocks with new numbers for names that are repeated, as a trace gives them."""
    met: dict[str, int] = {}
    for one in names:
        name = one.name.partition("@")[0]
        count = met[name] = met.get(name, -1) + 1
        yield one._replace(name=f"{name}@{count}" if count else name)


def _in_block(cost: LayerCost, layer: _Spread) -> LayerCost:
    """Return the cost with the names that parameters have in the block of the model."""
    if layer.source == layer.block or not any(one.name.startswith(layer.source) for one in cost.parameters):
        return cost
    beginnings = layer.source, layer.block
    named = (replace(one, name=_renamed(one.name, *beginnings)) for one in cost.parameters)
    return replace(cost, parameters=tuple(named))


def _renamed(name: str, source: str, block: str) -> str:
    return block + name[len(source) :] if name.startswith(source) else name


def _spread_shared(few: ModelProfile, shared: Sequence[S], layers: Sequence[_Spread]) -> tuple[S, ...]:
    """Return shared tensors of a model: those of layers of one block in each block that it stands for."""
    result = list[S]()
    for tensor in shared:
        holders = set(tensor.users)
        every = [number for number, layer in enumerate(layers) if layer.place in holders]
        users: dict[tuple[str, str, int], list[int]] = {}
        for number in every:
            users.setdefault(layers[number].of_block, []).append(number)
        places = [{layers[number].place for number in numbers} for numbers in users.values()]
        is_inside = _NO_BLOCK not in users and all(own == holders for own in places)
        local = tensor.name.removeprefix(few.layers[tensor.users[0]])
        for numbers in users.values() if is_inside else [every]:
            named = replace(tensor, name=f"{layers[numbers[0]].name}{local}", users=tuple(numbers))
            if isinstance(named, SharedParameter):
                copying, cast_only = (
                    tuple(number for number in numbers if layers[number].place in some)
                    for some in (named.copying, named.cast_only)
                )
                named = replace(named, copying=copying, cast_only=cast_only)
            result.append(named)
    return tuple(sorted(result, key=lambda tensor: tensor.users[0]))


def same_costs(profile: ModelProfile, other: ModelProfile) -> bool:
    """Whether two profiles say the same of every layer, whatever their fingerprints and order of kinds."""
    one, another = (
        (
            each.model,
            each.layers,
            each.blocks,
            each.assumptions,
            {m.way: _without_kinds(m) for m in each.measurements},
        )
        for each in (profile, other)
    )
    if one != another:
        return False
    ways = {measured.way: measured for measured in other.measurements}
    pairs = ((measured, ways[measured.way]) for measured in profile.measurements)
    return all(
        few.kinds[first] == many.kinds[second]
        for few, many in pairs
        for first, second in {*zip(few.layers, many.layers, strict=True)}
    )


def _without_kinds(measured: Measurement) -> object:
    return len(measured.layers), measured.loss, measured.shared, measured.shared_buffers


def _growing(first: ModelProfile, second: ModelProfile, third: ModelProfile) -> _Insertion:
    """The insertion that makes the second profile of the first, and twice the third.

    Raises:
        NotRepeated: there is none.
    """
    for insertion in _Insertion.between(first, second):
        with suppress(NotRepeated):  # one that would part layers which share a parameter
            if same_costs(insertion.repeated(2), third):
                return insertion
    raise NotRepeated(f"{third.model} does not grow by equal blocks")


@dataclass(frozen=True, slots=True)
class _Insertion:
    """Layers of `second` from `start` on, `count` of them, without which it is `first`."""

    first: ModelProfile
    second: ModelProfile
    start: int
    count: int

    @classmethod
    def between(cls, first: ModelProfile, second: ModelProfile) -> list[_Insertion]:
        """The insertions that may make the second of the first, those farthest from both ends first."""
        count = len(second.layers) - len(first.layers)
        kinds = [[(m.way, m.kinds, m.loss) for m in profile.measurements] for profile in (first, second)]
        if (
            count <= 0
            or kinds[0] != kinds[1]
            or (first.model, first.assumptions) != (second.model, second.assumptions)
        ):
            return []
        few, many = (list(zip(*(m.layers for m in one.measurements), strict=True)) for one in (first, second))
        edges = set(second.edges)
        places = [
            edge
            for edge in first.edges
            if edge >= count
            and {edge - count, edge, edge + count} <= edges
            and few[:edge] == many[:edge]
            and few[edge:] == many[edge + count :]
            and many[edge - count : edge] == many[edge : edge + count]
        ]
        middle = (places[0] + places[-1]) / 2 if places else 0
        return [
            cls(first, second, place, count) for place in sorted(places, key=lambda one: abs(one - middle))
        ]

    def repeated(self, times: int) -> ModelProfile:
        """The first profile with the layers inserted so many times.

        Raises:
            NotRepeated: names do not show how they would go on.
        """
        first, second = self.first, self.second
        block, end = second.edges.index(self.start), second.edges.index(self.start + self.count)
        few, many = ([one.name for one in profile.blocks] for profile in (first, second))
        layers = _repeated(first.layers, second.layers, self.start, self.count, times)
        blocks = _repeated(few, many, block, end - block, times) if first.blocks else ()
        return _written(second, tuple(layers), tuple(blocks))


def _repeated(
    few: Sequence[str], many: Sequence[str], start: int, count: int, times: int
) -> Iterator[_Spread]:
    """Yield the layers or blocks before inserted ones, those `times` times, and those after them."""
    for place in range(start):
        yield _Spread(many[place], place)
    for repeat in range(1, times + 1):
        for place in range(start, start + count):
            yield _Spread(_counted(many[place - count], many[place], repeat), place, repeat=repeat)
    for place in range(start, len(few)):
        yield _Spread(_counted(few[place], many[place + count], times), place + count)


def _counted(first: str, second: str, times: int) -> str:
    """The name after so many steps, of which the numbers of the first two names show one: `h.3`, `h.4`, ...,
    `h.9`.

    Raises:
        NotRepeated: the names differ in more than numbers.
    """
    ones, others = _NUMBERS.split(first), _NUMBERS.split(second)
    if len(ones) != len(others) or ones[::2] != others[::2]:
        raise NotRepeated(f"{second} differs from {first} in more than its numbers")
    numbers = (
        one if one == other else str(int(one) + times * (int(other) - int(one)))
        for one, other in zip(ones[1::2], others[1::2], strict=True)
    )
    texts = iter(ones[::2])
    return next(texts) + "".join(number + text for number, text in zip(numbers, texts, strict=True))
