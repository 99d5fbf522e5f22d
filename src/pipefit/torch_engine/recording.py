"""Peaks and times of a rank's forwards, backwards and update, as the engine runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage

from pipefit.measure import MemoryMeter
from pipefit.schema.trace import Category, Event, MemorySample, Stream


class Record:
    """The peaks of a rank, by the action that the engine begins last, and the times of forwards and backwards.

    Memory that an action leaves behind gets a category: activations after a forward, gradients after a backward.

    Args:
        meter: counts the device's bytes; None counts nothing.
        clock: seconds since the start of the first step; None records no times.
        on_action: called as each action begins.
    """

    def __init__(
        self,
        meter: MemoryMeter | None,
        clock: Callable[[], float] | None = None,
        on_action: Callable[[], None] = lambda: None,
    ) -> None:
        self.samples: list[MemorySample] = []
        self.events: list[Event] = []
        self.action, self.step = "setting up", 0
        self._meter, self._clock, self._on_action = meter, clock, on_action
        self._leaves, self._is_open = Category.TEMPORARY, False

    def begin_step(self, step: int) -> None:
        """End the step before; begin one with the copies of its batch."""
        self.end()
        self.step = step
        self.begin("receive buffers and batch", Category.BOUNDARY)

    def begin(self, action: str, leaves: Category) -> None:
        """End the action before, and begin another one."""
        self.end()
        self._on_action()
        self.action, self._leaves, self._is_open = action, leaves, True
        if self._meter is not None:
            self._meter.begin(action)

    def end(self) -> None:
        """End the action."""
        if self._is_open and self._meter is not None:
            seconds = float(len(self.samples)) if self._clock is None else self._clock()
            self.samples.append(self._meter.end(self.step, seconds, self._leaves))
        self._is_open = False

    def peak_bytes(self, step: int) -> int:
        """Return the highest peak of a step; 0 without a meter."""
        return max((sample.total_bytes for sample in self.samples if sample.step == step), default=0)

    def follow(self, stage: PipelineStage) -> None:
        """Record the forwards and backwards of a stage."""
        forward, backward, number = stage.forward_one_chunk, stage.backward_one_chunk, stage.stage_index

        def recorded_forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            self.begin(f"{number}F{microbatch}", Category.ACTIVATIONS)
            return self._timed(lambda: forward(microbatch, *args, **kwargs))

        def recorded_backward(microbatch: int, *args: Any, **kwargs: Any) -> None:
            self.begin(f"{number}B{microbatch}", Category.GRADIENTS)
            self._timed(lambda: backward(microbatch, *args, **kwargs))
            if self._meter is not None:
                self._meter.tag(stage.bwd_cache.get(microbatch, ()), Category.BOUNDARY)

        stage.forward_one_chunk = recorded_forward  # type: ignore[method-assign, assignment]
        stage.backward_one_chunk = recorded_backward  # type: ignore[method-assign, assignment]

    def _timed(self, run: Callable[[], Any]) -> Any:
        """Run a forward or backward, and record its time."""
        if self._clock is None:
            return run()
        began, action = self._clock(), self.action
        result = run()
        self.events.append(
            Event(
                step=self.step,
                action=action,
                stream=Stream.COMPUTE,
                start_seconds=began,
                end_seconds=self._clock(),
            )
        )
        return result
