"""Launches the workers of a plan on this machine and supervises them.

There is one process for each device in use. Each has a pipe to the parent and a heartbeat that the parent can
read. Workers wait for each other without a timeout; the parent decides which one hangs, because it knows the
action of each worker, and whether that action waits for others. The parent reports only the root cause of a
failure and stops all other workers.

The workers meet through an anonymous file in memory: no port is needed that another program may use, and
nothing is left of the file when they end. For several machines, use `torchrun` with a script around
`pipefit.Trainer`. A failed training is restarted by `runtime.launch.restarts`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import current_process
from multiprocessing.connection import Connection, wait
from multiprocessing.resource_tracker import ensure_running

from pipefit.checkpoints import Hold
from pipefit.errors import (
    LimitMet,
    NotSaved,
    OutOfMemory,
    PeerLost,
    PipefitError,
    PipefitWarning,
    UsageError,
    WorkerFailed,
)
from pipefit.lowering import Entered, whole_run
from pipefit.memory import arenas_of, members, tensor_groups
from pipefit.processes import ENDING, addresses, files, processes
from pipefit.runtime.checkpoint.background_saver import SaveReport
from pipefit.runtime.checks.plan_check import TRAINED, warn_elsewhere
from pipefit.runtime.comm.transport import new_token
from pipefit.runtime.engine.execution import Programs
from pipefit.runtime.launch.forks import (
    Inherited,
    Passed,
    Started,
    check_room,
    forks,
    obstacle,
    orphans_adopted,
    start,
)
from pipefit.runtime.launch.worker import (
    BUILDING,
    IN_A_STEP,
    PHASES,
    RENDEZVOUS,
    SAVES_TOGETHER,
    STARTING,
    Assignment,
    Heartbeat,
    MakeTrainer,
    Orders,
    work,
)
from pipefit.runtime.offload.lending import check_lending, lending_trace
from pipefit.runtime.options import StepReport
from pipefit.runtime.trainer import Trainer
from pipefit.schema.actions import COLLECTIVE, COPIES, MESSAGES, Action, collective, message_of
from pipefit.schema.plan import Plan
from pipefit.schema.trace import DeviceTrace, Trace
from pipefit.texts import counted

# ---- Slow links
# A worker that waits in silence may wait for another that computes, which is fine, or for one that hangs,
# which is found at its own action. If all participants of a message or collective have begun it, only the
# link between them, or a process that stalls in the middle of it, is left to blame. The supervisor knows this
# from the actions of all workers.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPosition:
    """Position of a worker: at action `number` of its `actions` in a step.

    A negative `number` is outside of all actions.
    """

    step: int
    number: int
    actions: Sequence[Action]


def waited_for(plan: Plan, device: int, positions: Mapping[int, WorkerPosition]) -> tuple[int, ...]:
    """Return the devices that share the message or collective for which `device` waits.

    The result is empty if it waits for none, or a participant has not begun it yet. `positions` are by
    device.
    """
    here = positions[device]
    if not 0 <= here.number < len(here.actions) or not here.actions[here.number].wait:
        return ()
    awaited, ends = _exchange(plan, device, here.actions[here.number])
    others = tuple(end for end in ends if end != device)
    return others if all(_has_begun(plan, end, positions[end], here.step, awaited) for end in others) else ()


def _exchange(plan: Plan, device: int, action: Action) -> tuple[Hashable, tuple[int, ...]]:
    """Return a key of an action's message or collective, equal for all participants, and the participants."""
    if action.kind in MESSAGES:
        message = message_of(device, action, plan.placement)
        return message, (message.source, message.target)
    if action.kind in COLLECTIVE:
        return (collective(action), action.microbatch), members(plan, action)
    return None, ()


def _has_begun(plan: Plan, device: int, there: WorkerPosition, step: int, awaited: Hashable) -> bool:
    if there.step != step:
        return there.step > step and there.number >= 0
    begun = there.actions[: max(there.number, 0)]
    return any(_exchange(plan, device, action)[0] == awaited for action in begun if not action.wait)


