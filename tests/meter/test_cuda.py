"""The meter of a GPU, by figures as torch's allocator gives them: none of them is here."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pipefit.meter.cuda import CudaMeter, memory_figures
from pipefit.trace import Category

GPU = torch.device("cuda", 0)
FIGURES = {"requested_bytes": 700, "allocated_bytes": 1024, "reserved_bytes": 2048}


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nested figures of one GPU, in the form that torch 2.13 gives them, and its memory."""
    nested = {what: {"all": {"current": 1, "peak": peak}} for what, peak in FIGURES.items()}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: nested)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7000, 10_000))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", mock.Mock())
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", mock.Mock())


def test_a_sample_has_requested_bytes() -> None:
    """What tensors ask for, which plans predict, and not the rounded blocks that hold them."""
    meter = CudaMeter(GPU)
    meter.reserve(100)
    meter.begin("0F0")
    torch.cuda.reset_peak_memory_stats.assert_called_once_with(GPU)
    sample = meter.end(0, 0.0)
    assert (sample.total_bytes, sample.action) == (700, "0F0")
    assert sample.by_category == {Category.LENT: 100, Category.ACTIVATIONS: 600}


def test_the_figures_are_never_mixed() -> None:
    """Each is the peak of its own count, and the process has what is not free."""
    assert memory_figures(GPU) == {"requested": 700, "allocated": 1024, "reserved": 2048, "process_total": 3000}


@pytest.mark.parametrize(("cap_bytes", "fraction"), [(2500, 0.25), (20_000, 1.0), (-1, 0.0)])
def test_a_cap_is_a_share_of_the_gpus_memory(cap_bytes: int, fraction: float) -> None:
    """Torch takes it as a fraction of what the GPU has, which a plan for a larger GPU does not exceed."""
    CudaMeter(GPU, cap_bytes=cap_bytes)
    torch.cuda.set_per_process_memory_fraction.assert_called_once_with(fraction, GPU)


def test_without_a_cap_the_limit_of_the_process_stays() -> None:
    """Nothing is asked of the allocator, so that what the user has set holds."""
    CudaMeter(GPU)
    torch.cuda.set_per_process_memory_fraction.assert_not_called()
