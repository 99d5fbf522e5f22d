"""Saved tensors of fake devices, compared with real CPU training, closed forms and, with a GPU, CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode, UnsupportedOperatorException
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import optimizer
from torch.utils import _foreach_utils, backend_registration

from pipefit.errors import UsageError
from pipefit.fake_cuda.target import FAKE_CUDA, FakeTarget, Target, _fill_slot
from support.composed_operators import with_a_kernel_for_cuda
from support.saved_tensor_models import (
    ATTENDED,
    HALF,
    MODELS,
    OPTIMIZERS,
    TARGETS,
    Block,
    Meter,
    Saved,
    cnn,
    train,
)
from support.separate_process import printed

pytestmark = pytest.mark.filterwarnings(
    "ignore:Accessing the data pointer of FakeTensor"
)  # torch's own deepcopy does


def test_private_interfaces_are_where_we_expect() -> None:
    """Each private name of torch that fake devices use exists: this test fails before all others."""
    assert callable(backend_registration._setup_privateuseone_for_python_backend)
    assert torch._C._get_privateuse1_backend_name() in ("privateuseone", FAKE_CUDA)
    assert callable(torch._C._dispatch_has_kernel_for_dispatch_key)
    assert callable(torch._C._acc.PrivateUse1Hooks)
    assert nn.Parameter in optimizer._foreach_supported_types
    assert torch.Tensor in _foreach_utils._foreach_supported_types
    assert callable(FakeTensorConverter.set_tensor_memo)
    assert callable(FakeTensorConverter.invalidate_constant_aliases)
    converter = FakeTensorMode(allow_fallback_kernels=False).fake_tensor_converter
    assert isinstance(converter, FakeTensorConverter)
    assert isinstance(converter.meta_converter.tensor_memo, WeakValueDictionary)
    assert SDPBackend.MATH in attention._cur_sdpa_kernel_backends(with_priority=True)
    for operator in ("flash", "efficient", "cudnn"):
        assert hasattr(torch.ops.aten, f"_scaled_dot_product_{operator}_attention")
    assert hasattr(torch.ops.aten, "_scaled_dot_product_attention_math")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_model_trains_after_it_was_moved_to_a_fake_device(target: Target, name: str) -> None:
    """Forward, backward and step run, for a model built plainly and then moved, in single and half
    precision.
    """
    build, shape = MODELS[name]
    with FakeTarget(target) as fake:
        for dtype in (torch.float32, torch.bfloat16):
            model = build().to(fake.device, dtype)
            train(
                model,
                torch.randn(shape, device=fake.device, dtype=dtype),
                OPTIMIZERS["adamw"](model.parameters()),
            )
            assert {t.device for t in model.state_dict().values()} == {fake.device}


def test_losses_without_shapes_in_torch_train() -> None:
    """The losses whose backward torch cannot shape give a gradient like their input."""
    with FakeTarget("cuda") as fake:
        x = torch.randn(6, 4, device=fake.device, requires_grad=True)
        classes = torch.zeros(6, dtype=torch.long, device=fake.device)
        F.multi_margin_loss(x, classes).backward()
        F.multilabel_margin_loss(x, torch.zeros(6, 4, dtype=torch.long, device=fake.device)).backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("target", TARGETS)
def test_state_of_every_optimizer_is_as_large_as_the_parameters(target: Target, name: str) -> None:
    """Every implementation of an optimizer steps; its state is on the device, as large as the parameters."""
    with FakeTarget(target) as fake:
        model = cnn().to(fake.device)
        stepper = OPTIMIZERS[name](model.parameters())
        train(model, torch.randn(8, 3, 32, 32, device=fake.device), stepper)
        states = [t for s in stepper.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()]
        copies = 1 if name.startswith("sgd") else 2
        assert sum(t.nbytes for t in states) == copies * sum(p.nbytes for p in model.parameters())
        assert {t.device for t in states} == {fake.device}


def forward_saves(name: str) -> Saved:
    """Return the saved tensors of a model of the table, built and run on the default device in single
    precision.
    """
    build, shape = MODELS[name]
    model = build()
    return Saved(lambda: model(torch.randn(shape)), model.parameters())


@pytest.mark.parametrize("name", sorted({*MODELS} - {"lstm"}))
def test_cpu_target_saves_what_the_cpu_saves(name: str) -> None:
    """On the CPU target each saved storage is as large as in real training of the same model on the CPU."""
    real = forward_saves(name).nbytes
    with FakeTarget("cpu"):
        assert forward_saves(name).nbytes == real


def test_cpu_target_misses_the_lstm_workspace_only() -> None:
    """Only oneDNN's workspace of an LSTM is missing on the CPU target, because torch does not know its
    size.
    """
    real = forward_saves("lstm")
    with FakeTarget("cpu"):
        fake = forward_saves("lstm")
    assert sorted(t.untyped_storage().nbytes() for t in real if t.dtype != torch.uint8) == [
        n for n in fake.nbytes if n
    ]


@pytest.mark.parametrize(("target", "dtype"), [("cpu", HALF), ("cuda", torch.bool)])
def test_dropout_saves_the_targets_mask(target: Target, dtype: torch.dtype) -> None:
    """CUDA's dropout saves only a boolean mask, the CPU's only one of the input's type, one element each."""
    with FakeTarget(target) as fake:
        x = torch.randn(4, 8, dtype=HALF, device=fake.device, requires_grad=True)
        assert Saved(lambda: F.dropout(x, 0.1)).kinds == [((4, 8), dtype)]


