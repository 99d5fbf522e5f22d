"""CUDA autocast on fake devices, compared with torch's own kernels, which the CPU build of torch includes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import autocast_mode, custom_bwd, custom_fwd

from pipefit.capture.cuda_autocast import policies
from pipefit.errors import UsageError
from pipefit.fake_cuda.target import FakeTarget, register_missing_shapes
from support.autocast_operators import SAMPLES, Kernels, made, on_cuda, overload, raised, replayed
from support.composed_operators import with_a_kernel_for_cuda
from support.gallery_samples import sampled

FLOAT, DOUBLE, HALF, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
Case = tuple[str, tuple[torch.dtype, ...]]
ATTENTION = "aten::scaled_dot_product_attention"  # which kernel it takes is not for autocast to say
PARTLY_RECORDED = (
    "aten::cosine_similarity"  # records no gradients for a part of itself, which a replay would record
)
NEEDS_CUDA = "aten::grid_sampler"  # queries cuDNN, which the CPU build lacks

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


@pytest.fixture(autouse=True, scope="module")
def oracle() -> Iterator[None]:
    """Prepare the oracle: register the shapes that torch lacks, and CUDA kernels for operators that CUDA does
    not compose.
    """
    register_missing_shapes()
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in with_a_kernel_for_cuda():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, mock.Mock(side_effect=NotImplementedError), "CUDA")  # type: ignore[no-untyped-call]
    yield
    library._destroy()  # type: ignore[no-untyped-call]


def mixtures(low: torch.dtype) -> list[tuple[torch.dtype, ...]]:
    """Return dtypes of an operator's floating-point tensors, in turn."""
    return [(FLOAT,), (low,), (FLOAT, low), (DOUBLE,), (low, BF16 if low == HALF else HALF)]


def test_the_lists_are_those_of_the_kernels_that_torch_registers() -> None:
    """The header's lists, and the few additional known operators, are all operators with a kernel for CUDA
    autocast.
    """
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    beside = {
        "aten::_cudnn_rnn",
        "aten::miopen_rnn",
        "aten::linalg_matrix_sqrth",
    }  # in some builds; refused by name
    assert {name for name in registered if name.startswith("aten::")} - beside == set(policies())
    names = {
        name for name in policies() if "imname" in name or ".names" in name
    }  # torch 2.11 lists named dimensions
    assert set(policies()) - names - set(SAMPLES) == {"aten::binary_cross_entropy"}
    assert set(SAMPLES) - set(policies()) <= {"aten::rms_norm"}  # which torch 2.11 does not cast


@pytest.mark.parametrize(
    ("low", "every"), sampled([(HALF, 3), (HALF, 1), (BF16, 1)], often=[(HALF, 3)]), ids=str
)
def test_every_listed_operator_casts_as_on_cuda(low: torch.dtype, every: int) -> None:
    """For every operator the same kernels reach the device, in order, with arguments and results of the same
    layout. Every run of the tests has a third of the operators.
    """
    listed = sorted(SAMPLES.keys() & policies().keys() - {NEEDS_CUDA})
    cases = [(name, dtypes) for name in listed[::every] for dtypes in mixtures(low)]
    expected = [seen(case, on_cuda(*case, low)[1:]) for case in cases]
    with FakeTarget("cuda") as fake, torch.no_grad():
        found = [seen(case, on_target(case, fake, low)) for case in cases]
    assert [
        (case, one, other) for case, one, other in zip(cases, found, expected, strict=True) if one != other
    ] == []


def on_target(case: Case, fake: FakeTarget, low: torch.dtype) -> tuple[Kernels, str]:
    """Return the calls that reach the target, and the exception."""
    name, dtypes = case
    arguments = made(SAMPLES[name], dtypes, str(fake.device))
    with torch.autocast("cuda", low), Kernels() as kernels:
        return kernels, raised(lambda: overload(name)(*arguments))


def seen(case: Case, ran: tuple[Kernels, str]) -> tuple[list[Any], str]:
    """Return the parts to compare: kernels and the kind of exception; for attention only the casts before the
    kernel.
    """
    (kernels, error), (name, dtypes) = ran, case
    casts = sum(dtypes[n % len(dtypes)] is FLOAT for n in range(3))
    calls = [call.described for call in kernels.calls]
    return calls[: casts if name == ATTENTION else None], error.partition(":")[0]


