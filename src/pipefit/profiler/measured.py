"""The measured profiler: seconds for a profile, from runs of every kind of layer on a real device.

Bytes come from the fake profiler, which is exact. This profiler times the forward, backward and update of
each kind, one layer after the other, on the task's own data. So the device needs memory for one layer, and
the host for the whole model; for two models if a function does not build the task's module, because an
existing module is copied, not used. On a GPU, seconds are measured between events on the GPU, not by kernel
launches on the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture import Chain, Task, Values, capture, in_mode, on_a_copy
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.measure import HostWatch, Stopwatch, threads_of
from pipefit.profiler.fake import Progress
from pipefit.runtime import (
    Copied,
    GraphEnds,
    MasterWeights,
    WeightCopy,
    backward,
    check_backwards,
    copied_weights,
    enter,
    leave,
    make_optimizer,
    using,
)
from pipefit.schema.layer_costs import LayerCost
from pipefit.schema.profile import Measurement, ModelProfile, Target
from pipefit.tensor_parallel import Alone, shard_chain

_WARM_UPS = 2
_LEAST_REPEATS, _MOST_REPEATS = 3, 20
_LEAST_SECONDS = 0.1  # for the repeats of one layer, unless they reach _MOST_REPEATS


def add_seconds(
    profile: ModelProfile, task: Task, *, device: torch.device, threads: int, progress: Progress | None = None
) -> ModelProfile:
    """Return `profile` with the seconds of every kind of layer on `device`, at each of its microbatch sizes.

    Raises:
        UsageError: there is no CUDA device to measure on.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "this machine does not have a CUDA device to measure on: use --device fake or --device cpu"
        )
    check_backwards([device])
    copied = on_a_copy(task)
    copied = replace(copied, module=in_mode(copied.build(), True))
    with threads_of(threads):
        measured = tuple(_LayerTimer(copied, m, device, progress).measure() for m in profile.measurements)
    assumptions = replace(profile.assumptions, device=str(device))
    return replace(profile, measurements=measured, assumptions=assumptions)


class _LayerTimer:
    """Runs and times layers."""

    def __init__(
        self, task: Task, measurement: Measurement, device: torch.device, progress: Progress | None
    ) -> None:
        self.task, self.measurement, self.device, self.progress = task, measurement, device, progress
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        self.watch: Any = Stopwatch(device, time.perf_counter) if device.type == "cuda" else HostWatch()
        self.inputs, self.targets = sample(task, measurement.microbatch_size)
        target: Target = "cuda" if device.type == "cuda" else "cpu"
        chain = capture(task, self.inputs, self.targets, target=target)
        self.chain = _of_rank(chain, measurement, self.inputs, self.targets).measured(measurement)

    def measure(self) -> Measurement:
        """Return the measurement with seconds."""
        measurement, targets = self.measurement, self.chain.flatten_targets(self.targets)
        values: Values = tuple(value.to(self.device) for value in self.chain.flatten(self.inputs))
        timed: dict[int, LayerCost] = {}
        for number, (layer, kind) in enumerate(zip(self.chain.layers, measurement.layers, strict=True)):
            if self.progress is not None:
                self.progress(number, len(self.chain.layers), layer.name)
            layer.module.to(self.device)
            if kind not in timed:
                timed[kind] = self._time(measurement.kinds[kind], layer, layer.module, values, layer.autocast)
            with torch.no_grad():
                values = layer(values)
            layer.module.to("cpu")  # so the device holds one layer at a time
        loss = self._time(
            measurement.loss,
            self._loss(len(values)),
            nn.Module(),
            (*values, *(t.to(self.device) for t in targets)),
        )
        return replace(
            measurement, kinds=tuple(timed[kind] for kind in range(len(measurement.kinds))), loss=loss
        )

    def _loss(self, count: int) -> Callable[[Values], Values]:
        return lambda values: (self.chain.loss(values[:count], values[count:]),)

    def _time(
        self,
        cost: LayerCost,
        call: Callable[[Values], Values],
        module: nn.Module,
        values: Values,
        autocast: torch.dtype | None = None,
    ) -> LayerCost:
        """Return `cost` with the median seconds of each pass; the update includes new copies of weights."""
        copied = [(p, WeightCopy.of(p, autocast)) for p in copied_weights(module, cost)] if autocast else []

        def forward(values: Values) -> Values:
            with using(copied, autocast, values):
                return call(values)

        trainable = [p for p in module.parameters() if p.requires_grad]
        stepper = make_optimizer(self.task, [[{"params": trainable}]]) if trainable else None
        rows: list[tuple[float, float, float]] = []
        for repeat in range(_WARM_UPS + _MOST_REPEATS):
            row = self._once(forward, values, cost, stepper, copied)
            if repeat >= _WARM_UPS:
                rows.append(row)
            if len(rows) >= _LEAST_REPEATS and sum(map(sum, rows)) > _LEAST_SECONDS:
                break
        module.zero_grad(set_to_none=True)
        forwards, backwards, updates = (statistics.median(column) for column in zip(*rows, strict=True))
        return replace(
            cost,
            forward=replace(cost.forward, seconds=forwards),
            backward=replace(cost.backward, seconds=backwards),
            update=replace(cost.update, seconds=updates),
        )

    def _once(
        self,
        call: Callable[[Values], Values],
        values: Values,
        cost: LayerCost,
        stepper: torch.optim.Optimizer | MasterWeights | None,
        copied: Copied,
    ) -> tuple[float, float, float]:
        """Return the seconds of one forward, backward and update."""
        graph, flags = GraphEnds(), tuple(value.requires_grad for value in cost.inputs)
        fresh = tuple(value.clone() for value in values)  # a layer may change its inputs in place
        began = self.watch.mark()
        entered = enter(graph, fresh, flags, self.anchor) if any(flags) else fresh
        outputs = call(entered)
        forwarded = self.watch.mark()
        wanted = (value.has_gradient for value in cost.outputs)
        graph.incoming = [
            _gradient(value) if has else None for value, has in zip(outputs, wanted, strict=True)
        ]
        leave(graph, outputs)
        ready = self.watch.mark()
        backward(graph)
        returned = self.watch.mark()
        if stepper is not None:
            with torch.no_grad():
                for group in stepper.param_groups:
                    group["lr"] = group["lr"] * 0  # so the next repeat has the same weights
            stepper.step()
        for weight, copy in copied:
            copy.fresh = False
            copy.follow(weight)
        times = self.watch.read(
            [began, forwarded, ready, returned, self.watch.mark()]
        )  # on a GPU, waits for it once
        return times[1] - times[0], times[3] - times[2], times[4] - times[3]


def _of_rank(chain: Chain, measurement: Measurement, inputs: Any, targets: Any) -> Chain:
    """Return the chain of a single tensor-parallel rank, without peers, for a measurement of divided
    layers.
    """
    if measurement.tensor == 1:
        return chain
    given, wanted, sequences = chain.flatten(inputs), chain.flatten_targets(targets), measurement.sequences
    sharded = shard_chain(chain, measurement.tensor, given, wanted, sequences=sequences)
    return sharded.rank(Alone(rank=0, size=measurement.tensor))


def _gradient(value: Tensor) -> Tensor:
    return torch.full_like(value, 1.0 / max(value.numel(), 1), requires_grad=False)
