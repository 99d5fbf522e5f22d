"""Training by workers, restarted from its last checkpoint when one of them fails.

A restart costs the start of the workers, a few seconds, and the steps since the last checkpoint, which are
trained again with the same losses. Only the failure of a worker leads to a restart: errors that would occur
again, such as an out-of-memory error of a device, a limit of the system that workers meet as they start, or a
wrong argument, end the training. This is torchrun's `--max-restarts`, with the addition of checkpoints and
new plans.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Unpack

from pipefit.capture import Task
from pipefit.checkpoints import Candidates, Hold, new_owner, set_aside
from pipefit.errors import (
    DamagedCheckpoint,
    FileError,
    LimitMet,
    NotSaved,
    PeerLost,
    PipefitError,
    PipefitWarning,
    UsageError,
    WorkerFailed,
)
from pipefit.runtime.launch.launch import (
    OnSaved,
    OnStep,
    check_startable,
    launch,
)
from pipefit.runtime.launch.worker import MakeTrainer, Orders, not_finite, orders
from pipefit.runtime.options import OnNan, StepReport, TrainArguments, TrainOptions
from pipefit.runtime.trainer import Trainer
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Trace
from pipefit.schema.validation import instance
from pipefit.texts import counted, printable

_STARTS = 5  # starts of workers that lose each other before their first step
Replan = Callable[[Plan], Plan]


def train(
    task: Callable[[], Task],
    plan: Plan,
    *,
    steps: int,
    on_step: OnStep | None = None,
    on_saved: OnSaved | None = None,
    replan: Replan | None = None,
    trainer: MakeTrainer = Trainer,
    **options: Unpack[TrainArguments],
) -> tuple[list[float], Trace]:
    """Train for `steps` steps in all with one worker process per device.

    Return losses and measured trace of this run.

    Args:
        task: builds the task in each worker; must be picklable (a function of a module, or a
            `functools.partial` of one).
        on_step: called with a `StepReport` as each step ends: its mean loss, its seconds and the peaks of all
            devices. Steps that are trained again are reported again.
        on_saved: called with the costs of a save, by each worker, when its training goes on after it.
        replan: called with the plan before every start; the plan that it returns is trained. It can adapt the
            plan to the devices that are left (`pipefit.plan_again`).
        trainer: makes the trainer of each worker; must be picklable.
        options: the fields of `TrainOptions`: seed, limits of time, checkpoints, restarts.

    Raises:
        OutOfMemory: a device passed its cap; the message names the action.
        WorkerFailed: a worker died, hung, raised or could not be started; the message names it.
        LossNotFinite: a loss is infinite or nan, and `on_nan` is `stop`.
        NotSaved: the checkpoint after the last step is not written; it has losses and trace.
        FileError: the plan, or the checkpoint, was made for another model, or a file cannot be used; or
            another training saves to the folder.
        UsageError: the task cannot be sent to the workers, or a number is out of range; or the model computes
            other numbers as a chain than as a module.
    """
    instance("plan", plan, Plan, "pipefit.load reads one")
    train_options = TrainOptions.named(options)
    plan = plan if replan is None else replan(plan)
    resume, saving = train_options.resume, train_options.saving
    source = resume if resume is None or isinstance(resume, Candidates) else Candidates(resume)
    ordered = partial(orders, plan, train_options, steps=steps, resume=source, owner=new_owner(plan.headline))
    begun = ordered()
    if saving is not None:
        saving.check(plan)
    pickled = pickled_task(task)
    check_startable()
    with _held(begun) as hold:
        run = partial(launch, pickled, on_saved=on_saved, trainer=trainer, hold=hold)
        starts = _Starts(begun, ordered, source)
        told = _Losses(starts.first().first, on_step, train_options.on_nan)
        return told.losses, _restarted(run, plan, starts, told, train_options.restarts, replan)


def _restarted(
    run: Callable[..., Trace],
    plan: Plan,
    starts: _Starts,
    told: _Losses,
    restarts: int,
    replan: Replan | None,
) -> Trace:
    """Return the trace of a training that restarts at most `restarts` times after failures of workers."""
    start, saving, restart = starts.begun, starts.begun.options.saving, 0
    while True:
        try:
            return _connected(partial(run, plan, start, on_step=told.step), told)
        except DamagedCheckpoint as error:  # the checkpoint to start from
            start = starts.before(error)
            told.begin(start.first)
            continue
        except PipefitError as error:
            if saving is None:
                raise
            if isinstance(error, NotSaved):
                error.losses = told.losses
            failure, again = f"{error}; {saving.reached(told.steps_done)}", start
            in_vain = (
                isinstance(error, LimitMet) and told.steps_done == start.first
            )  # the next start meets it too
            may_restart = isinstance(error, WorkerFailed) and restart < restarts and not in_vain
            if may_restart:
                again = starts.newest()
            if not may_restart or again.first == start.steps:
                error.args = (f"{failure}{saving.way_on}",)
                raise
            start = again
        restart += 1
        plan = plan if replan is None else _planned_again(replan, plan, failure)
        told.go_on(
            start.first,
            f"{failure}; restart {restart} of {restarts} continues after step {start.first}",
            plan,
        )


@contextmanager
def _held(start: Orders) -> Iterator[Hold | None]:
    """Hold the folder to which this training saves in the context, so that no other training saves there.

    Raises:
        FileError: another training holds it.
    """
    if start.options.saving is None or start.owner is None:
        yield None
        return
    hold = Hold(pathlib.Path(start.options.saving.directory), start.owner)
    hold.busy = True
    try:
        yield hold
    finally:
        hold.release()


class _Starts:
    """Orders for the starts of a training: from its beginning, or from the newest checkpoint of its own run.

    Args:
        begun: the orders of the first start.
        ordered: makes them again, from the newest checkpoint of `source` that was not skipped.
        source: the checkpoints to continue from, if any.
    """

    def __init__(self, begun: Orders, ordered: Callable[[], Orders], source: Candidates | None) -> None:
        self.begun, self._ordered, self._source = begun, ordered, source
        self._own: Candidates | None = None  # checkpoints of this training, if it starts from one

    def first(self) -> Orders:
        """Return the orders of the first start, after checking the owner of the checkpoint folder.

        Raises:
            UsageError: it has one.
        """
        self._set_aside(self._source)
        saving, owner = self.begun.options.saving, self.begun.owner
        if saving is not None and owner is not None:
            saving.check_owner(self.begun.first, owner)
        return self.begun

    def newest(self) -> Orders:
        """Return the orders of a start after a failure."""
        saving, owner = self.begun.options.saving, self.begun.owner
        assert saving is not None
        assert owner is not None
        self._own = Candidates(saving.directory, run=owner.run, above=self.begun.first)
        return self._from_own()

    def before(self, error: DamagedCheckpoint) -> Orders:
        """Return the orders of a start after the last one found its checkpoint damaged.

        Raises:
            FileError: another checkpoint to start from is missing.
        """
        if self._own is not None:
            self._own.pass_over(error)
            return self._from_own()
        if self._source is None:
            raise error
        self._source.pass_over(error)
        self.begun = self._ordered()
        self._set_aside(self._source)
        return self.begun

    def _from_own(self) -> Orders:
        assert self._own is not None
        again = replace(self.begun, options=replace(self.begun.options, numbers=False))
        try:
            again = again.after(self._own.take())
        except FileError:
            self._own.tell(f"training starts from the beginning, after step {again.first}")
            self._set_aside(self._own)
            self._own = None
            return again
        self._set_aside(self._own)
        return again

    def _set_aside(self, source: Candidates | None) -> None:
        """Rename damaged checkpoints in the folder of this training: the next ones may be of their steps."""
        if source is not None and self.begun.options.saving is not None:
            set_aside(pathlib.Path(self.begun.options.saving.directory), source.damaged)


def _connected(run: Callable[[], Trace], told: _Losses) -> Trace:
    """Return the trace of a launch, repeated if workers lose each other before their first step.

    It is repeated only if none of them fails alone. This drops a stranger that has taken the place of a
    worker while they connected.
    """
    before = told.steps_done
    for start in range(2, _STARTS + 1):
        try:
            return run()
        except PeerLost as error:
            if told.steps_done > before:
                raise
            _warn(f"{error}; no worker failed on its own, so they connect again: start {start} of {_STARTS}")
    return run()


def _planned_again(replan: Replan, plan: Plan, failure: str) -> Plan:
    try:
        return replan(plan)
    except PipefitError as error:
        error.args = (f"{failure}; training does not restart: {error}",)
        raise


class _Losses:
    """Losses that the parent has received, and its warnings about them."""

    def __init__(self, first: int, on_step: OnStep | None, on_nan: OnNan) -> None:
        self.losses = list[float]()
        self._first, self._on_step, self._warns = first, on_step, on_nan == "warn"

    @property
    def steps_done(self) -> int:
        """Number of steps with known losses, including those before this training."""
        return self._first + len(self.losses)

    def step(self, report: StepReport) -> None:
        """Handle the report of a finished step."""
        self.losses.append(report.loss)
        if not isfinite(report.loss) and self._warns:
            self._warns = False  # the following steps have the same weights
            _warn(f"{not_finite(report.step, report.loss)}. Training continues; --on-nan stop would end it")
        if self._on_step is not None:
            self._on_step(report)

    def begin(self, first: int) -> None:
        """Begin after `first` steps: forget the losses of later steps."""
        del self.losses[max(0, first - self._first) :]
        self._first = min(first, self._first)

    def go_on(self, first: int, why: str, plan: Plan) -> None:
        """Continue after `first` steps, under that plan, with a warning."""
        self.begin(first)
        _warn(f"{why}, with {counted(len(plan.workers), 'worker')} on {printable(plan.cluster.name)}")


def _warn(text: str) -> None:
    warnings.warn(text, PipefitWarning, stacklevel=4)


def pickled_task(task: Callable[[], Task]) -> bytes:
    """Return the bytes from which every worker builds the task.

    Raises:
        UsageError: the task cannot be pickled.
    """
    if not callable(task):
        raise UsageError(
            "every worker builds its own task: pass a function that returns the task, not a "
            f"{type(task).__name__}"
        )
    _check_script(task)
    try:
        return pickle.dumps(task)
    except Exception as error:
        raise UsageError(
            f"the task cannot be sent to the workers ({error}): pass a function of a module, or a "
            "functools.partial of such a function"
        ) from error


def _check_script(task: Callable[[], Task]) -> None:
    """Check that workers can import the module of `task`.

    They run the file of the main script again, if there is one.

    Raises:
        UsageError: the script came from standard input, or `task` from a notebook or a prompt.
    """
    script, function = sys.modules["__main__"], task
    while isinstance(function, partial):
        function = function.func
    file = getattr(script, "__file__", None)
    if file is None and getattr(function, "__module__", None) != script.__name__:
        return
    if file is None or (script.__spec__ is None and not os.path.isfile(file)):
        raise UsageError(
            "workers cannot read a task that is not in a file "
            f"({file or 'a notebook, a prompt or python -c'}): write the task into a file, and call train "
            "in a script under `if __name__ == '__main__':`, or import the task"
        )
