"""Training runs made to profile a model: which stages ran together and what each needed, saved after every run.

A file holds runs made under the same conditions: kind of runs, model, blocks, data, optimizer, training, devices, torch
and threads. If one of them differs, the file is refused, and the error says which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipefit.cluster import Cluster
from pipefit.errors import FileError, InfeasibleError, UsageError
from pipefit.fingerprints import Fingerprint, differences
from pipefit.planner.closed_forms.surroundings import surroundings
from pipefit.profiler.partitionings import Interval, Stages
from pipefit.profiles import ModelProfile
from pipefit.readable import content
from pipefit.schedule.recompute_settings import Recompute
from pipefit.texts import counted
from pipefit.training import Training
from pipefit.units import format_bytes
from pipefit.validation import validated
from pipefit.writable import replace_file

_LARGEST_BYTES = 64 << 20  # of a record
RunProgress = Callable[[int, int, Stages], None]  # runs done, runs planned by now, the stages of the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run: the peak of every stage in bytes, and the message of a device that passed its cap.

    A peak is None if the stage did not fit, or if its run ended early because another stage did not fit.
    """

    peaks: tuple[int | None, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """All that the peaks of training runs depend on, besides the stages."""

    __pydantic_config__ = {"extra": "forbid"}

    kind: str  # incremental or trimmed
    fingerprint: Fingerprint
    edges: tuple[int, ...]  # the first layer of every block, and the number of layers
    sizes: str  # `Measurement.sizes` of this microbatch size
    training: Training
    recompute: str
    budgets: tuple[int, ...]  # bytes of every device
    target: str
    torch: str
    threads: int

    def differences(self, other: Conditions, names: Sequence[str]) -> list[str]:
        """How these differ from `other`, as phrases; `names` are those of the layers."""
        found = [f"{one}, not {two}" for one, two in zip(self._phrases, other._phrases, strict=True) if one != two]
        found += self.training.differences(other.training)
        model = differences(self.fingerprint, other.fingerprint, names)
        if not model and self.edges != other.edges:
            model = ["other blocks of layers, as a task of another granularity has"]
        if not found and not model and self.sizes != other.sizes:
            model = ["operations of other sizes"]
        return [*found, *model]

    @property
    def _phrases(self) -> tuple[str, ...]:
        devices = ", ".join(map(format_bytes, self.budgets))
        return (
            f"{self.kind} runs",
            f"{counted(len(self.budgets), 'device')} of {devices}",
            f"kernels of {self.target}",
            f"torch {self.torch}",
            counted(self.threads, "thread"),
            f"recompute {self.recompute}",
        )


def check_places(cluster: Cluster, training: Training, recompute: Recompute) -> None:
    """Check that all stages on a cluster take the same memory, whatever their place.

    Raises:
        UsageError: they do not, which additive costs cannot express; or there is no such schedule.
    """
    stages = len(cluster.devices)
    met = [surroundings(training.schedule, stage, stages, training.microbatches, recompute) for stage in range(stages)]
    if len(set(met)) > 1:
        raise UsageError(
            f"under {training.schedule} a stage's memory depends on its place in the pipeline, which two numbers for "
            "each block cannot express: profile, plan and train under gpipe"
        )


def conditions(
    kind: str, profile: ModelProfile, cluster: Cluster, training: Training, recompute: Recompute
) -> Conditions:
    """The conditions of runs of the model of `profile`.

    Raises:
        UsageError: a stage's memory depends on its place in the pipeline, which additive costs cannot express.
    """
    check_places(cluster, training, recompute)
    taken = profile.assumptions
    return Conditions(
        kind=kind,
        fingerprint=profile.fingerprint,
        edges=profile.edges,
        sizes=profile.at(training.microbatch_size).sizes,
        training=training,
        recompute=recompute,
        budgets=cluster.budgets,
        target=taken.target,
        torch=taken.torch,
        threads=taken.threads,
    )


class Runs:
    """Outcomes by run, on file.

    Args:
        path: a JSON file; outcomes in it are used, and every new one is added at once.
        kind: of the runs; another kind's file is refused.
        progress: called before every run.

    Raises:
        UsageError: a schedule under which a stage's memory depends on its place in the pipeline.
        FileError: the file holds runs under other conditions, and which; or it cannot be read or written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        profile: ModelProfile,
        cluster: Cluster,
        training: Training,
        recompute: Recompute,
        progress: RunProgress | None,
    ) -> None:
        self.path, self.progress, self.profile, self.cluster = Path(path), progress, profile, cluster
        self.training, self.recompute = training, recompute
        self.conditions = conditions(kind, profile, cluster, training, recompute)
        self.expected = 0
        self.outcomes: dict[Stages, Outcome] = self._load() if os.path.exists(path) else {}

    def attempt(self, stages: Stages, run: Callable[[], Outcome]) -> None:
        """Makes the run and saves what came of it, unless it was made before."""
        if stages in self.outcomes:
            return
        if self.progress is not None:
            self.expected = max(self.expected, len(self.outcomes) + 1)
            self.progress(len(self.outcomes), self.expected, stages)
        self.outcomes[stages] = run()
        self._save()

    def peak(self, interval: Interval) -> int | None:
        """The peak of a stage of these blocks, in the first run that measured it."""
        for stages, outcome in self.outcomes.items():
            if interval in stages and (peak := outcome.peaks[stages.index(interval)]) is not None:
                return peak
        return None

    def needed(self, interval: Interval) -> int:
        """The peak of a stage of these one or two blocks.

        Raises:
            InfeasibleError: it was measured in no run.
        """
        peak = self.peak(interval)
        if peak is None:
            raise self.too_large(interval)
        return peak

    def too_large(self, interval: Interval, hint: str = "") -> InfeasibleError:
        """What to raise where every run with these one or two blocks in a stage of their own passed a cap; `hint` says
        what would do.
        """
        names = self.profile.block_names[slice(*interval)]
        what = f"{names[0]} alone" if len(names) == 1 else f"{' and '.join(names)} together"
        failures = [o.failure for stages, o in self.outcomes.items() if interval in stages and o.failure]
        said = f". The last of them: {failures[-1]}" if failures else ""
        return InfeasibleError(
            f"{self.profile.model} cannot be profiled on {self.cluster.name}: every run with {what} on a device passed "
            f"a device's memory{hint}; profile with smaller microbatches, or on larger or more devices{said}"
        )

    # ---------------------------------------------------------------- the file

    def _load(self) -> dict[Stages, Outcome]:
        try:
            found = json.loads(content(self.path, "it", _LARGEST_BYTES, "records have"))
            made = validated(Conditions, found["conditions"], f"the conditions in {self.path}")
            outcomes = dict(map(_outcome, found["runs"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, FileError) as error:
            raise FileError(f"{self.path} is no record of profiling runs ({error}): delete it to begin anew") from None
        unlike = made.differences(self.conditions, self.profile.layers)
        if unlike:
            raise FileError(
                f"{self.path} holds runs made for {'; '.join(unlike)}: name another file, or delete it to begin anew"
            )
        return outcomes

    def _save(self) -> None:
        """Replace the file as a whole."""
        runs = [{"stages": stages, **asdict(outcome)} for stages, outcome in self.outcomes.items()]
        try:
            replace_file(self.path, json.dumps({"conditions": asdict(self.conditions), "runs": runs}).encode())
        except OSError as error:
            raise FileError(f"{self.path} cannot be written: {error.strerror}; name another file") from None


def _outcome(run: dict[str, Any]) -> tuple[Stages, Outcome]:
    """One entry of the file.

    Raises:
        ValueError: it has not as many peaks as stages.
    """
    stages = tuple((int(start), int(stop)) for start, stop in run["stages"])
    peaks = tuple(None if peak is None else int(peak) for peak in run["peaks"])
    if len(stages) != len(peaks):
        raise ValueError(f"a run of {counted(len(stages), 'stage')} has {counted(len(peaks), 'peak')}")
    return stages, Outcome(peaks=peaks, failure=str(run["failure"]))