# ---- Root causes
# When one worker fails, others fail soon after, because their connections break; while one hangs, others wait
# for it in silence. The parent distinguishes them from the culprit by the states of all workers.


class ProcessDied(WorkerFailed):
    """A process that ended without a report."""


class Aborted(ProcessDied):
    """A process on a GPU that was aborted, as NCCL's watchdog does after waiting for another in vain."""


def died(code: int | None, *, starting: bool, building: bool = False, on_gpu: bool = False) -> ProcessDied:
    """Return the error for a worker whose pipe ended without a report.

    `code` is its exit code, None if it still runs. `building` says that it was before its first step, when
    libraries start their threads.
    """
    if on_gpu and code == -signal.SIGABRT:
        return Aborted(
            "aborted (signal 6), as NCCL does if another worker ends or hangs; its output shows the reason"
        )
    if code is None:
        return ProcessDied("it closed its pipe without a report, but is still running")
    if code == -signal.SIGKILL:
        return ProcessDied(
            "killed by signal 9 (SIGKILL), usually by the system because memory ran out: see dmesg, and "
            "memory.max for the limit of a control group"
        )
    if code == -signal.SIGABRT and building:
        limits = ", ".join(filter(None, (processes(), files(), addresses())))
        return ProcessDied(
            "aborted (signal 6), usually because a library could not start a thread or open a file; its "
            f"output shows the reason{limits and f': {limits}'}"
        )
    if code < 0:
        return ProcessDied(f"killed by signal {-code} ({signal.strsignal(-code)})")
    if code == 1 and starting:
        return ProcessDied(
            "it could not be started; its output shows the reason. A script must call train under `if "
            "__name__ == '__main__':`"
        )
    return ProcessDied(f"its process exited with code {code}")


def root_cause(failures: Mapping[int, tuple[PipefitError, float]]) -> int:
    """Return the rank whose failure caused the others, of `failures`: error and time by rank.

    A process that died comes before a worker's own error, then a process that was aborted on a GPU, then one
    that lost its peer; among several of a kind, the earliest.
    """

    def order(rank: int) -> tuple[int, float]:
        error, when = failures[rank]
        return _order(error), when

    return min(failures, key=order)


def _order(error: PipefitError) -> int:
    """Return the sort key of a failure: causes before consequences."""
    match error:
        case Aborted():
            return 2
        case ProcessDied():
            return 0
        case PeerLost():
            return 3
    return 1


class Watch:
    """A clock that counts at most `longest` seconds between two calls of `now`.

    A program that was stopped, as Ctrl-Z stops it together with its workers, or that got no processor time,
    thus does not count that time as silence of the workers.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._seconds, self._before = 0.0, clock()

    def now(self) -> float:
        """Return the seconds counted so far."""
        now = self._clock()
        self._seconds += min(now - self._before, self._longest)
        self._before = now
        return self._seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """State of an unfinished worker.

    It has the time since its last sign of life, and the limit for its present action. `waits` says that the
    action waits for others, so that its silence does not mean that it hangs.
    """

    rank: int
    silent_seconds: float
    limit_seconds: float
    waits: bool


def hanging(unfinished: Sequence[Sighting]) -> int | None:
    """Return the rank that hangs, of all workers that have not finished; None if they may still continue.

    It is silent for longer than its limit and does not wait for others. If all are silent for too long and
    all wait, it is the one with the longest silence.
    """
    silent = [worker for worker in unfinished if worker.silent_seconds > worker.limit_seconds]
    blamed = [worker for worker in silent if not worker.waits]
    if not blamed and len(silent) == len(unfinished):
        blamed = silent
    longest = max(blamed, key=lambda worker: worker.silent_seconds, default=None)
    return None if longest is None else longest.rank


# ---- Signals held back while processes start and stop


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C and other signals with a handler in the context; the first takes effect at its end.

    Processes that are started in the context ignore Ctrl-C for good: a terminal sends it to all, and the
    parent stops them.
    """
    came = list[signal.Signals]()

    def hold(number: int, frame: object) -> None:
        came.append(signal.Signals(number))

    # A handler too: another thread may get the signal, and Python then runs the handler in the main thread.
    ours = threading.current_thread() is threading.main_thread()
    usual = {number: handler for number in ENDING if ours and callable(handler := signal.getsignal(number))}
    try:
        for number in usual:
            signal.signal(number, hold)
        with suppress(OSError):  # an error here will occur again at the start of a process
            ensure_running()  # otherwise multiprocessing starts its tracker inside, and unblocks SIGINT
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # new processes inherit the block
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