@pytest.mark.parametrize("low", sampled([HALF, BF16], often=[BF16]))
def test_every_listed_operator_saves_what_cuda_saves(low: torch.dtype) -> None:
    """Autograd saves the same under autocast as when the kernels that reach CUDA are called one by one."""
    listed = sorted(SAMPLES.keys() & policies().keys() - {NEEDS_CUDA, ATTENTION, PARTLY_RECORDED})
    cases = [(name, dtypes) for name in listed for dtypes in mixtures(low)[:3]]
    reached = [on_cuda(*case, low) for case in cases]
    different = []
    with FakeTarget("cuda") as fake:
        for (name, dtypes), (arguments, kernels, error) in zip(cases, reached, strict=True):
            if error:
                continue
            leaves, again = (made(SAMPLES[name], dtypes, str(fake.device), leaves=True) for _ in range(2))
            expected = saved(partial(replayed, arguments, kernels, leaves, fake.device))
            with torch.autocast("cuda", low):
                found = saved(partial(overload(name), *again))
            if found != expected:
                different.append((name, dtypes, found, expected))
    assert not different


def saved(call: Callable[[], Any]) -> list[tuple[str, int]] | str:
    """Return dtypes and bytes of the storages that a call saves for backward, or its exception."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if error := raised(call):
            return error
    return sorted(
        {t.untyped_storage()._cdata: (str(t.dtype), t.untyped_storage().nbytes()) for t in kept}.values()
    )


@pytest.mark.parametrize("dtypes", [(FLOAT, HALF), (HALF, FLOAT), (HALF, HALF), (FLOAT, FLOAT)])
def test_grid_sampler_is_promoted(dtypes: Sequence[torch.dtype]) -> None:
    """grid_sampler computes in float32 if one of its tensors has that type: the one operator that the CPU
    build cannot show.
    """
    with FakeTarget("cuda") as fake, torch.autocast("cuda", HALF):
        found = overload(NEEDS_CUDA)(*made(SAMPLES[NEEDS_CUDA], dtypes, str(fake.device)))
        assert found.dtype == (FLOAT if FLOAT in dtypes else HALF)
        assert made(SAMPLES[NEEDS_CUDA], dtypes, "cpu")[0].shape[:2] == found.shape[:2]


def test_binary_cross_entropy_is_refused() -> None:
    """As on CUDA, the loss fails under autocast, and works with autocast off."""
    with FakeTarget("cuda") as fake, torch.autocast("cuda", BF16):
        x = torch.rand(4, device=fake.device)
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x, x)
        with torch.autocast("cuda", enabled=False):
            assert F.binary_cross_entropy(x, x).dtype == FLOAT


def test_weights_are_cast_once_in_a_context_as_on_the_cpu() -> None:
    """Casts of parameters are cached until the outermost context ends, also those made without recording a
    graph.
    """

    def casts(kind: str, weight: Tensor, x: Tensor) -> list[tuple[int, ...]]:
        with Kernels() as kernels:
            with torch.autocast(kind, BF16):
                with torch.no_grad():
                    F.linear(x, weight)
                with torch.autocast(kind, BF16):
                    F.linear(x, weight)
                out = F.linear(x, weight)
                out.backward(torch.ones_like(out))
                torch.clear_autocast_cache()
                F.linear(x, weight)
            with torch.autocast(kind, BF16, cache_enabled=False):
                F.linear(x, weight)
                F.linear(x, weight)
        return [tuple(c.args[0].shape) for c in kernels.calls if c.func is torch.ops.aten._to_copy.default]

    on_cpu = casts("cpu", torch.ones(3, 4, requires_grad=True), torch.ones(2, 4))
    with FakeTarget("cuda") as fake:
        weight, x = (
            torch.ones(3, 4, device=fake.device, requires_grad=True),
            torch.ones(2, 4, device=fake.device),
        )
        assert sorted(casts("cuda", weight, x)) == sorted(on_cpu)
        assert weight.grad is not None


def test_code_that_names_cuda_means_the_target() -> None:
    """Autocast for `cuda` and for the target's name are one: switching and queries apply to both."""
    with FakeTarget("cuda") as fake:
        kind, x = fake.device.type, torch.ones(4, 4, device=fake.device)
        for outer, inner in (("cuda", kind), (kind, "cuda")):
            with torch.autocast(outer, BF16):
                assert torch.is_autocast_enabled("cuda")
                assert torch.get_autocast_dtype("cuda") == torch.get_autocast_dtype(kind) == BF16
                assert (x @ x).dtype == BF16
                with torch.autocast(inner, enabled=False):
                    assert not torch.is_autocast_enabled("cuda")
                    assert (x @ x).dtype == FLOAT
                assert (x @ x).dtype == BF16
        assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cuda")


