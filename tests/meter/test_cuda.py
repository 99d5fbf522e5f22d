"""The meter of a GPU, with simulated figures of torch's allocator."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pipefit.measure.cuda import CudaMeter, memory_figures
from pipefit.schema.trace import Category, DeviceTrace, MemorySample, Trace

GPU = torch.device("cuda", 0)
HERE = torch.device("cpu")  # where the tensors of a test are, for a meter that takes them for a GPU's
FIGURES = ("requested_bytes", "allocated_bytes", "reserved_bytes")


class Allocator:
    """Statistics of one GPU's allocator in the form of torch 2.13; a reset restarts its peaks."""

    def __init__(self) -> None:
        self.now = dict(zip(FIGURES, (600, 900, 2048), strict=True))
        self.peak = dict(zip(FIGURES, (700, 1024, 2048), strict=True))
        self.retries = 0

    def reach(self, requested: int, *, end: int | None = None) -> None:
        """Set the tensors' bytes at the peak and at the end, with blocks of 1.5 and segments of twice as
        many.
        """
        for factor, what in enumerate(FIGURES, start=2):
            self.peak[what] = max(self.peak[what], requested * factor // 2)
            self.now[what] = (requested if end is None else end) * factor // 2

    def nested(self, device: torch.device) -> dict[str, object]:
        """Return all figures, as `torch.cuda.memory_stats_as_nested_dict` does."""
        figures = {what: {"all": {"current": self.now[what], "peak": self.peak[what]}} for what in FIGURES}
        return {**figures, "num_alloc_retries": self.retries}

    def reset(self, device: torch.device) -> None:
        """Set peaks to current levels."""
        self.peak = dict(self.now)


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """Replace torch's allocator and a GPU's memory."""
    made = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", made.nested)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7000, 10_000))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", mock.Mock(side_effect=made.reset))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", mock.Mock())
    return made


def sample_of(meter: CudaMeter, allocator: Allocator, requested: int) -> MemorySample:
    """Return the sample of an action whose tensors peak at `requested` bytes."""
    meter.begin("0F0")
    allocator.reach(requested)
    return meter.end(0, 0.0)


def test_a_sample_has_requested_bytes(allocator: Allocator) -> None:
    """A sample has requested bytes, which plans predict, and not rounded blocks."""
    meter = CudaMeter(GPU)
    meter.reserve(100)
    meter.begin("0F0")
    torch.cuda.reset_peak_memory_stats.assert_called_once_with(GPU)
    allocator.reach(700)
    sample = meter.end(0, 0.0)
    assert (sample.total_bytes, sample.action) == (700, "0F0")
    assert sample.by_category == {Category.LENT: 100, Category.ACTIVATIONS: 600}


def test_the_figures_are_never_mixed() -> None:
    """Each figure is the peak of its own count, and the process's figure is the memory that is not free."""
    assert memory_figures(GPU) == {
        "requested": 700,
        "allocated": 1024,
        "reserved": 2048,
        "process_total": 3000,
    }


