"""Workspaces of kernels: measured once, stored on disk and in the profile, reported if unknown."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pwd
import sqlite3
import threading
import warnings
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from pipefit.errors import PipefitWarning, UsageError
from pipefit.fake_cuda.target import FakeTarget
from pipefit.measure import kernels as kernels_module
from pipefit.measure.cpu import Meter
from pipefit.measure.kernels import Cache, Kernels, key_of, text_of, this_machine
from pipefit.schema.layer_costs import Kernel, KernelMemory, Layout

aten = torch.ops.aten


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty cache for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pipefit" / "kernels"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the measured operations."""
    operations: list[str] = []
    measured = kernels_module.measured

    def counting(operation: str, *args: object, **kwargs: object) -> Kernel:
        operations.append(operation)
        return measured(operation, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels_module, "measured", counting)
    return operations


def met(kernels: Kernels, func: object, *args: object) -> Kernel:
    """Return the kernel of one call."""
    with torch.no_grad():
        kernels.of(func, args, {}, func(*args))  # type: ignore[operator]
    return kernels.memory.kernels[-1]


def text(func: object, *args: object) -> str:
    """Return the text of one call."""
    key = key_of(func, args, {}, "")
    assert key is not None
    return text_of(func, key)


# ---------------------------------------------------------------- identity of operations


def test_an_operation_says_its_dtypes_shapes_and_strides() -> None:
    """An operation's text has its dtypes, shapes, strides of tensors that are not contiguous, and recorded
    gradients.
    """
    x, weight = torch.rand(4, 8), torch.rand(2, 8, dtype=torch.float64, requires_grad=True)
    assert text(aten.mm.default, x, weight.t()) == (
        "aten.mm.default(float32[4x8], float64[8x2 by 1,8] with gradient)"
    )
    with torch.no_grad():
        assert text(aten.mm.default, x, weight.t()) == "aten.mm.default(float32[4x8], float64[8x2 by 1,8])"


def test_numbers_count_by_kind_and_sizes_by_value() -> None:
    """Numbers count by kind, so that a falling learning rate makes no new operation; scales, dimensions,
    zero, one and booleans count by value.
    """
    x, image = torch.rand(4), torch.rand(1, 1, 4, 4)
    assert text(aten.mul.Tensor, x, 0.3) == text(aten.mul.Tensor, x, 0.4)
    apart = [text(aten.mul.Tensor, x, number) for number in (0.3, 0.0, 1.0, 1, True, 2)]
    assert len(set(apart)) == len(apart)
    assert text(aten.sum.dim_IntList, x, [0]) != text(aten.sum.dim_IntList, x, [1])
    scales = [
        text(aten._upsample_bilinear2d_aa.vec, image, None, False, [scale, scale]) for scale in (0.3, 0.4)
    ]
    assert scales[0] != scales[1]