# ---- The supervisor

OnStep = Callable[[StepReport], None]
OnSaved = Callable[[SaveReport], None]
_POLL_SECONDS = 0.5  # between two readings of the heartbeats
_LOOK_SECONDS = 2 * _POLL_SECONDS  # the most that counts as time between two readings
_GRACE_SECONDS = 3.0  # for reports of other workers after the first failure
_END_SECONDS = 5.0  # for a worker to end after it has delivered its trace
_ENDING_SECONDS = 30.0  # for a worker to end after it has closed its pipe; with a GPU this takes longer


def check_startable() -> None:
    """Check that workers can be started by this process.

    Raises:
        UsageError: this is not Linux, or a daemonic process, which may not start any.
    """
    if not hasattr(os, "memfd_create"):
        raise UsageError(
            "worker processes need Linux: here, train in one process with pipefit.Trainer, or start a "
            "script under torchrun"
        )
    if current_process().daemon:
        raise UsageError(
            "a daemonic process, such as those of multiprocessing.Pool, cannot start workers: call train "
            "in a process with daemon=False, such as those of concurrent.futures.ProcessPoolExecutor"
        )


def launch(
    task: bytes,
    plan: Plan,
    ordered: Orders,
    *,
    on_step: OnStep,
    on_saved: OnSaved | None,
    trainer: MakeTrainer,
    hold: Hold | None = None,
) -> Trace:
    """Train once by `ordered`, with workers that each build the pickled task; return the measured trace.

    The arguments are those of `runtime.launch.restarts.train`; the first worker shares the `hold` of the
    checkpoint folder, which lasts as long as one of both processes runs.

    Raises:
        PipefitError: the root cause, if a worker failed; the reason why the last checkpoint was not written.
    """
    check_lending(plan, whole_run(plan))
    warn_elsewhere(plan.profile.assumptions, TRAINED)
    supervisor = _Supervisor(plan, ordered, on_step, on_saved, trainer, hold)
    with orphans_adopted():
        try:
            supervisor.start(task)
            supervisor.until_done()
        finally:
            with interrupts_held():
                supervisor.stop()
    trace = supervisor.trace()
    if supervisor.unsaved is not None:
        raise NotSaved(supervisor.unsaved, trace)
    return trace


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker as the parent sees it."""

    process: Started
    pipe: Connection
    heartbeat: Heartbeat
    last_sign: float = 0.0  # on the parent's watch
    beats: int = 0
    result: tuple[DeviceTrace, tuple[float, ...]] | None = None
    error: PipefitError | None = None

    def look(self, now: float) -> None:
        """Read the heartbeat: note the time if the worker has begun another action."""
        if self.heartbeat.beats != self.beats:
            self.beats, self.last_sign = self.heartbeat.beats, now


def _heard(workers: Sequence[_Worker], seconds: float) -> list[_Worker]:
    """Return the workers with a report, or that have ended; wait for a report for at most `seconds`."""
    ready = wait([worker.pipe for worker in workers], timeout=seconds)
    return [worker for worker in workers if worker.pipe in ready or worker.process.exit_code() is not None]


@dataclass
class _Supervisor:
    """The parent's side: starts the workers, collects their reports, and finds the root cause of a
    failure.
    """

    plan: Plan
    orders: Orders
    on_step: OnStep
    on_saved: OnSaved | None
    trainer: MakeTrainer = Trainer
    hold: Hold | None = None
    workers: list[_Worker] = field(default_factory=list)
    watch: Watch = field(default_factory=lambda: Watch(_LOOK_SECONDS))
    token: str = field(default_factory=new_token)  # authenticates the workers to each other
    meeting: int | None = None  # the file through which the workers meet
    unsaved: str | None = None  # why the last checkpoint of the training was not written
    failed_saves: set[int] = field(default_factory=set)  # steps of unwritten checkpoints that were reported
    slow: set[frozenset[int]] = field(default_factory=set)  # devices whose slow links were reported
    stands_still: bool = False  # whether a host's lack of room for copies was reported

    def start(self, task: bytes) -> None:
        """Start all workers.

        Raises:
            LimitMet: the system refuses to start one.
        """
        ranks = len(self.plan.workers)
        try:
            check_room(ranks)
        except OSError as error:
            raise LimitMet(f"{counted(ranks, 'worker')} cannot be started: {obstacle(error)}") from error
        for rank in range(ranks):
            try:
                self._start(task, rank)
            except OSError as error:
                raise LimitMet(f"worker {rank} of {ranks} cannot be started: {obstacle(error)}") from error

    def _start(self, task: bytes, rank: int) -> None:
        """Start one worker; `stop` finds it even if this is interrupted."""
        if self.meeting is None:
            self.meeting = os.memfd_create("pipefit-meeting")  # ends with the last process that has it open
        meeting, context = Passed(self.meeting), forks()
        assignment = Assignment(
            task=task,
            plan=self.plan,
            rank=rank,
            orders=self.orders.absolute,
            meeting=meeting,
            token=self.token,
            trainer=self.trainer,
            hold=None if self.hold is None or rank else Passed(self.hold.file),
        )
        ours, theirs = context.Pipe(duplex=False)
        heartbeat = Heartbeat(context)
        process = context.Process(
            target=work,
            args=(assignment, Inherited.here(), theirs, heartbeat),
            daemon=True,
            name=f"pipefit-worker-{rank}",
        )
        with theirs, interrupts_held():
            start(process)
            self.workers.append(_Worker(Started(process), ours, heartbeat, self.watch.now()))

    def until_done(self) -> None:
        """Wait until every worker has delivered its trace.

        Raises:
            PipefitError: the root cause, if a worker failed.
        """
        while waiting := [worker for worker in self.workers if worker.result is None]:
            heard = _heard(waiting, _POLL_SECONDS)
            seen = list(self._sightings(heard, self.watch.now()))  # before `on_step`, which may take any time
            hangs = hanging(seen)
            for worker in heard:
                self._hear(worker)
            if any(worker.error for worker in waiting):
                self._raise_cause()
            if hangs is not None:
                raise self._hang(hangs)
            for sighting in seen:
                self._look_at_link(sighting)

    def stop(self) -> None:
        """Stop all workers and close their file. Workers do not outlive the call."""
        for worker in self.workers:
            if worker.result is None:
                worker.process.kill()
        for worker in self.workers:
            worker.process.exit_code(_END_SECONDS)
            worker.process.kill()  # in case it has delivered its trace but does not end
            worker.process.exit_code(_ENDING_SECONDS)
            worker.pipe.close()
        if self.meeting is not None:
            os.close(self.meeting)

    def trace(self) -> Trace:
        results = {worker.result[0].device: worker.result[0] for worker in self.workers if worker.result}
        seconds = [worker.result[1] for worker in self.workers if worker.result]
        arenas = arenas_of(self.plan, whole_run(self.plan))
        devices = tuple(
            results.get(n) or lending_trace(self.plan, n, arenas)
            for n in range(len(self.plan.cluster.devices))
        )
        return Trace(
            source="measured",
            steps=self.orders.steps - self.orders.first,
            devices=devices,
            step_seconds=tuple(map(max, zip(*seconds, strict=True))),
        )

    # ---------------------------------------------------------------- reports of workers

    def _hear(self, worker: _Worker) -> None:
        try:
            if not worker.pipe.poll():  # it has ended, and a process that it has started keeps its pipe open
                raise EOFError
            kind, *words = worker.pipe.recv()
        except (EOFError, OSError):
            code, action = worker.process.exit_code(_ENDING_SECONDS), worker.heartbeat.action
            worker.error = died(
                code,
                starting=action == STARTING,
                building=action in (STARTING, RENDEZVOUS, BUILDING),
                on_gpu=self.plan.cluster.backend == "cuda",
            )
            return
        finally:
            worker.last_sign = self.watch.now()
        if kind == "step":
            self.on_step(*words)
        elif kind == "saved":
            self._hear_saved(*words)
        elif kind == "warning":
            warnings.warn(words[0], PipefitWarning, stacklevel=2)
        elif kind == "unsaved":
            self._hear_unsaved(*words)
        elif kind == "done":
            worker.result = tuple(words)
        elif kind == "error":
            error, message, traceback, found = words
            worker.error = error(message)
            worker.error.add_note(traceback)
            if isinstance(worker.error, OutOfMemory):
                worker.error.post_mortem = found

    def _hear_saved(self, saved: SaveReport) -> None:
        """Handle a worker's report of a save; warn once if training stood still for lack of room."""
        if saved.shortage and not self.stands_still:
            self.stands_still = True
            warnings.warn(saved.shortage, PipefitWarning, stacklevel=2)
        if self.on_saved is not None:
            self.on_saved(saved)

    def _hear_unsaved(self, step: int, why: str) -> None:
        """Handle the report of an unwritten checkpoint: warn once per step.

        Keep the reason if it is the last checkpoint.
        """
        if step == self.orders.steps:
            self.unsaved = self.unsaved or why
        elif step not in self.failed_saves:
            self.failed_saves.add(step)
            warnings.warn(why, PipefitWarning, stacklevel=2)

    def _raise_cause(self) -> None:
        """Give the other workers a moment to report, then raise the root cause."""
        until = time.monotonic() + _GRACE_SECONDS
        while (rest := until - time.monotonic()) > 0:
            pending = [w for w in self.workers if w.error is None and w.result is None]
            if not pending:
                break
            for worker in _heard(pending, min(rest, _POLL_SECONDS)):
                self._hear(worker)
        failures = {n: (w.error, w.last_sign) for n, w in enumerate(self.workers) if w.error is not None}
        raise self._error_of(root_cause(failures))

    def _error_of(self, rank: int) -> PipefitError:
        """Return the error of a failed worker, with the worker's name and its action."""
        error = self.workers[rank].error
        assert error is not None
        if not isinstance(error, WorkerFailed):
            return error  # its message names the place
        kind = next((one for one in (PeerLost, LimitMet) if isinstance(error, one)), WorkerFailed)
        failure = kind(f"{self._name(rank)} failed {self._place(rank)}: {error}; all workers were stopped")
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        return failure

    def _name(self, rank: int) -> str:
        device = self.plan.workers[rank]
        stages = [self.plan.stages[stage] for stage in self.plan.stages_of(device)]
        held = ", ".join(self.plan.profile.named(stage.start, stage.stop) for stage in stages)
        return f"worker {rank} (device {device}, {held})"

    # ---------------------------------------------------------------- positions of workers

    @cached_property
    def _programs(self) -> Programs:
        return Programs(self.plan)

    def _actions(self, rank: int) -> Sequence[Action]:
        """Return the actions of a worker in its present step, or those that drain the pipeline after it."""
        heartbeat, training = self.workers[rank].heartbeat, self.plan.training
        empties = training.endless and heartbeat.empties
        entered = (
            Entered(heartbeat.step * training.microbatches, heartbeat.step) if training.endless else Entered()
        )
        program = self._programs.training(0 if empties else training.microbatches, entered, update=True)
        return program.actions[self.plan.workers[rank]]

    def _place(self, rank: int) -> str:
        """Describe the present action of a worker."""
        number, actions = self.workers[rank].heartbeat.action, self._actions(rank)
        if number >= len(actions):
            return "at the end of a step"
        return PHASES.get(number) or f"at {actions[number]}"

    def _waits(self, rank: int) -> bool:
        """Return whether a worker waits for others, so that its silence does not mean that it hangs.

        Waiting for copies of saved tensors is not waiting for others.
        """
        number, actions = self.workers[rank].heartbeat.action, self._actions(rank)
        if not 0 <= number < len(actions):
            return number in (RENDEZVOUS, SAVES_TOGETHER, IN_A_STEP) or number >= len(actions)
        return actions[number].wait and actions[number].kind not in COPIES

    def _limit(self, rank: int) -> tuple[float, str]:
        """Return the seconds that a worker may be silent at its action, and their argument of `train`."""
        if self.workers[rank].heartbeat.action in (STARTING, RENDEZVOUS, BUILDING):
            return self.orders.options.start_seconds, "start_seconds"
        return self.orders.options.timeout_seconds, "timeout_seconds"

    def _sightings(self, heard: Sequence[_Worker], now: float) -> Iterator[Sighting]:
        """Yield the states of workers that have not finished; a worker with an unread report is not
        silent.
        """
        for rank, worker in enumerate(self.workers):
            worker.look(now)
            if worker.result is None:
                yield Sighting(
                    rank=rank,
                    silent_seconds=0.0 if worker in heard else now - worker.last_sign,
                    limit_seconds=self._limit(rank)[0],
                    waits=self._waits(rank),
                )

    def _link(self, rank: int) -> tuple[int, ...]:
        """Return the devices that share the transfer for which a worker waits, if all have begun it."""
        beats = {self.plan.workers[n]: (worker.heartbeat, n) for n, worker in enumerate(self.workers)}
        positions = {
            device: WorkerPosition(step=beat.step, number=beat.action, actions=self._actions(n))
            for device, (beat, n) in beats.items()
        }
        return waited_for(self.plan, self.plan.workers[rank], positions)

    def _look_at_link(self, seen: Sighting) -> None:
        """Warn, once per set of devices, if a worker waits long in a transfer that all have begun."""
        if (
            not seen.waits
            or seen.silent_seconds < seen.limit_seconds / 2
            or not (others := self._link(seen.rank))
        ):
            return
        ends = frozenset((self.plan.workers[seen.rank], *others))
        if ends not in self.slow:
            self.slow.add(ends)
            warnings.warn(
                f"{self._name(seen.rank)} has waited {seen.silent_seconds:.0f} s {self._place(seen.rank)} "
                f"for device {' or '.join(map(str, others))}, which has started the same transfer: the link "
                "between them is slow. Training continues, unless no worker makes progress for "
                f"{seen.limit_seconds:g} s ({self._limit(seen.rank)[1]})",
                PipefitWarning,
                stacklevel=2,
            )

    def _together(self, rank: int) -> str:
        """Describe others that may hang instead of a worker: its link, or devices of its tensor group.

        The worker may wait for its tensor group within an action.
        """
        device = self.plan.workers[rank]
        if ends := self._link(rank):
            return f", or its link with device {' or '.join(map(str, ends))},"
        others = {one for group in tensor_groups(self.plan) if device in group for one in group} - {device}
        return f", or device {' or '.join(map(str, sorted(others)))} of its tensor group," if others else ""

    def _hang(self, rank: int) -> WorkerFailed:
        seconds, name = self._limit(rank)
        return WorkerFailed(
            f"{self._name(rank)}{self._together(rank)} hangs {self._place(rank)}: no sign of life for "
            f"{seconds:g} s; all workers were stopped. If it only needs more time, raise {name} (--timeout "
            "on the command line)"
        )
