"""Training runs that profile: which stages were run together, what each needed, kept on file from run to run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipefit.cluster import Cluster
from pipefit.errors import FileError, InfeasibleError
from pipefit.profiler.partitionings import Interval, Stages
from pipefit.profiles import ModelProfile
from pipefit.schedule.whole_stages import Recompute
from pipefit.training import Training
from pipefit.units import format_bytes

RunProgress = Callable[[int, int, Stages], None]  # runs done, runs planned by now, the stages of the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run: bytes of every stage, None for one that did not fit or could not end for another's sake; and
    what was said when a device passed its cap.
    """

    peaks: tuple[int | None, ...]
    failure: str = ""


class Runs:
    """Outcomes by run, on file.

    Args:
        path: a JSON file; outcomes in it are used, and every new one is added at once.
        how: the kind of runs; another kind's file is refused.
        progress: called before every run.

    Raises:
        FileError: the file holds runs of another kind, model, training or cluster, or cannot be read or written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        how: str,
        profile: ModelProfile,
        cluster: Cluster,
        training: Training,
        recompute: Recompute,
        progress: RunProgress | None,
    ) -> None:
        self.path, self.progress, self.profile, self.cluster = Path(path), progress, profile, cluster
        self.asked = {
            "runs": how,
            "model": profile.fingerprint,
            "training": asdict(training),
            "recompute": recompute,
            "budgets": list(cluster.budgets),
        }
        self.expected = 0
        self.outcomes: dict[Stages, Outcome] = self._load() if self.path.exists() else {}

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
        """The peak of a stage of these layers, in the first run that measured it."""
        for stages, outcome in self.outcomes.items():
            if interval in stages and (peak := outcome.peaks[stages.index(interval)]) is not None:
                return peak
        return None

    def needed(self, interval: Interval) -> int:
        """The peak of a stage of these one or two layers.

        Raises:
            InfeasibleError: it fitted in no run.
        """
        peak = self.peak(interval)
        if peak is None:
            raise self.too_large(interval)
        return peak

    def too_large(self, interval: Interval) -> InfeasibleError:
        """What to raise where no run had these one or two layers in a stage that fitted."""
        names = self.profile.layers[slice(*interval)]
        what = f"layer {names[0]} alone" if len(names) == 1 else f"layers {' and '.join(names)} together"
        failure = next((o.failure for o in reversed(self.outcomes.values()) if o.failure), "")
        said = f". The last run that did not fit: {failure}" if failure else ""
        return InfeasibleError(
            f"{self.profile.model} cannot be profiled on {self.cluster.name}: in no run did {what} fit on a device of "
            f"{format_bytes(max(self.cluster.budgets))}; profile with smaller microbatches, or on larger devices{said}"
        )

    # ---------------------------------------------------------------- the file

    def _load(self) -> dict[Stages, Outcome]:
        try:
            found = json.loads(self.path.read_text())
            asked, outcomes = found["asked"], dict(map(_outcome, found["runs"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileError(f"{self.path} is no record of profiling runs ({error}): delete it to begin anew") from None
        if asked != json.loads(json.dumps(self.asked)):
            raise FileError(
                f"{self.path} holds runs of another kind, model, training or cluster: name another file, or delete it"
            )
        return outcomes

    def _save(self) -> None:
        """Replace the file as a whole."""
        runs = [{"stages": stages, **asdict(outcome)} for stages, outcome in self.outcomes.items()]
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            beside.write_text(json.dumps({"asked": self.asked, "runs": runs}))
            beside.replace(self.path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise FileError(f"{self.path} cannot be written: {error.strerror}") from None


def _outcome(run: dict[str, Any]) -> tuple[Stages, Outcome]:
    """One entry of the file.

    Raises:
        ValueError: it has not as many peaks as stages.
    """
    stages = tuple((int(start), int(stop)) for start, stop in run["stages"])
    peaks = tuple(None if peak is None else int(peak) for peak in run["peaks"])
    if len(stages) != len(peaks):
        raise ValueError(f"a run of {len(stages)} stages has {len(peaks)} peaks")
    return stages, Outcome(peaks=peaks, failure=str(run["failure"]))