@pytest.mark.parametrize(("target", "megabytes"), [("cuda", 822), ("cpu", 906)])
def test_gpt2_block_saves_the_published_sizes(target: Target, megabytes: int) -> None:
    """A GPT-2 block (hidden 4096, 32 heads, 2 x 1024 tokens, fp16) saves 822 MB with CUDA's masks, 906 with
    the CPU's.

    In units of one activation, 16 MiB, with a = 8 of them per attention matrix: inputs of four Linears and
    two norms (5 + 4), q, k, v (3), softmax and its dropout's output (2a), four of 4 for the GELU, and the
    masks of the dropouts (a + 2 units, halved when boolean), plus two norms' statistics.
    """
    unit, scores = 2 * 1024 * 4096 * 2, 8
    masks = (scores + 2) * unit // (2 if target == "cuda" else 1)
    statistics = 4 * 2 * 1024 * (4 if target == "cuda" else 2)
    with FakeTarget(target) as fake:
        block = Block(4096, 32, 0.1).to(fake.device, HALF)
        x = torch.randn(2, 1024, 4096, dtype=HALF, device=fake.device)
        saved = Saved(lambda: block(x), block.parameters())
    assert sum(saved.nbytes) == (9 + 3 + 2 * scores + 16) * unit + masks + statistics
    assert round(sum(saved.nbytes) / 1e6) == megabytes


def test_normalisations_keep_single_precision_statistics() -> None:
    """On the cuda target the norms of a half-precision model save means and deviations in float32."""
    with FakeTarget("cuda") as fake:
        for norm, x in ((nn.LayerNorm(6), torch.empty(4, 6)), (nn.BatchNorm2d(6), torch.empty(4, 6, 5, 5))):
            norm.to(fake.device, HALF)
            saved = Saved(lambda norm=norm, x=x: norm(x.to(fake.device, HALF)), norm.parameters())  # type: ignore[misc]
            assert [dtype for _, dtype in saved.kinds].count(torch.float32) == 2


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_what_has_a_kernel_on_cuda_is_one_operation(dtype: torch.dtype) -> None:
    """Torch composes such operators from others on devices without a kernel: an RMS norm would keep five
    tensors, and the backward of a SiLU would allocate the same number.
    """
    with FakeTarget("cuda") as fake:
        known = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
        assert {f"aten::{name}" for name in with_a_kernel_for_cuda()} <= set(known)
        norm, x = nn.RMSNorm(6).to(fake.device, dtype), torch.empty(4, 6, dtype=dtype, device=fake.device)
        saved = Saved(lambda: norm(x.requires_grad_()), norm.parameters())
        assert set(saved.kinds) == {((4, 6), dtype), ((4, 1), torch.float32)}
        for function in (F.silu, F.mish):
            output, gradient = function(x), torch.empty_like(x)
            with Meter() as meter:
                torch.autograd.grad(output, x, gradient)
            assert meter.peak == x.nbytes


