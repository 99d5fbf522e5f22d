"""Training by workers, started again from its last checkpoint when one of them fails.

Good for machines on which processes are killed or hang now and then. A restart costs the start of the workers, a few
seconds, and the steps since the last checkpoint, which are trained again and give the same losses. Only the failure of
a worker is answered by a restart: what would happen again, such as a lack of memory on a device or a mistake in the
question, ends the training. (torchrun's `--max-restarts`, but for the way to the checkpoint and the plan.)
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isfinite

from pipefit.capture.task import Task
from pipefit.errors import NotSaved, PeerLost, PipefitError, PipefitWarning, UsageError, WorkerFailed
from pipefit.plans import Plan
from pipefit.runtime.callbacks import StepReport
from pipefit.runtime.launch import START_SECONDS, OnSaved, OnStep, launch
from pipefit.runtime.orders import OnNan, Orders, Path, orders
from pipefit.runtime.saving import Saving
from pipefit.runtime.worker import not_finite
from pipefit.texts import counted, printable
from pipefit.trace import Trace
from pipefit.validation import LONGEST_SECONDS, instance, number, whole

_STARTS = 5  # of workers that lose each other before they have done a step
Replan = Callable[[Plan], Plan]


def train(
    task: Callable[[], Task],
    plan: Plan,
    *,
    steps: int,
    seed: int | None = None,
    timeout_seconds: float = 60.0,
    start_seconds: float = START_SECONDS,
    numbers: bool = True,
    share_device: bool = False,
    cap: bool = True,
    on_step: OnStep | None = None,
    on_nan: OnNan = "warn",
    saving: Saving | None = None,
    resume: Path | None = None,
    weights: Path | None = None,
    on_saved: OnSaved | None = None,
    restarts: int = 0,
    replan: Replan | None = None,
) -> tuple[list[float], Trace]:
    """Train for `steps` steps in all with one worker process per device; the losses and measured trace of this run.

    Args:
        task: builds the task in each worker; must be picklable (a function of a module, or a `functools.partial` of
            one).
        seed: of weights, data and dropout: 0, or that of the checkpoint, unless given.
        timeout_seconds: the longest that a worker may take for one action, or to make a batch. It may wait for others
            as long as they take. A GPU's work is queued, so there it is the longest for a whole step.
        start_seconds: the longest that a worker may take to start, and to build its layers.
        numbers: whether worker 0 compares a traced model with its chain before it is trained, as a `Trainer` does.
        share_device: whether all workers compute on this machine's first GPU, with messages by way of the host.
        cap: whether GPUs reserve no more memory than the plan's devices have for it; False leaves all of theirs.
        on_step: called with a `StepReport` as each step ends: its mean loss, its seconds and the peaks of all devices.
            Steps that are trained again are told again.
        on_nan: whether a loss that is infinite or nan is told in a warning (`warn`), or ends the training (`stop`).
        saving: where checkpoints go and when; None for none.
        resume: a checkpoint, or a folder of which the newest whole one is meant, from which the training goes on.
        weights: a safetensors file, or a folder with a sharded model, whose parameters and buffers the training starts
            from.
        on_saved: called with what a save took, by each worker, as training goes on after it.
        restarts: how often the training may start again from its last checkpoint after a worker has failed. Each
            restart is told in a warning. The trace is that of the last start.
        replan: called with the plan before every start; the plan that it returns is trained. It is the place to look
            at what devices are left (`pipefit.plan_again`).

    Raises:
        OutOfMemory: a device passed its cap; the message says where.
        WorkerFailed: a worker died, hung, raised or could not be started; the message names it.
        LossNotFinite: a loss is infinite or nan, and `on_nan` says `stop`.
        NotSaved: a checkpoint is not written as the training ends, and `saving` says `stop`; it has losses and trace.
        FileError: the plan, or the checkpoint, was made for another model, or a file cannot be used.
        UsageError: the task cannot be sent to the workers, or a number is out of range; or the model computes other
            numbers as a chain than as a module.
    """
    instance("plan", plan, Plan, "pipefit.load reads one")
    for what, seconds in (("timeout_seconds", timeout_seconds), ("start_seconds", start_seconds)):
        number(what, seconds, below=LONGEST_SECONDS)
    if whole("restarts", restarts, 0) and saving is None:
        raise UsageError("a restart goes on from a checkpoint: say where they are saved (saving; --save DIR)")
    plan = plan if replan is None else replan(plan)
    start = orders(
        plan,
        steps=steps,
        seed=seed,
        numbers=numbers,
        share_device=share_device,
        cap=cap,
        on_nan=on_nan,
        resume=resume,
        weights=weights,
        saving=saving,
    )
    run = partial(
        launch, pickled_task(task), timeout_seconds=timeout_seconds, start_seconds=start_seconds, on_saved=on_saved
    )
    told = _Told(start.first, on_step, on_nan)
    restart = 0
    while True:
        try:
            return told.losses, _connected(partial(run, plan, start, on_step=told.step), told)
        except PipefitError as error:
            if saving is None:
                raise
            if isinstance(error, NotSaved):
                error.losses = told.losses
            start, failure = _from_newest(start, saving), f"{error}; {saving.reached(told.steps_done)}"
            if not isinstance(error, WorkerFailed) or restart == restarts or start.first == steps:
                error.args = (f"{failure}{saving.way_on}",)
                raise
        restart += 1
        plan = plan if replan is None else _planned_again(replan, plan, failure)
        told.go_on(start.first, f"{failure}; restart {restart} of {restarts} goes on after step {start.first}", plan)


def _connected(run: Callable[[], Trace], told: _Told) -> Trace:
    """The trace of a launch, which is made anew where workers have lost each other before their first step, and none
    has failed by itself: a stranger has taken the place of one as they connected, and is dropped so.
    """
    before = told.steps_done
    for start in range(2, _STARTS + 1):
        try:
            return run()
        except PeerLost as error:
            if told.steps_done > before:
                raise
            _warn(f"{error}; none of them has failed by itself, so they connect anew: start {start} of {_STARTS}")
    return run()


def _from_newest(start: Orders, saving: Saving) -> Orders:
    """The orders of a training that goes on from its newest checkpoint, or begins as before if it has saved none.

    Checkpoints that were there before it began are not its own.
    """
    again = replace(start, numbers=False)
    newest = saving.newest
    if newest is None or newest[0] <= start.first:
        return again
    return replace(again, first=newest[0], resume=str(newest[1]), weights=None)


def _planned_again(replan: Replan, plan: Plan, failure: str) -> Plan:
    try:
        return replan(plan)
    except PipefitError as error:
        error.args = (f"{failure}; it does not start again: {error}",)
        raise


class _Told:
    """What the parent has heard of steps, and what it tells of them."""

    def __init__(self, first: int, on_step: OnStep | None, on_nan: OnNan) -> None:
        self.losses = list[float]()
        self._first, self._on_step, self._warns = first, on_step, on_nan == "warn"

    @property
    def steps_done(self) -> int:
        """Steps whose losses are known, those before this training included."""
        return self._first + len(self.losses)

    def step(self, report: StepReport) -> None:
        """A step has ended."""
        self.losses.append(report.loss)
        if not isfinite(report.loss) and self._warns:
            self._warns = False  # the steps behind it have the same weights
            _warn(f"{not_finite(report.step, report.loss)}. Training goes on; --on-nan stop would end it")
        if self._on_step is not None:
            self._on_step(report)

    def go_on(self, first: int, why: str, plan: Plan) -> None:
        """The training goes on after `first` steps, under that plan."""
        del self.losses[first - self._first :]
        _warn(f"{why}, with {counted(len(plan.workers), 'worker')} on {printable(plan.cluster.name)}")


def _warn(text: str) -> None:
    warnings.warn(text, PipefitWarning, stacklevel=4)


def pickled_task(task: Callable[[], Task]) -> bytes:
    """The bytes from which every worker builds its own task.

    Raises:
        UsageError: there can be none.
    """
    if not callable(task):
        raise UsageError(
            f"every worker builds its own task: pass a function that returns it, not a {type(task).__name__}"
        )
    _check_script(task)
    try:
        return pickle.dumps(task)
    except Exception as error:
        raise UsageError(
            f"the task cannot be sent to the workers ({error}): pass a function of a module, or a functools.partial "
            "of one"
        ) from error


def _check_script(task: Callable[[], Task]) -> None:
    """Check that workers can read what `task` is part of: they run the file of the main script again, if it has one.

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
            f"workers cannot read what is in no file ({file or 'a notebook, a prompt or python -c'}): write the task "
            'into a file, and call train in a script under `if __name__ == "__main__":`, or import the task'
        )
