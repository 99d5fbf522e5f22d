"""Open choices of a call of `plan`: its numbers, and the space of arrangements to choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, isqrt
from typing import NamedTuple, TypeVar

from pipefit.errors import UsageError
from pipefit.lowering import schedule_named
from pipefit.planner.joint import JointSearch, Searched
from pipefit.planner.options import PlanOptions
from pipefit.planner.problem import (
    CHOOSE_SIZES,
    ON_GRIDS,
    SINGLE,
    Degree,
    Question,
    changed_by_replicas,
    check_degrees,
    check_divided,
    check_pins,
    check_stages,
    divisors,
)
from pipefit.schema.cluster import Cluster
from pipefit.schema.layer_costs import KernelMemory
from pipefit.schema.plan import Plan, is_tight
from pipefit.schema.profile import ModelProfile, differences
from pipefit.schema.training import ENDLESS, MOST_MICROBATCHES, MOST_SAMPLES, Precision, Training
from pipefit.schema.validation import whole
from pipefit.texts import counted

# ---- Arrangements and trials


class Arrangement(NamedTuple):
    """A schedule, a number of stages, a microbatch size, and the degree of every stage."""

    schedule: str
    stages: int
    microbatch_size: int
    degree: Degree = SINGLE


class Trial(NamedTuple):
    """Searched arrangement, its best plan so far, and the work of the search.

    With replicas, the question, the search and its plan are those of one replica (`planner.replicas`), and
    `apart` are the seconds of their collectives.
    """

    arrangement: Arrangement
    question: Question
    search: JointSearch
    searched: Searched
    work: int
    apart: float = 0.0

    @property
    def fits(self) -> bool:
        """True if the plan fits."""
        return self.searched.evaluation.fits

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key, lower is better: missing bytes, seconds, the highest peak."""
        missing, seconds, _, peak = self.searched.evaluation.order
        return missing, seconds + self.apart, peak

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.order[1]

    @property
    def tight(self) -> bool:
        """True if the plan leaves a GPU hardly any room."""
        return leaves_no_room(self.question, self.searched.evaluation.peaks)

    def longer(self, than: float) -> Trial:
        """Return the trial after a search of full effort for a plan faster than `than` seconds."""
        searched = self.search.best(self.question.options.effort, than)
        return self._replace(searched=searched, work=self.search.work)


def leaves_no_room(question: Question, peaks: Sequence[int]) -> bool:
    """Return whether these peaks leave a GPU hardly any room."""
    return any(is_tight(question.cluster, device, peak) for device, peak in enumerate(peaks))


# ---- Numbers and spaces

T = TypeVar("T")

Profiles = Callable[[int], ModelProfile]  # from a microbatch size to the model's profile

SCHEDULES = "1f1b", "eager-1f1b"  # schedules to choose from
_EACH = 4  # microbatches for each device
_COUNTS = 8  # largest number of stage counts to examine


