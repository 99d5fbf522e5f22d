"""The chain of a task over fake tensors, which have the shapes of the model's tensors but no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture import Chain, capture
from pipefit.capture.chain import ChainLayer
from pipefit.capture.copying import copied
from pipefit.capture.refused_modules import copy_of, refuse_module
from pipefit.capture.sample import Sample, in_mode
from pipefit.capture.task import Task
from pipefit.fake.target import FakeTarget
from pipefit.profiles import Target


def fake_chain(
    task: Task, fake: FakeTarget, sample: Sample, *, training: bool = True, target: Target | None = None
) -> Chain:
    """The task's chain for microbatches like `sample`, over fake tensors on `fake.device`. Call it inside `fake`.

    An existing module is copied, not changed. `target` is where the chain will run, by default that of `fake`.
    """
    return capture(faked(task, fake, training=training), *sample, target=target or fake.target)


def chain_again(chain: Chain, fake: FakeTarget) -> Chain:
    """`chain`, of which no layer has run, with tensors of its own: as if it were made again, in a tenth of the time.

    Call it inside `fake`.
    """
    return replace(chain, layers=layers_again(chain.layers, fake))


def layers_again(layers: Sequence[ChainLayer], fake: FakeTarget) -> tuple[ChainLayer, ...]:
    """The same of some layers. Call it inside `fake`."""
    own = copied(nn.ModuleList(layer.module for layer in layers), fake.again).children()
    return tuple(replace(layer, module=module) for layer, module in zip(layers, own, strict=True))


def faked(task: Task, fake: FakeTarget, *, training: bool = True) -> Task:
    """`task` with its module over fake tensors. Call it inside `fake`."""
    module = task.module if isinstance(task.module, nn.Module) else built_without_bytes(task, fake)
    refuse_module(module, task.name)  # before it is copied, for a copy does not show all
    module = copy_of(module, task.name, fake.fake)
    _start_counting(module, fake)
    return replace(task, module=in_mode(module, training))


def built_without_bytes(task: Task, fake: FakeTarget) -> nn.Module:
    """The module that the task's factory builds inside `fake`.

    A factory that reads numbers from a tensor builds it on torch's `meta` device instead.
    """
    try:
        with fake.assuming_nothing():
            return task.build()
    except DataDependentOutputException:
        with _disable_current_modes(), torch.device("meta"):
            return task.build()


def _start_counting(module: nn.Module, fake: FakeTarget) -> None:
    """A batch norm without momentum averages over all batches: it reads how many there were."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.momentum is None and part.track_running_stats:
            assert part.num_batches_tracked is not None
            fake.set_value(part.num_batches_tracked, 0)