class Doubled(torch.autograd.Function):
    """A custom function that computes in float32."""

    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cuda")
        (x,) = ctx.saved_tensors
        return gradient @ x


def test_custom_functions_cast_what_they_are_given() -> None:
    """`custom_fwd` for `cuda` casts tensors of the target, and turns autocast off inside."""
    with FakeTarget("cuda") as fake, torch.autocast("cuda", BF16):
        x = torch.ones(4, 4, device=fake.device, dtype=BF16, requires_grad=True)
        y = Doubled.apply(x)  # type: ignore[no-untyped-call]
        assert y.dtype == FLOAT
        y.sum().backward()
        assert x.grad is not None


def test_an_operator_with_casts_of_its_own_is_refused() -> None:
    """An operator that casts under CUDA autocast by a rule outside torch's lists is refused by name when
    called.
    """
    library = torch.library.Library("pipefit_test_casts", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeImplicitAutograd")
    library.impl("twice", lambda x: 2 * x.float(), "AutocastCUDA")
    with FakeTarget("cuda") as fake:
        x = torch.ones(4, device=fake.device)
        torch.ops.pipefit_test_casts.twice(x)
        with (
            torch.autocast("cuda", BF16),
            pytest.raises(UsageError, match="casts pipefit_test_casts::twice by a special rule"),
        ):
            torch.ops.pipefit_test_casts.twice(x)


def test_torch_is_left_as_it_was() -> None:
    """Outside a target `torch.autocast`, and its callees, are torch's own."""
    before = autocast_mode.autocast.__init__, autocast_mode._cast, torch.clear_autocast_cache
    with FakeTarget("cuda"):
        pass
    assert (autocast_mode.autocast.__init__, autocast_mode._cast, torch.clear_autocast_cache) == before


def test_softmax_of_float16_into_float32_is_one_kernel() -> None:
    """On CUDA the float32 copy of its argument does not exist; elsewhere, and from bfloat16, it does."""
    for target, dtype, copies in (("cuda", HALF, 0), ("cuda", BF16, 1), ("cpu", HALF, 1)):
        with FakeTarget(target) as fake, Kernels() as kernels:  # type: ignore[arg-type]
            x = torch.ones(4, 8, device=fake.device, dtype=dtype, requires_grad=True)
            for normalise in (F.softmax, F.log_softmax):
                normalise(x, -1, dtype=FLOAT).sum().backward()
        assert [c.func for c in kernels.calls].count(torch.ops.aten._to_copy.default) == 4 * copies


def test_what_asks_for_cuda_hears_that_it_is() -> None:
    """On the target a fake tensor is on CUDA for Python code, as for `logsigmoid`, which keeps no buffer
    there.
    """
    for target in ("cpu", "cuda"):
        with FakeTarget(target) as fake:  # type: ignore[arg-type]
            x = torch.ones(4, 8, device=fake.device, requires_grad=True)
            assert x.is_cuda == (target == "cuda")
            assert [t.numel() for t in (F.logsigmoid(x).grad_fn._saved_buffer,)] == [
                0 if target == "cuda" else 32
            ]  # type: ignore[union-attr]


def test_a_layer_norm_of_half_precision_returns_float32() -> None:
    """On CUDA norms return float32 under autocast, on the CPU the input's type."""
    for target, dtype in (("cuda", FLOAT), ("cpu", BF16)):
        with FakeTarget(target) as fake, torch.autocast(fake.device.type, BF16):  # type: ignore[arg-type]
            x = torch.ones(4, 8, device=fake.device)
            assert nn.LayerNorm(8, device=fake.device)(F.linear(x, x)[..., :4].repeat(1, 2)).dtype == dtype
