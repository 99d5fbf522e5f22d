"""Transfers that begin together."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup

from pipefit.runtime.coalescing import begin_together


class OnGpu:
    """A tensor of a GPU, as far as a process group has to know."""

    is_cuda, device = True, torch.device("cuda", 1)


def begun_of(tensors: list[Any]) -> tuple[list[Any], list[Any]]:
    """What happens in a process group, and what is waited for."""
    seen = list[Any]()

    def called(what: Any) -> Any:
        seen.append(what)
        return what

    start, end = (
        mock.patch.object(ProcessGroup, name, lambda group, device, name=name: called((name, device)))
        for name in ("_start_coalescing", "_end_coalescing")
    )
    with start, end:
        works = begin_together(None, tensors, [partial(called, n) for n in range(len(tensors))])  # type: ignore[arg-type]
    return seen, works


def test_on_a_gpu_they_are_one() -> None:
    """NCCL gets them between a start and an end, which is what is waited for."""
    start, end = (("_start_coalescing", OnGpu.device), ("_end_coalescing", OnGpu.device))
    assert begun_of([OnGpu(), OnGpu()]) == ([start, 0, 1, end], [end])


@pytest.mark.parametrize("tensors", [[], [OnGpu()], [torch.ones(1), torch.ones(1)]])
def test_one_alone_and_those_of_gloo_are_left_as_they_are(tensors: list[Any]) -> None:
    """Gloo would copy them; and where there is nothing to do, there is nothing to wait for."""
    assert begun_of(tensors) == ([*range(len(tensors))], [*range(len(tensors))])