@pytest.mark.parametrize("weights_last", [False, True])
@pytest.mark.parametrize("images_last", [False, True])
def test_convolutions_keep_channels_last(images_last: bool, weights_last: bool) -> None:
    """Results and gradients of a convolution have the strides of real training, whose rule on the CPU is the
    same: channels last if images or weights are.
    """
    formats = [
        torch.channels_last if last else torch.contiguous_format for last in (images_last, weights_last)
    ]

    def strides(device: torch.device) -> list[tuple[int, ...]]:
        layer = nn.Conv2d(8, 16, 3).to(device, memory_format=formats[1])
        images = torch.ones(4, 8, 9, 9, device=device).contiguous(memory_format=formats[0]).requires_grad_()
        result = layer(images)
        gradients = torch.autograd.grad(result, (images, layer.weight), torch.ones_like(result))
        return [tensor.stride() for tensor in (result, *gradients)]

    expected = strides(torch.device("cpu"))
    with FakeTarget("cuda") as fake:
        assert strides(fake.device) == expected


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_default_optimizers_take_foreach_on_cuda_only(name: str) -> None:
    """With no flag given an optimizer is foreach on the cuda target, as on CUDA, and a loop on the CPU."""
    for target in TARGETS:
        with FakeTarget(target) as fake, Meter() as meter:
            model = cnn().to(fake.device)
            train(model, torch.randn(8, 3, 32, 32, device=fake.device), OPTIMIZERS[name](model.parameters()))
        stepped = {o for o in meter.operators if o.startswith(("_foreach_add", "_foreach_addcmul"))}
        assert bool(stepped) == (target == "cuda")


@pytest.mark.parametrize("target", TARGETS)
def test_a_meter_sees_every_storage(target: Target) -> None:
    """Over a step with AdamW a meter holds exactly parameters and state at rest, and nothing more remains."""
    with FakeTarget(target) as fake, Meter() as meter:
        model = cnn().to(fake.device)
        held = sum(t.nbytes for t in model.state_dict().values())
        assert meter.now == held
        stepper = OPTIMIZERS["adamw"](model.parameters())
        train(model, torch.randn(8, 3, 32, 32, device=fake.device), stepper)
        held += sum(t.nbytes for s in stepper.state.values() for t in s.values())
        assert meter.now == held
        assert meter.peak > held
        del model, stepper
    assert meter.now == 0


def test_cpu_meter_agrees_with_real_training() -> None:
    """The same meter over fake and real tensors sees the same peak, to the byte."""

    def peak() -> int:
        with Meter() as meter:
            model = cnn()
            train(model, torch.randn(8, 3, 32, 32), OPTIMIZERS["adamw"](model.parameters()))
        return meter.peak

    real = peak()
    with FakeTarget("cpu"):
        assert peak() == real


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_real_is_allocated(target: Target) -> None:
    """A model of a terabyte, built plainly and moved, trains; an operator without known shapes is refused by
    name.
    """
    with FakeTarget(target) as fake:
        model = nn.Linear(2**19, 2**19).to(fake.device)
        train(model, torch.randn(8, 2**19, device=fake.device), OPTIMIZERS["sgd-fused"](model.parameters()))
        with pytest.raises(UnsupportedOperatorException, match="binomial"):
            torch.binomial(torch.ones(4, device=fake.device), torch.ones(4, device=fake.device))