def microbatch_sizes(
    options: PlanOptions, profile: ModelProfile | Profiles | None, *, chooses: bool
) -> tuple[int, ...]:
    """Return the possible microbatch sizes for which profiles exist or can be made.

    Raises:
        UsageError: inconsistent numbers.
    """
    _check_numbers(options)
    measured = (
        sorted(m.microbatch_size for m in profile.measurements) if isinstance(profile, ModelProfile) else []
    )
    first = profile.measurements[0].microbatch_size if isinstance(profile, ModelProfile) else 1
    if options.microbatch_size is not None:
        return (options.microbatch_size,)
    if options.batch_size is None:
        return (first,)
    if options.microbatches is not None:
        return (max(1, options.batch_size // options.microbatches),)
    dividing = tuple(size for size in measured if options.batch_size % size == 0)
    return ((dividing if measured else sizes_of(options.batch_size)) if chooses else ()) or (first,)


def training_of(options: PlanOptions, size: int, precision: Precision, cluster: Cluster) -> Training:
    """Return the training with microbatches of `size` samples, unless their number was requested.

    Raises:
        UsageError: inconsistent numbers.
    """
    batch = options.batch_size
    count = options.microbatches or (_EACH * len(cluster.devices) if batch is None else _count(batch, size))
    return Training(
        batch_size=count * size if batch is None else batch,
        microbatches=count,
        schedule=options.schedule or SCHEDULES[0],
        precision=precision,
        clip_norm=options.clip_norm,
        versions=options.versions,
    )


def _check_numbers(options: PlanOptions) -> None:
    batch, count, size = options.batch_size, options.microbatches, options.microbatch_size
    for name, number, most in (
        ("batch_size", batch, MOST_SAMPLES),
        ("microbatches", count, MOST_MICROBATCHES),
        ("microbatch_size", size, MOST_SAMPLES),
    ):
        if number is not None:
            whole(name, number, 1, most)
    if batch is None or size is None:
        return
    if count is not None and batch != count * size:
        raise UsageError(
            f"microbatches={count} of microbatch_size={size} do not make a batch "
            f"of {batch}: leave one of the three numbers out"
        )
    if batch > size and batch % size:
        raise UsageError(
            f"a batch of {batch} does not divide into microbatches of {counted(size, 'sample')}: use "
            f"{counted(batch - batch % size, 'sample')}, or {batch + -batch % size}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Arrangements to choose from: `sizes` rise, and `profiles` are made when a size is tried.

    A profile has the requested microbatch size and the local batches of it. The question has one of the
    sizes.
    """

    question: Question
    schedules: tuple[str, ...]
    stages: tuple[int, ...]
    sizes: tuple[int, ...]
    profiles: Profiles
    profiled: bool = True  # all profiles exist, and none is made
    grids: bool = False  # stages may have several devices

    @property
    def count(self) -> int:
        """Number of arrangements on single devices."""
        return len(self.schedules) * len(self.stages) * len(self.sizes)

    @property
    def least(self) -> Degree:
        """The smallest degree that stages may have."""
        return Degree.requested(self.question.options)

    def like(self, plan: Plan) -> Space:
        """Return the space of a plan's schedule, number of stages and microbatch size."""
        how, size = plan.training, plan.training.microbatch_size
        question = self.question_of(size, self.profiles(size))
        question = replace(question, training=replace(question.training, schedule=how.schedule))
        stages = (len(plan.stages),)
        return replace(self, question=question, schedules=(how.schedule,), stages=stages, sizes=(size,))

    def question_of(self, size: int, profile: ModelProfile) -> Question:
        """Return the question with microbatches of `size` samples.

        Raises:
            UsageError: the size contradicts the request.
        """
        question = self.question
        how = replace(question.training, microbatches=question.training.batch_size // size)
        return replace(question, profile=profile, training=how)


def space_of(
    profile: ModelProfile | Profiles,
    cluster: Cluster,
    training: Training | None,
    options: PlanOptions,
    *,
    redone: bool = False,
) -> Space:
    """Return the space of a call of `plan`: one arrangement, unless its planner may choose.

    `redone` says that the training has already run with replicas.

    Raises:
        UsageError: inconsistent numbers, or no microbatch size that can be profiled.
    """
    devices, chooses = len(cluster.devices), options.planner == "joint"
    sizes = (
        (training.microbatch_size,)
        if training is not None
        else microbatch_sizes(options, profile, chooses=options.planner in CHOOSE_SIZES)
    )
    check_first(training, cluster, options, sizes)
    opens = redone or (training is None and options.microbatches is None and options.microbatch_size is None)
    profiles: Profiles = (lambda _: profile) if isinstance(profile, ModelProfile) else profile
    grids = options.planner in ON_GRIDS
    if not isinstance(profile, ModelProfile) and (grids or options.data is not None):
        profiles = with_slices(profile, devices, options, opens_sizes=opens)
    batch = options.batch_size if training is None else training.batch_size
    profiles = _with_pins(profiles, devices, options, batch)
    size, made = _first(profiles, by_distance(sizes, batch or sizes[-1], devices))
    how = training or training_of(options, size, made.assumptions.precision, cluster)
    question = Question(profile=made, cluster=cluster, training=how, options=options, opens_sizes=opens)
    open_schedule = chooses and training is None and options.schedule is None
    return Space(
        question=question,
        schedules=SCHEDULES if open_schedule and question.stages > 1 else (how.schedule,),
        stages=counts_of(question.stages) if chooses and options.stages is None else (question.stages,),
        sizes=sizes,
        profiles=profiles,
        profiled=isinstance(profile, ModelProfile),
        grids=grids,
    )


def check_first(
    training: Training | None, cluster: Cluster, options: PlanOptions, sizes: Sequence[int]
) -> None:
    """Check for impossible requests before a profile is made, since that may take minutes.

    Raises:
        UsageError: a request is impossible.
    """
    check_stages(options, cluster)
    schedule = options.schedule if training is None else training.schedule
    if schedule is not None and schedule not in ENDLESS:
        schedule_named(schedule)
    how = training or _first(lambda size: training_of(options, size, "float32", cluster), sizes)[1]
    check_divided(how, options.shard)


def with_slices(profiles: Profiles, devices: int, options: PlanOptions, *, opens_sizes: bool) -> Profiles:
    """Return profiles with the local batches of up to `devices` replicas, or of the requested number.

    Without local batches if replicas would change the numbers. Sizes that cannot be profiled, or at which the
    model differs, are left out.
    """

    def at(size: int) -> ModelProfile:
        profile = profiles(size)
        every = [profile]
        changed = changed_by_replicas(profile, options, opens_sizes=opens_sizes)
        for count in () if changed else divisors(size, devices):
            if count > 1 and options.data in (None, count):
                with suppress(UsageError):
                    slices = profiles(size // count)
                    if not differences(profile.fingerprint, slices.fingerprint, profile.layers):
                        every.append(slices)
        kernels = tuple(dict.fromkeys(kernel for result in every for kernel in result.kernels.kernels))
        measurements = tuple(measurement for result in every for measurement in result.measurements)
        return replace(profile, measurements=measurements, kernels=KernelMemory(kernels=kernels))

    return at


def _with_pins(profiles: Profiles, devices: int, options: PlanOptions, batch: int | None) -> Profiles:
    """Return profiles that refuse sizes at which stages cannot have the requested degrees."""

    def at(size: int) -> ModelProfile:
        check_degrees(size, devices, options, batch)
        profile = profiles(size)
        check_pins(profile, size, devices, options, batch)
        return profile

    return at


def by_distance(sizes: Sequence[int], batch_size: int, stages: int) -> list[int]:
    """Return the sizes in the order of the search.

    First the largest with at least four microbatches for each stage, then the smaller ones, then the larger
    ones.
    """
    enough = [n for n, size in enumerate(sizes) if batch_size >= _EACH * stages * size]
    first = enough[-1] if enough else 0
    return [*sizes[: first + 1][::-1], *sizes[first + 1 :]]


def sizes_of(batch_size: int) -> tuple[int, ...]:
    """Return the microbatch sizes to profile: divisors of the batch, each at least twice the last."""
    small = [size for size in range(1, isqrt(batch_size) + 1) if batch_size % size == 0]
    result = [1]
    for size in (*small, *(batch_size // size for size in reversed(small))):
        if size >= 2 * result[-1]:
            result.append(size)
    return tuple(result)


def _count(batch_size: int, size: int) -> int:
    """Return the number of microbatches of `size` samples in a batch.

    Raises:
        UsageError: the number is not whole.
    """
    count, left = divmod(batch_size, size)
    if left:
        fitting = " or ".join(counted(number * size, "sample") for number in (count, count + 1) if number)
        raise UsageError(
            f"a batch of {batch_size} is not a whole number of microbatches of {counted(size, 'sample')}: "
            "use "
            f"{fitting}, or another microbatch size"
        )
    return count


def _first(profiles: Callable[[int], T], sizes: Sequence[int]) -> tuple[int, T]:
    """Return the first size that can be profiled, and its profile (or another object made from a size).

    Raises:
        UsageError: no size can be; the error of the first one.
    """
    refusals = list[UsageError]()
    for size in sizes:
        try:
            return size, profiles(size)
        except UsageError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def counts_of(most: int) -> tuple[int, ...]:
    """Return the numbers of stages to examine: all of few, eighths of many."""
    parts = min(most, _COUNTS)
    return tuple(dict.fromkeys(ceil(most * part / parts) for part in range(1, parts + 1)))


def chosen_from(space: Space, sizes: Sequence[int], degrees: Sequence[Degree], searched: int) -> str:
    """Return a sentence about the space of the choice and the number of searched arrangements.

    Plans whose stages have any degrees have any number of stages.
    """
    replicas, shards = (sorted({degree[way] for degree in degrees}) for way in (0, 1))
    on = f" of {_listed(replicas, 'replica')}" if replicas != [1] else ""
    on += f" of {_listed(shards, 'shard')}" if shards != [1] else ""
    stages = range(1, max(space.stages) + 1) if on and len(space.stages) > 1 else space.stages
    known = f"; {searched} of these arrangements {'was' if searched == 1 else 'were'} searched"
    return (
        f"It is chosen from {_listed(stages, 'stage')}{on}, microbatches of "
        f"{_listed(sizes, 'sample')} and schedule {' or '.join(space.schedules)}{known if searched else ''}."
    )


def left_out(sizes: Sequence[int], arrangements: int) -> Iterator[str]:
    """Yield a sentence about the sizes and arrangements that were not searched, if any."""
    if arrangements or sizes:
        of = f"microbatches of {_listed(sizes, 'sample')}" if sizes else ""
        others = f"{counted(arrangements, 'other arrangement')} that may be faster" if arrangements else ""
        left = " and ".join(filter(None, (of, others)))
        yield (f"The search stopped before {left}: --stages, --microbatch-size and --schedule narrow it.")


def _listed(numbers: Sequence[int], noun: str) -> str:
    """Return `1 stage`, `3 or 4 stages`, `1, 2 or 4 stages`, or `1 to 8 stages` for many in a row."""
    last = counted(numbers[-1], noun)
    if len(numbers) > 3 and tuple(numbers) == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {last}"
    others = ", ".join(map(str, numbers[:-1]))
    return f"{others} or {last}" if others else last