def test_peaks_of_all_actions_outlast_those_of_each(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meter keeps the highest of each figure for the trace, because every action resets torch's peaks."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    meter = CudaMeter(GPU)
    samples = [sample_of(meter, allocator, requested) for requested in (5000, 1000)]
    allocator.retries = 2
    samples.append(sample_of(meter, allocator, 800))
    assert [sample.total_bytes for sample in samples] == [
        5000,
        5000,
        1000,
    ]  # the first one stays until the second
    found = meter.allocator
    assert (found.requested_bytes, found.allocated_bytes, found.reserved_bytes) == (5000, 7500, 10_000)
    assert (found.retries, found.settings) == (2, "expandable_segments:True")


@pytest.mark.parametrize(
    "category", [Category.PARAMETERS, Category.OPTIMIZER, Category.VERSIONS], ids=lambda one: one.value
)
def test_what_has_left_the_device_is_not_counted(category: Category, allocator: Allocator) -> None:
    """Tensors that have left the device do not count: offloaded parameters or state, and old weights, are
    subtracted at a peak without them, so that no sample is negative.
    """
    meter = CudaMeter(HERE)
    stays, moves, goes = (torch.zeros(100) for _ in range(3))
    meter.tag([stays, moves, goes, None], category)
    assert sample_of(meter, allocator, 1300).by_category == {category: 1200, Category.ACTIVATIONS: 100}
    allocator.now["requested_bytes"] = 450
    moves.untyped_storage().resize_(0)
    meter.resized(moves.untyped_storage())
    del goes
    sample_of(meter, allocator, 450)
    sample = sample_of(meter, allocator, 450)
    assert sample.by_category == {category: 400, Category.ACTIVATIONS: 50}
    Trace(
        source="measured",
        steps=0,
        devices=(DeviceTrace(device=0, budget_bytes=9999, events=(), memory=(sample,)),),
        step_seconds=(),
    )
    moves.untyped_storage().resize_(400)
    meter.resized(moves.untyped_storage())
    assert sample_of(meter, allocator, 900).by_category[category] == 800


def test_what_leaves_or_arrives_in_an_action_was_there_at_its_peak(allocator: Allocator) -> None:
    """Tensors that leave or arrive in an action count up to its peak: the join of an offload frees them, an
    update creates them.
    """
    meter, state = CudaMeter(HERE), torch.zeros(100)
    meter.tag([state], Category.OPTIMIZER)
    meter.begin("0WAIT_OFFLOAD0")
    allocator.peak["requested_bytes"], allocator.now["requested_bytes"] = 1000, 600
    state.untyped_storage().resize_(0)
    meter.resized(state.untyped_storage())
    assert meter.end(0, 0.0).by_category == {Category.OPTIMIZER: 400, Category.ACTIVATIONS: 600}
    meter.begin("0STEP")
    allocator.reach(1000)
    state.untyped_storage().resize_(400)
    meter.resized(state.untyped_storage())
    assert meter.end(0, 0.0).by_category == {Category.OPTIMIZER: 400, Category.ACTIVATIONS: 600}


def test_new_weights_take_the_place_of_old_ones(allocator: Allocator) -> None:
    """A parameter's storage is a weight version after a STASH: it counts once, in its last category."""
    meter, old, new = CudaMeter(HERE), torch.zeros(100), torch.zeros(100)
    meter.tag([old], Category.PARAMETERS)
    meter.tag([old], Category.VERSIONS)
    meter.tag([new], Category.PARAMETERS)
    found = sample_of(meter, allocator, 1000).by_category
    assert found == {Category.PARAMETERS: 400, Category.VERSIONS: 400, Category.ACTIVATIONS: 200}


def test_without_torchs_allocator_tensors_that_are_known_count(allocator: Allocator) -> None:
    """With `PYTORCH_NO_CUDA_MEMORY_CACHING`, all figures are zero: known tensors count, training runs, and no
    sample is negative.
    """
    allocator.peak = allocator.now = dict.fromkeys(FIGURES, 0)
    meter, weight = CudaMeter(HERE), torch.zeros(100)
    meter.tag([weight], Category.PARAMETERS)
    meter.begin("0F0")
    assert meter.end(0, 0.0).by_category == {Category.PARAMETERS: 400}


def test_tensors_of_the_host_are_not_the_devices(allocator: Allocator) -> None:
    """Host tensors, as Adam's counters, do not count on the device."""
    meter = CudaMeter(GPU)
    meter.tag([torch.zeros(100)], Category.OPTIMIZER)
    assert Category.OPTIMIZER not in sample_of(meter, allocator, 1000).by_category


@pytest.mark.parametrize(("cap_bytes", "fraction"), [(2500, 0.25), (20_000, 1.0), (-1, 0.0)])
def test_a_cap_is_a_share_of_the_gpus_memory(cap_bytes: int, fraction: float) -> None:
    """A cap is set as a fraction of the GPU's memory, at most 1 for a plan for a larger GPU."""
    CudaMeter(GPU, cap_bytes=cap_bytes)
    torch.cuda.set_per_process_memory_fraction.assert_called_once_with(fraction, GPU)


def test_without_a_cap_the_limit_of_the_process_stays() -> None:
    """Without a cap, the allocator's limit is not touched, so that the user's setting holds."""
    CudaMeter(GPU)
    torch.cuda.set_per_process_memory_fraction.assert_not_called()
