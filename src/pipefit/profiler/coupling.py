"""Detection of coupled samples: a local batch then gives other numbers than its rows in the whole microbatch.

Replicas of a stage compute local batches, so such a model trains to other numbers on replicas than on one
device. Known operators are detected while each kind of layer runs over fake tensors: batch norm with batch
statistics, random draws, and losses with class weights. All other cases, such as in-batch negatives, a sum
over samples, or a mean over the words that count, show in numbers: real microbatches, and their halves, run
forward through a copy of the module on one core. If that would need more than `LONGEST_SECONDS` or
`MOST_BYTES`, random outputs run through the loss alone; the rest is then compared when the trainer starts
(`runtime.checks.comparison`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture.comparison import evaluated
from pipefit.capture.model import built, is_chain
from pipefit.capture.sample import Sample, check_samples, sample
from pipefit.capture.task import Task
from pipefit.errors import PipefitError
from pipefit.runtime.checks.comparison import host_bytes, host_seconds
from pipefit.runtime.checks.loss import SMALLEST, left_out, rounding
from pipefit.runtime.hardware import free_bytes
from pipefit.schema.profile import Measurement, ModelProfile
from pipefit.torch_internals import pytree

LONGEST_SECONDS = 1.0
MOST_BYTES, MOST_LOGITS_BYTES = 1 << 30, 1 << 28
_SAMPLES, _SEEDS = 4, (0, 1)
_NORMALIZES = "normalizes over the batch"
_WEIGHS = "divides by the weights of the targets that a slice has"
_APART = "is another one for a microbatch than its halves have on average"
_TRAINING, _SHARES = frozenset({"train", "training"}), ("p", "dropout_p", "dropout")  # names of arguments
_WEIGHING = "aten::nll_loss_forward", "aten::nll_loss2d_forward"
_LEAVES_OUT = "is a mean over targets, of which some samples have fewer that count"
_MEAN = 1  # the number of the reduction "mean" in torch


def coupling(func: Any, given: Mapping[str, Any]) -> str:
    """Return why an operator call couples samples, as a phrase to follow a layer's name, or "".

    `given` are the call's arguments by name.
    """
    name = func._schema.name
    if "batch_norm" in name and "backward" not in name:
        spreads = given["input"].shape[0] > 1  # an instance norm passes one row to this kernel
        return _NORMALIZES if spreads and (_trains(given) or "with_update" in name) else ""
    if name in _WEIGHING and given.get("weight") is not None and given.get("reduction") == _MEAN:
        return _WEIGHS
    return ""


def draws(func: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()} | dict(given)
    shares = [given[share] for share in _SHARES if isinstance(given.get(share), float)]
    return (_trains(given) or _TRAINING.isdisjoint(given)) and 0.0 not in shares


def _trains(given: Mapping[str, Any]) -> bool:
    return any(given.get(flag) is True for flag in _TRAINING)


def with_coupling(profile: ModelProfile, reason: str) -> ModelProfile:
    """Return the profile, with its loss marked as coupled if `measured_coupling` returned a `reason`."""
    if not reason:
        return profile
    measurements = (replace(one, loss=replace(one.loss, coupled=reason)) for one in profile.measurements)
    return replace(profile, measurements=tuple(measurements))


def measured_coupling(task: Task, profile: ModelProfile) -> str:
    """Return why the loss of a microbatch is not the mean of the losses of its halves, or "".

    Also returns "" if layers are already known to be coupled, or if the comparison is impossible: batches or
    kernels fail, or it would take too long.
    """
    largest = max(profile.measurements, key=lambda one: one.microbatch_size)
    if profile.coupled:
        return ""
    every = (*largest.costs, largest.loss)
    trains = not any(cost.alone or cost.draws for cost in every)  # otherwise two forwards are equal in evaluation only
    tried = _through_the_module(task) if _is_cheap(largest) else _through_the_loss(task, largest)
    with _one_thread(), warnings.catch_warnings(), suppress(PipefitError):
        warnings.simplefilter("ignore")
        if left_out(
            [leaf for leaf in pytree.tree_leaves(sample(task, _SAMPLES)) if isinstance(leaf, Tensor)], _SAMPLES
        ):
            return _LEAVES_OUT
        return next((_APART for whole, batch in tried if _is_apart(whole, batch, training=trains)), "")
    return ""


def _through_the_module(task: Task) -> Iterator[tuple[Task, Sample]]:
    """Yield the task with its module built, and small batches."""
    whole = built(task)
    for seed in _SEEDS:
        batch = sample(whole, _SAMPLES, seed=seed)
        check_samples(batch, _SAMPLES, whole.name)
        yield whole, batch


def _through_the_loss(task: Task, measurement: Measurement) -> Iterator[tuple[Task, Sample]]:
    """Yield a task that consists of the loss, and random tensors like the module's outputs."""
    samples, (last, *others) = measurement.microbatch_size, measurement.costs[-1].outputs
    nbytes = last.nbytes * _SAMPLES // samples
    if task.loss is None or others or last.shape[:1] != (samples,) or nbytes > MOST_LOGITS_BYTES:
        return
    alone = replace(task, module=nn.Identity())
    for seed in _SEEDS:
        generator = torch.Generator().manual_seed(seed)
        outputs = task.cast(torch.randn(_SAMPLES, *last.shape[1:], generator=generator))
        yield alone, (outputs, sample(task, _SAMPLES, seed=seed)[1])


def _is_apart(whole: Task, batch: Sample, *, training: bool) -> bool:
    """Return whether a batch's loss differs from the mean of its halves; False if that cannot be determined."""
    assert isinstance(whole.module, nn.Module)
    half = len(next(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))) // 2
    asked = [batch, batch, _rows(batch, 0, half), _rows(batch, half, 2 * half)]
    one, again, *parts = evaluated(whole, asked, traced=not is_chain(whole.module), training=training)
    mean = sum(parts) / len(parts)
    largest = max(abs(one), abs(mean), SMALLEST)
    return one == again and isfinite(mean) and abs(mean - one) > rounding(whole.precision or "float32") * largest


def _rows(batch: Sample, first: int, end: int) -> Sample:
    found: Sample = pytree.tree_map_only(Tensor, lambda tensor: tensor[first:end], batch)
    return found


def _is_cheap(measurement: Measurement) -> bool:
    """Return whether a comparison is cheap, judged by the costs of this microbatch in training."""
    share = len(_SEEDS) * _SAMPLES / measurement.microbatch_size
    needed = host_bytes(measurement) * max(1, _SAMPLES // measurement.microbatch_size)
    return share * host_seconds(measurement) <= LONGEST_SECONDS and needed <= min(MOST_BYTES, free_bytes() // 2)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run kernels in the body on one thread, so a process forked later does not miss threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