@pytest.mark.parametrize("target", TARGETS)
def test_fake_keeps_shape_strides_and_dtype(target: Target) -> None:
    """A fake tensor made like a real one has its layout, on the target's device, and needs no gradient."""
    real = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True).t()
    with FakeTarget(target) as fake:
        made = fake.fake(real)
    assert (made.shape, made.stride(), made.dtype, made.device) == (
        real.shape,
        real.stride(),
        real.dtype,
        fake.device,
    )
    assert not made.requires_grad


def test_contexts_nest_and_leave_no_trace() -> None:
    """Targets nest in any order; afterwards tensors are real again and torch's lists of types are as
    before.
    """
    before = list(optimizer._foreach_supported_types)
    with FakeTarget("cuda") as outer, FakeTarget("cpu"), outer:
        assert torch.zeros(2, device=outer.device).device == outer.device
    assert optimizer._foreach_supported_types == before
    assert torch._C._is_multithreading_enabled()
    assert torch.ones(2).sum().item() == 2.0


def test_cuda_target_leaves_real_training_alone() -> None:
    """After a cuda target the process still trains on the CPU, forks random state, and has no accelerator to
    use.
    """
    with FakeTarget("cuda") as fake:
        torch.zeros(2, device=fake.device, requires_grad=True).sum().backward()
    if not torch.cuda.is_available():
        assert not torch.accelerator.is_available()
        assert torch.accelerator.device_count() == 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nn.Linear(2, 2)(torch.randn(2, 2)).sum().backward()


@pytest.mark.gallery
def test_cpu_target_fills_no_device_slot() -> None:
    """Only the cuda target registers a backend; a second one changes nothing; backward may have run
    before.
    """
    code = (
        "import torch; from pipefit.fake_cuda.target import FakeTarget\n"
        "name = torch._C._get_privateuse1_backend_name\n"
        "torch.ones(2, requires_grad=True).sum().backward()\n"
        "FakeTarget('cpu'); first = name()\n"
        "for _ in range(2):\n"
        "    with FakeTarget('cuda') as fake:\n"
        "        torch.ones(2, requires_grad=True, device=fake.device).sum().backward()\n"
        "print(first, name())"
    )
    assert _run("-c", code).split() == ["privateuseone", FAKE_CUDA]


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd has a thread for each GPU")
def test_forks_run_backwards_after_one_on_a_fake_gpu() -> None:
    """Autograd has no thread for a fake GPU, which it would forbid forks to have: work goes on beside others."""
    code = (
        "import os, torch\n"
        "from pipefit.fake_cuda.target import FakeTarget, run_a_backward\n"
        "from pipefit.processes import beside, forking\n"
        "def work():\n"
        "    with FakeTarget('cuda') as fake:\n"
        "        torch.ones(2, requires_grad=True, device=fake.device).sum().backward()\n"
        "    return os.getpid()\n"
        "here = work()\n"
        "with forking():\n"
        "    (there,) = beside(work, check=run_a_backward)\n"
        "    print(here == os.getpid() != there())"
    )
    assert printed(code) == ["True"]


def test_a_taken_slot_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another extension holds torch's open device slot, the error names it and says what to do."""
    monkeypatch.setattr("pipefit.fake_cuda.target.privateuse1_name", lambda: "npu")
    monkeypatch.setattr(
        "pipefit.fake_cuda.target._fill_slot", _fill_slot.__wrapped__
    )  # which forgets an earlier call
    with pytest.raises(UsageError, match="'npu' holds: use a process that does not import"):
        FakeTarget("cuda")


def test_unknown_target_is_refused() -> None:
    """A target is `cpu` or `cuda`."""
    with pytest.raises(UsageError, match="'tpu' is not a target"):
        FakeTarget("tpu")  # type: ignore[arg-type]


