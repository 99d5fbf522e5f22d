"""Training runs for profiling: the stages that ran together and their peaks, saved after every run.

A file holds runs made under equal conditions: kind of runs, model, blocks, data, optimizer, training,
devices, torch and threads. If a condition differs, the file is refused, and the error says which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from pipefit.errors import FileError, InfeasibleError, UsageError
from pipefit.lowering import Recompute
from pipefit.planner import surroundings
from pipefit.schema.cluster import Cluster
from pipefit.schema.file_access import content, replace_file
from pipefit.schema.json_text import checked
from pipefit.schema.profile import Fingerprint, ModelProfile, differences
from pipefit.schema.training import Training
from pipefit.texts import counted
from pipefit.units import format_bytes

# ---- Stages to run together, so that the bytes of every block can be separated from its neighbors'
#
# A block here is a layer in the papers; L is the number of blocks and G the number of devices.
#
# **Whole models.** For every block l some run must have (a) l alone on a device, and, except for the first
# block, for some n < l, as small as the number of runs allows, (b) blocks n to l - 1 on a device and (c)
# blocks n to l on a device.
#
# With S = L - G, G >= 4 and L >= 2 G, the S + 1 = L - G + 1 runs k = 0 ... S do:
#
#     [0..k] [k+1] ... [k+a] [k+a+1 .. S+a+1] [S+a+2] ... [L-1]        a = max(1, G - 2 - k)
#
# that is, a growing first stage, `a` blocks alone, a second long stage, and the rest alone; but run S - 2 is
#
#     [0..S-2] [S-1] [S, S+1] [S+2, S+3] [S+4] ... [L-1]
#
# Proof. All have G stages: 2 + a + (G - 2 - a), and 4 + (G - 4). (a) Block 0 is alone in run 0, block k + 1
# in run k, as a >= 1; blocks S + 2 ... L - 1 in run S, whose second long stage is one block. (b), (c) Blocks
# 1 ... S: n = 0, in runs l - 1 and l. Block S + 1: n = S; [S] is in run S - 1, [S, S+1] in run S - 2. Block S
# + 2: n = S + 1; [S+1] is in run S, [S+1, S+2] in run S - 1, where a = 1. Blocks S + 1 + i for i = 2 ... G -
# 2: n = G - 1; in run k = G - 2 - i the second long stage is [G-1 .. S+1+i], in run k + 1 it is [G-1 .. S+i].
# Both precede run S - 2, as k + 1 <= G - 3 < S - 2.
#
# On three devices L - G + 1 runs are not enough: each block except the first and the last is alone in one
# split only, which makes L - 2 runs, and none of them has a longer stage that ends with block L - 2. There, L
# runs are enough, each with n = 0: the first blocks, the next one alone, the rest. If L < 2 G, only max(4, L
# // 2) devices are used; a model of fewer than eight blocks is padded with empty ones, which are left out of
# the runs. (mCAP, section 3.2; the paper chose its runs, and padded, partly manually.)
#
# **Trimmed models.** With n = l - 1 for every block, only each of L blocks alone and each of L - 1 pairs is
# needed; the rest is left out. G of these 2 L - 1 stages fit into a run if they share no block: ceil((2 L -
# 1) / G) runs, but at least three, as a block and its two pairs are in three runs. First fit finds this
# number, or four if it is three. (CAPSlog, PDP 2024, takes 15 runs for L = 42 on G = 8; these are 11.)

Edges = tuple[int, ...]  # stage s holds blocks edges[s] to edges[s + 1] - 1
Interval = tuple[int, int]  # blocks start to stop - 1, on one device
Stages = tuple[Interval, ...]  # run together, in the model's order, each on a separate device

_FEWEST = 4  # devices for which L - G + 1 runs are proven to be enough


def partitionings(blocks: int, devices: int) -> list[Edges]:
    """Return the runs in order: `blocks - devices + 1` of them if that is possible.

    Raises:
        UsageError: as `check_devices`.
    """
    check_devices(devices)
    if devices < _FEWEST or blocks <= _FEWEST:
        return _on_three(blocks)
    used = min(devices, max(_FEWEST, blocks // 2))
    padded = max(blocks, 2 * used)
    runs = [_edges(_lengths(padded, used, run)) for run in range(padded - used + 1)]
    return list(dict.fromkeys((*(edge for edge in edges if edge < blocks), blocks) for edges in runs))


def check_devices(devices: int) -> None:
    """Check that incremental runs can be made on this number of devices.

    Raises:
        UsageError: fewer than three, on which no block inside the model can be alone.
    """
    if devices < 3:
        raise UsageError(
            f"incremental profiling needs at least three devices, not {devices}: one for a single block, "
            "and one each for the blocks before and after it; trimmed runs need only one device"
        )


def trimmed(blocks: int, devices: int) -> list[Stages]:
    """Return runs of at most `devices` stages, with every block and every pair of blocks once.

    Raises:
        UsageError: `devices` is less than 1.
    """
    if devices < 1:
        raise UsageError("profiling needs at least one device")
    pairs = [(start, start + 2) for first in (0, 1) for start in range(first, blocks - 1, 2)]
    waiting = [*pairs, *((block, block + 1) for block in range(blocks))]
    runs: list[Stages] = []
    while waiting:
        run: list[Interval] = []
        for interval in waiting:
            if len(run) < devices and not any(_overlap(interval, other) for other in run):
                run.append(interval)
        waiting = [interval for interval in waiting if interval not in run]
        runs.append(tuple(sorted(run)))
    return runs


def _lengths(blocks: int, devices: int, run: int) -> list[int]:
    """Return the lengths of the stages in run number `run`."""
    spare = blocks - devices
    if run == spare - 2:
        return [run + 1, 1, 2, 2, *[1] * (devices - 4)]
    alone = max(1, devices - 2 - run)
    return [run + 1, *[1] * alone, spare - run + 1, *[1] * (devices - 2 - alone)]


def _on_three(blocks: int) -> list[Edges]:
    """Return runs of three stages: the first blocks, the next alone, the rest."""
    return [_edges([n for n in (run, 1, blocks - run - 1) if n]) for run in range(1, blocks)] + [(0, blocks)]


def _edges(lengths: list[int]) -> Edges:
    return (0, *accumulate(lengths))


def _overlap(one: Interval, other: Interval) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def intervals(edges: Edges) -> Stages:
    """Return first block and stop of every stage."""
    return tuple(pairwise(edges))


# ---- Outcomes, and their file

_LARGEST_BYTES = 64 << 20  # size of a record, at most
RunProgress = Callable[[int, int, Stages], None]  # runs done, runs planned so far, the stages of the next run


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run: the peak of every stage in bytes, and the message of a device that exceeded its cap.

    A peak is None if the stage did not fit, or if its run ended early because another stage did not fit.
    """

    peaks: tuple[int | None, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConditions:
    """Everything that the peaks of training runs depend on, except the stages."""

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

    def differences(self, other: RunConditions, names: Sequence[str]) -> list[str]:
        """Return the differences from `other`, as phrases; `names` are the layers' names."""
        result = [
            f"{one}, not {two}" for one, two in zip(self._phrases, other._phrases, strict=True) if one != two
        ]
        result += self.training.differences(other.training)
        model = differences(self.fingerprint, other.fingerprint, names)
        if not model and self.edges != other.edges:
            model = ["other blocks of layers, such as those of a task with another granularity"]
        if not result and not model and self.sizes != other.sizes:
            model = ["operations of other sizes"]
        return [*result, *model]

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
    """Check that all stages on a cluster need equal memory, whatever their place.

    Raises:
        UsageError: they do not, which additive costs cannot express; or the schedule does not exist.
    """
    stages = len(cluster.devices)
    met = [
        surroundings(training.schedule, stage, stages, training.microbatches, recompute)
        for stage in range(stages)
    ]
    if len(set(met)) > 1:
        raise UsageError(
            f"under {training.schedule} a stage's memory depends on its position in the pipeline, which two "
            "numbers for each block cannot express: profile, plan and train under gpipe"
        )


def conditions(
    kind: str, profile: ModelProfile, cluster: Cluster, training: Training, recompute: Recompute
) -> RunConditions:
    """Return the conditions of runs of the model of `profile`.

    Raises:
        UsageError: a stage's memory depends on its place in the pipeline, which additive costs cannot
            express.
    """
    check_places(cluster, training, recompute)
    taken = profile.assumptions
    return RunConditions(
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
    """Outcomes of runs, saved in a file.

    Args:
        path: a JSON file; outcomes in it are used, and every new one is added at once.
        kind: the kind of the runs; another kind's file is refused.
        progress: called before every run.

    Raises:
        UsageError: a schedule under which a stage's memory depends on its place in the pipeline.
        FileError: the file holds runs under other conditions, which the message names; or it cannot be read
            or written.
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
        """Make the run and save its outcome, unless it was made before."""
        if stages in self.outcomes:
            return
        if self.progress is not None:
            self.expected = max(self.expected, len(self.outcomes) + 1)
            self.progress(len(self.outcomes), self.expected, stages)
        self.outcomes[stages] = run()
        self._save()

    def peak(self, interval: Interval) -> int | None:
        """Return the peak of a stage of these blocks, from the first run that measured it; None if none
        did.
        """
        for stages, outcome in self.outcomes.items():
            if interval in stages and (peak := outcome.peaks[stages.index(interval)]) is not None:
                return peak
        return None

    def needed(self, interval: Interval) -> int:
        """Return the peak of a stage of these one or two blocks.

        Raises:
            InfeasibleError: no run measured it.
        """
        peak = self.peak(interval)
        if peak is None:
            raise self.too_large(interval)
        return peak

    def too_large(self, interval: Interval, hint: str = "") -> InfeasibleError:
        """Return the error if every run with these one or two blocks exceeded a cap; `hint` is appended."""
        names = self.profile.block_names[slice(*interval)]
        what = f"{names[0]} alone" if len(names) == 1 else f"{' and '.join(names)} together"
        failures = [o.failure for stages, o in self.outcomes.items() if interval in stages and o.failure]
        said = f". The last failure: {failures[-1]}" if failures else ""
        return InfeasibleError(
            f"{self.profile.model} cannot be profiled on {self.cluster.name}: every run with {what} on a "
            f"device exceeded a device's memory{hint}; profile with smaller microbatches, or on larger or "
            f"more devices{said}"
        )

    # ---------------------------------------------------------------- the file

    def _load(self) -> dict[Stages, Outcome]:
        try:
            result = json.loads(content(self.path, "it", _LARGEST_BYTES, "records have"))
            run_conditions = checked(RunConditions, result["conditions"], f"the conditions in {self.path}")
            outcomes = dict(map(_outcome, result["runs"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, FileError) as error:
            raise FileError(
                f"{self.path} is not a record of profiling runs ({error}): delete it to start again"
            ) from None
        unlike = run_conditions.differences(self.conditions, self.profile.layers)
        if unlike:
            raise FileError(
                f"{self.path} holds runs made for {'; '.join(unlike)}: name another file, or delete it to "
                "start again"
            )
        return outcomes

    def _save(self) -> None:
        """Replace the whole file."""
        runs = [{"stages": stages, **asdict(outcome)} for stages, outcome in self.outcomes.items()]
        try:
            replace_file(
                self.path, json.dumps({"conditions": asdict(self.conditions), "runs": runs}).encode()
            )
        except OSError as error:
            raise FileError(f"{self.path} cannot be written: {error.strerror}; name another file") from None


def _outcome(run: dict[str, Any]) -> tuple[Stages, Outcome]:
    """Return one entry of the file.

    Raises:
        ValueError: its number of peaks differs from its number of stages.
    """
    stages = tuple((int(start), int(stop)) for start, stop in run["stages"])
    peaks = tuple(None if peak is None else int(peak) for peak in run["peaks"])
    if len(stages) != len(peaks):
        raise ValueError(f"a run of {counted(len(stages), 'stage')} has {counted(len(peaks), 'peak')}")
    return stages, Outcome(peaks=peaks, failure=str(run["failure"]))