def test_settings_of_the_process_tell_operations_apart() -> None:
    """Process settings distinguish operations: deterministic algorithms are measured separately."""
    kernels = Kernels(1)
    met(kernels, aten.sort.default, torch.rand(10))
    torch.use_deterministic_algorithms(True)
    try:
        kernels.refresh()
        assert met(kernels, aten.sort.default, torch.rand(10)).operation.startswith(
            "deterministic: aten.sort"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(kernels.memory.kernels) == 2


# ---------------------------------------------------------------- measurements


def test_measuring_disturbs_nobody() -> None:
    """A measurement leaves random state, gradient mode, threads, fake tensors, a meter and a running profiler
    unchanged.
    """
    x = torch.rand(50)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    meter = Meter(0)
    meter.begin("nothing")
    with (
        FakeTarget("cpu") as fake,
        meter,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running,
    ):
        drawn = fake.fake(x)
        kernel = met(Kernels(threads + 1), aten.bernoulli.default, drawn)
    assert kernel.peak_bytes is not None and kernel.peak_bytes >= 200
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert meter.end(0, 0.0).total_bytes == 400
    assert not any(event.nbytes() for event in running.profiler.kineto_results.events())
    assert all(thread.name != "pipefit-measuring" for thread in threading.enumerate())


def test_views_and_new_tensors_need_no_measuring(counted: list[str]) -> None:
    """Views and new tensors, which need no workspace on any machine, are not run."""
    meter = Meter(0, kernels=Kernels(1))
    meter.begin("views")
    with meter:
        x = torch.empty(4, 4)
        y = [x.t(), x.view(-1), x[1], x.detach(), torch.empty_like(x), x.new_empty(3)]
    assert not counted
    assert len(y) == 6


def test_what_is_too_large_or_too_slow_is_named_and_not_run() -> None:
    """Kernels that need more than 1 GiB, or too many floating-point operations, are not run: they are
    unknown, with shapes and reason.
    """
    with FakeTarget("cpu"):
        large, slow, known = torch.empty(1 << 14, 1 << 14), torch.empty(1 << 13, 1 << 13), Kernels(1)
        assert "2.00 GiB" in met(known, aten.relu.default, large).reason
        assert "needs 1,100 GFLOP" in met(known, aten.mm.default, slow, slow).reason
    assert [(kernel.operation, kernel.peak_bytes) for kernel in known.memory.unknown] == [
        ("aten.relu.default(float32[16384x16384])", None),
        ("aten.mm.default(float32[8192x8192], float32[8192x8192])", None),
    ]


def test_recurrent_layers_that_are_too_slow_are_named_and_not_run() -> None:
    """A recurrent layer with few bytes and many steps, which would take minutes, is unknown and not run,
    forward and backward.
    """
    kernels = Kernels(1)
    meter = Meter(0, kernels=kernels)
    meter.begin("recurrent")
    with FakeTarget("cpu"), meter:
        net = nn.LSTM(2048, 2048)
        net(torch.empty(600, 8, 2048))[0].sum().backward()
    slow = [kernel for kernel in kernels.memory.unknown if "rnn" in kernel.operation]
    assert {kernel.operation.partition("(")[0] for kernel in slow} == {
        "aten.mkldnn_rnn_layer.default",
        "aten.mkldnn_rnn_layer_backward.default",
    }
    assert all("GFLOP" in kernel.reason for kernel in slow)


def test_measuring_keeps_no_arguments_alive() -> None:
    """A measurement, failed or not, keeps no arguments or results alive."""
    gc.collect()
    gc.disable()
    try:
        meter = Meter(0, kernels=Kernels(1))
        meter.begin("run")
        with FakeTarget("cpu"), meter:
            for shape in ((3, 3), (1 << 15, 1 << 15)):
                x = torch.empty(shape)
                y = x.relu()
                del x, y
                assert meter.total == 0
        x = torch.rand(3, 3)
        alive, kernels = weakref.ref(x), Kernels(1)
        met(kernels, aten._unique2.default, x)
        met(kernels, aten._pack_padded_sequence.default, x, torch.ones(3, dtype=torch.long), True)
        assert len(kernels.memory.unknown) == 2
        del x
        assert alive() is None
    finally:
        gc.enable()


@torch.library.custom_op("pipefit_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Double a tensor, as an operation outside torch."""
    return x * 2


def test_what_cannot_be_made_up_is_named() -> None:
    """Operations without possible inputs are unknown: results of unknown size, sparse arguments, invalid data
    and foreign operations.
    """
    x, bags = torch.rand(4, 4), torch.zeros(4, dtype=torch.long)
    calls = {
        "depends on the values": [
            (aten._unique2.default, x),
            (aten.nonzero.default, bags),
            (aten.bincount.default, bags),
        ],
        "only dense": [(aten.mul.Tensor, torch.eye(3).to_sparse(), torch.eye(3).to_sparse())],
        "cannot run on synthetic data": [(aten._pack_padded_sequence.default, x, bags + 1, True)],
        "does not belong to torch": [(torch.ops.pipefit_tests.doubled.default, x)],
    }
    for why, group in calls.items():
        for func, *args in group:
            kernel = met(Kernels(1), func, *args)
            assert kernel.peak_bytes is None
            assert why in kernel.reason


def test_indices_and_masks_that_change_nothing_are_known() -> None:
    """Indexing by positions, and operations that take a mask as data, are measured."""
    x, mask, positions = torch.rand(4, 4), torch.rand(4, 4) > 0.5, torch.tensor([0, 3])
    for func, *args in (
        (aten.index.Tensor, x, [positions]),
        (aten.masked_fill.Scalar, x, mask, 0.0),
        (aten.embedding.default, x, positions),
        (aten.nll_loss_forward.default, x, torch.zeros(4, dtype=torch.long), None, 1, -100),
    ):
        assert met(Kernels(1), func, *args).peak_bytes is not None


@pytest.mark.parametrize("damage", [{"dtype": "complex64"}, {"shape": (3, 3)}, {"strides": (-1, 2)}], ids=str)
def test_impossible_results_of_a_damaged_profile_are_refused(damage: dict[str, Any]) -> None:
    """A profile whose kernel has results of another dtype, shape or direction is refused."""
    layout = Layout(shape=(2, 3), strides=(1, 2), offset=4, storage=0, storage_bytes=400, dtype="float32")
    kernel = Kernel(
        operation="aten.relu.default(float32[2x3])", peak_bytes=400, results=(replace(layout, **damage),)
    )
    meter = Meter(0, kernels=Kernels(1, KernelMemory(kernels=(kernel,))))
    with FakeTarget("cpu"), meter, pytest.raises(UsageError, match=r"relu.*has impossible results"):
        torch.empty(2, 3).relu()


def test_fake_results_lie_as_the_kernels_do() -> None:
    """Fake results have the kernels' layouts: a reduced loss keeps its unreduced storage, an LSTM its
    workspace, a layer norm's gradient its order.
    """
    given = KernelMemory(
        kernels=(
            Kernel(
                operation="aten.relu.default(float32[2x3])",
                peak_bytes=400,
                results=(
                    Layout(
                        shape=(2, 3), strides=(1, 2), offset=4, storage=0, storage_bytes=400, dtype="float32"
                    ),
                ),
            ),
        )
    )
    meter = Meter(0, kernels=Kernels(1, given))
    meter.begin("relu")
    with FakeTarget("cpu"), meter:
        x = torch.empty(2, 3).relu()
        assert (x.stride(), x.storage_offset(), x.untyped_storage().nbytes()) == ((1, 2), 4, 400)
        assert meter.end(0, 0.0).total_bytes == 400 + 24
        loss = F.mse_loss(torch.empty(5, 7), torch.empty(5, 7))
    assert (
        loss.untyped_storage().nbytes()
        == F.mse_loss(torch.rand(5, 7), torch.rand(5, 7)).untyped_storage().nbytes()
    )


def test_fake_results_have_the_kernels_dtype() -> None:
    """Fake results have the kernels' dtypes: layer-norm statistics with weights wider than the input, the
    backward measured from them, and the gradient of a loss with wider targets.
    """
    meter = Meter(0, kernels=Kernels(1))
    meter.begin("layer norm")
    with FakeTarget("cpu"), meter:
        x, weight = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(8)
        out, mean, deviation = torch.native_layer_norm(x, [8], weight, weight, 1e-5)
        assert (out.dtype, mean.dtype, deviation.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        aten.native_layer_norm_backward.default(out, x, [8], mean, deviation, weight, weight, [True] * 3)
        if torch.__version__ >= "2.12":  # the kernel of 2.11 refuses such targets
            narrow, wide = torch.empty(4, 8), torch.empty(4, 8, dtype=torch.float64)
            gradient = aten.mse_loss_backward.default(wide.sum(), narrow, wide, 1)
            assert gradient.dtype == torch.float32
    assert meter.kernels is not None and not meter.kernels.memory.unknown


# ---------------------------------------------------------------- cache and profile


def test_each_operation_is_measured_once(cache: Path, counted: list[str]) -> None:
    """Each operation is measured once: another process or run finds it in the cache."""
    first = Kernels(1)
    kernel = met(first, aten.sort.default, torch.rand(10))
    met(first, aten.sort.default, torch.rand(10))
    first.keep()
    assert met(Kernels(1), aten.sort.default, torch.rand(10)) == kernel
    assert counted == ["aten.sort.default(float32[10])"]
    assert len(list(cache.iterdir())) == 1
    met(Kernels(2), aten.sort.default, torch.rand(10))
    assert len(counted) == 2  # two threads are another machine


@pytest.mark.parametrize(
    "content", ["", "{", "null\nnull", '{"pipefit": "kernels"}\n{"kernels": 3}', "\0\xff"]
)
def test_a_broken_cache_is_replaced(cache: Path, counted: list[str], content: str) -> None:
    """An unreadable cache counts as empty, and the next measurement replaces it."""
    path = Cache(this_machine(1)).path
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("latin-1"))
    for _ in range(2):
        kernels = Kernels(1)
        met(kernels, aten.sort.default, torch.rand(10))
        kernels.keep()
    assert len(counted) == 1


def test_another_machines_kernels_are_not_believed(cache: Path) -> None:
    """Kernels that were measured on another machine are unknown on this one, and stay known on theirs."""
    machine = this_machine(1)
    theirs, ours = Cache(replace(machine, cpu="another")), Cache(machine)
    theirs.add([Kernel(operation="x", peak_bytes=1)])
    assert ours.get("x") is None
    ours.add([Kernel(operation="x", peak_bytes=2)])
    assert theirs.get("x") == Kernel(operation="x", peak_bytes=1)


def test_a_process_reads_a_kernel_once(cache: Path) -> None:
    """The kernel that one meter has read is known to the next one without the file."""
    kernel = Kernel(operation="one", peak_bytes=1)
    Cache(this_machine(1)).add([kernel])
    for _ in range(2):
        assert Cache(this_machine(1)).get("one") == kernel
        Cache(this_machine(1)).path.unlink(missing_ok=True)


def test_a_user_without_a_home_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, as in some containers, has no cache: nothing is stored, nothing fails, and no
    folder appears in the working directory.
    """

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    Cache(this_machine(1)).add([Kernel(operation="one", peak_bytes=1)])
    assert Cache(this_machine(1)).get("one") is None
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_in_place_of_the_cache_is_not_waited_for(cache: Path) -> None:
    """A named pipe in place of the cache, which would block a reader, counts as empty and is replaced."""
    cache.mkdir(parents=True)
    os.mkfifo(Cache(this_machine(1)).path)
    assert Cache(this_machine(1)).get("one") is None
    Cache(this_machine(1)).add([Kernel(operation="one", peak_bytes=1)])
    assert Cache(this_machine(1)).get("one") is not None


@pytest.mark.parametrize("there", [b"", b"of somebody else", None])
def test_a_link_in_place_of_the_cache_is_replaced(there: bytes | None, cache: Path, tmp_path: Path) -> None:
    """A link in place of the cache is replaced by a file; its target is neither read, written nor created."""
    cache.mkdir(parents=True)
    path, elsewhere = Cache(this_machine(1)).path, tmp_path / "elsewhere"
    if there is not None:
        elsewhere.write_bytes(there)
    path.symlink_to(elsewhere)
    Cache(this_machine(1)).add([Kernel(operation="one", peak_bytes=1)])
    assert Cache(this_machine(1)).get("one") is not None
    assert not path.is_symlink()
    assert (elsewhere.read_bytes() if elsewhere.exists() else None) == there


def test_a_link_to_another_cache_is_not_followed(cache: Path, tmp_path: Path) -> None:
    """A link to another cache is not followed, even if that is intact."""
    Cache(this_machine(1)).add([Kernel(operation="one", peak_bytes=1)])
    path = Cache(this_machine(1)).path
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    before = (tmp_path / "moved").read_bytes()
    assert Cache(this_machine(1)).get("one") is None
    Cache(this_machine(1)).add([Kernel(operation="two", peak_bytes=2)])
    assert [Cache(this_machine(1)).get(name) is None for name in ("one", "two")] == [True, False]
    assert (tmp_path / "moved").read_bytes() == before


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in place of the cache folder stops nothing."""
    (tmp_path / "pipefit").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels = Kernels(1)
    assert met(kernels, aten.sort.default, torch.rand(10)).peak_bytes is not None
    kernels.keep()


def _write(number: int) -> None:
    for entry in range(20):
        Cache(this_machine(1)).add([Kernel(operation=f"{number} {entry}", peak_bytes=number)])


def test_workers_that_write_at_once_lose_nothing(cache: Path) -> None:
    """Concurrent writes of three workers lose no kernels, in any order and with any first writer."""
    context = mp.get_context("fork")
    workers = [context.Process(target=_write, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ours, written = Cache(this_machine(1)), [(number, entry) for number in range(3) for entry in range(20)]
    kernels = [ours.get(f"{number} {entry}") for number, entry in written]
    assert [one and one.peak_bytes for one in kernels] == [number for number, _ in written]
    assert len(list(cache.iterdir())) == 1


def test_a_kernel_that_is_not_as_it_was_written_is_not_believed(cache: Path) -> None:
    """A kernel with a flipped bit is not used, because its peak would be wrong, whether its text or its operation
    is another one; its neighbours are known, and so are operations whose names need escapes.
    """
    ours = Cache(this_machine(1))
    names = ("a", "b", 'c "é" {"operation":"d"}', "e\n")
    ours.add([Kernel(operation=name, peak_bytes=1) for name in names])
    with closing(sqlite3.connect(ours.path)) as file, file:
        file.execute("UPDATE kernels SET kernel = replace(kernel, '1', '3') WHERE operation = 'a'")
        file.execute("UPDATE kernels SET operation = 'x' WHERE operation = 'b'")
    assert [ours.get(name) for name in ("a", "b", "x")] == [None] * 3
    assert [ours.get(name) for name in names[2:]] == [Kernel(operation=n, peak_bytes=1) for n in names[2:]]


def test_an_entry_that_is_no_kernel_is_unknown(cache: Path) -> None:
    """An entry that is as it was written, but no kernel, is unknown."""
    ours = Cache(this_machine(1))
    ours.add([])
    for number, text in enumerate(
        (b'{"operation":"x","peak_bytes":-1}', b'{"operation":"x","peak_bytes":"1"}', b"{")
    ):
        row = ours._machine, str(number), text, ours._digest(str(number), text)
        ours._write([row])
        assert ours.get(str(number)) is None


@pytest.mark.parametrize("kept", [0, 100, 5000])
def test_a_damaged_file_counts_as_empty(cache: Path, kept: int) -> None:
    """A file of which only the beginning is left counts as empty; the next measurement replaces it."""
    ours = Cache(this_machine(1))
    ours.add([Kernel(operation=f"x{number}", peak_bytes=1) for number in range(100)])
    ours.path.write_bytes(ours.path.read_bytes()[:kept])
    assert ours.get("x99") is None
    ours.add([Kernel(operation="z", peak_bytes=1)])
    assert ours.get("z") == Kernel(operation="z", peak_bytes=1)


def test_a_profile_is_believed_before_this_machine(counted: list[str]) -> None:
    """A profile's kernels take precedence over this machine's, because its figures were made with them."""
    operation = "aten.sort.default(float32[10])"
    given = KernelMemory(kernels=(Kernel(operation=operation, peak_bytes=123456),))
    assert met(Kernels(1, given), aten.sort.default, torch.rand(10)).peak_bytes == 123456
    assert not counted


def test_unknown_operations_are_told_once() -> None:
    """Unknown operations are reported once: a warning names the first, the number of others and the reason,
    also if a profile has named them before.
    """
    x = torch.rand(3)
    first = Kernels(1)
    named = met(first, aten._unique2.default, x)
    met(first, aten.bincount.default, x.long())
    following = Kernels(1, KernelMemory(kernels=(named,)))
    met(following, aten._unique2.default, x)
    with pytest.warns(PipefitWarning, match="aten._unique2.default.* and 1 other: it depends on the values"):
        first.tell_unknown()
    with pytest.warns(
        PipefitWarning, match=r"aten._unique2.default\(float32\[3\]\): it depends on the values"
    ):
        following.tell_unknown()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.tell_unknown()
        following.tell_unknown()


def test_the_machine_is_told_by_more_than_its_name() -> None:
    """A machine is identified by its name, the instruction sets that the environment allows, and the number
    of threads.
    """
    kernels_module._capability.cache_clear()
    before = this_machine(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        kernels_module._capability.cache_clear()
        limited = this_machine(1)
    kernels_module._capability.cache_clear()
    assert limited.capability == f"{before.capability.split()[0]} ONEDNN_MAX_CPU_ISA=SSE41"
    assert (this_machine(1), this_machine(2).threads) == (before, 2)
    assert before.torch == torch.__version__