def _layers(device: torch.device) -> dict[str, list[int]]:
    """Return the bytes of each storage that typical layers save on `device`, without the few bytes of random
    seeds.
    """
    kernels = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]  # cuDNN depends on the card

    def saved(call: Callable[[], object], parameters: Iterable[Tensor] = ()) -> list[int]:
        with sdpa_kernel(kernels):
            return [n for n in Saved(call, parameters).nbytes if n >= 64]

    layers: dict[str, list[int]] = {}
    for dtype in (torch.float32, HALF, torch.bfloat16):
        for name in ("cnn", "gpt", "attention", "encoder"):
            build, shape = MODELS[name]
            model, x = build().to(device, dtype), torch.randn(shape, device=device, dtype=dtype)
            layers[f"{name} {dtype}"] = saved(lambda model=model, x=x: model(x), model.parameters())  # type: ignore[misc]
            if dtype != torch.float32:
                wide, given = build().to(device), torch.randn(shape, device=device)
                with torch.autocast(device.type, dtype):
                    layers[f"{name} mixed {dtype}"] = saved(lambda m=wide, x=given: m(x), wide.parameters())  # type: ignore[misc]
        q = torch.randn(*ATTENDED, device=device, dtype=dtype, requires_grad=True)
        mask = torch.ones(ATTENDED[2], ATTENDED[2], dtype=torch.bool, device=device)
        for label, options in (
            ("causal", {"is_causal": True}),
            ("dropout", {"dropout_p": 0.1}),
            ("mask", {"attn_mask": mask}),
        ):
            layers[f"sdpa {label} {dtype}"] = saved(
                lambda q=q, options=options: F.scaled_dot_product_attention(q, q, q, **options)  # type: ignore[misc]
            )
    table = nn.Embedding(100, 64, device=device)
    layers["embedding"] = saved(
        lambda: table(torch.zeros(4, 8, dtype=torch.long, device=device)), table.parameters()
    )
    logits = torch.randn(32, 100, device=device, requires_grad=True)
    layers["loss"] = saved(lambda: F.cross_entropy(logits, torch.zeros(32, dtype=torch.long, device=device)))
    return layers


def _run(*arguments: str, gpus: bool = False) -> str:
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **hidden, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_groups_are_those_of_the_kernels(dtype: torch.dtype) -> None:
    """Results and gradients have the shapes and strides of real ones; CUDA pads rows to 16 bytes."""
    shapes = [((16, 8), (2, 8, 24)), ((2, 16, 8), (2, 8, 24)), ((8, 16), (16, 8))]

    def products(device: torch.device) -> list[object]:
        result: list[object] = []
        for sizes in shapes:
            ends = torch.tensor([8, 16], dtype=torch.int32).to(device)
            operands = [torch.zeros(size, dtype=dtype, device=device, requires_grad=True) for size in sizes]
            made = torch._grouped_mm(*operands, offs=ends if len(sizes[0]) == 2 else None)
            torch.autograd.backward(made, torch.zeros_like(made))
            result += [
                (tuple(each.shape), each.stride(), each.dtype)
                for each in (made, *(one.grad for one in operands))
                if each is not None
            ]
        return result

    real = products(torch.device("cpu"))
    for target in TARGETS:
        with FakeTarget(target) as fake:
            assert products(fake.device) == real
    odd = torch.zeros(16, 8, dtype=torch.float32), torch.zeros(2, 8, 6, dtype=torch.float32)
    with FakeTarget("cuda") as fake:
        ends = torch.zeros(2, dtype=torch.int32, device=fake.device)
        assert torch._grouped_mm(*map(fake.fake, odd), offs=ends).stride() == (8, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to compare with")
@pytest.mark.parametrize("where", ["this machine", "a machine without a GPU"])
def test_cuda_saves_what_the_target_predicts(where: str) -> None:
    """Each layer's saved storages on a real GPU equal the table's, and the prediction on a machine without
    any.
    """
    predicted = json.loads(_run(__file__, gpus=where == "this machine"))
    assert predicted == _layers(torch.device("cuda", 0))


if __name__ == "__main__":  # the prediction of a machine without a GPU, for the test above
    with FakeTarget("cuda") as target:
        print(json.dumps(_layers(target.device)))
