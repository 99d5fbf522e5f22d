"""What CPU kernels allocate in secret: every formula against the allocator's own events."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipefit.meter.workspace import kernel_peak_bytes

aten = torch.ops.aten
FEW = settings(max_examples=12, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))

with_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN's choice of blocks is modelled for AVX-512"
)


class Operation:
    """One operator call: what was predicted for it, and what the allocator saw."""

    def __init__(self, name: str, predicted: int | None, new: int) -> None:
        self.name = name
        self.predicted = new if predicted is None else predicted
        self.observed = 0

    def __repr__(self) -> str:
        return f"{self.name}: predicted {self.predicted}, observed {self.observed}"


class Watch(TorchDispatchMode):
    """Marks every operator call in the profile, and predicts it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = storages((args, kwargs))
        with record_function(f"operation {len(self.operations)}"):
            out = func(*args, **kwargs)
        new = sum(n for key, n in storages(out).items() if key not in before)
        predicted = kernel_peak_bytes(func, args, kwargs, out, threads=torch.get_num_threads())
        self.operations.append(Operation(str(func), predicted, new))
        return out


def storages(tree: Any) -> dict[int, int]:
    """Bytes of every storage in `tree`."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def observe(run: Callable[[], object]) -> list[Operation]:
    """The operators that `run` calls, each with the peak of the allocator's events within it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, Watch() as watch:
        run()
    events = recorded.profiler.kineto_results.events()
    memory = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda e: e[0])
    times = [time for time, _ in memory]
    for event in events:
        if event.name().startswith("operation "):
            live = highest = 0
            first, last = bisect.bisect_left(times, event.start_ns()), bisect.bisect_right(times, event.end_ns())
            for _, nbytes in memory[first:last]:
                live += nbytes
                highest = max(highest, live)
            watch.operations[int(event.name().split()[1])].observed = highest
    return watch.operations


def assert_exact(run: Callable[[], object]) -> None:
    """Every operator of `run` peaks where it was predicted to."""
    operations = observe(run)
    wrong = [operation for operation in operations if operation.predicted != operation.observed]
    assert operations
    assert not wrong


def gradients(out: Tensor) -> None:
    """Back-propagates from a weighted sum, so that every gradient is dense."""
    (out * torch.randn_like(out)).sum().backward()


@st.composite
def convolutions(draw) -> tuple[nn.Module, Tensor]:
    """A dense, grouped or depthwise convolution that oneDNN or ATen runs, and an input."""
    kind = draw(st.sampled_from(["dense", "dense", "dense", "depthwise", "grouped"]))
    kernel = draw(st.sampled_from([1, 3] if kind == "depthwise" else [1, 3, 5, 7] if kind == "dense" else [1, 3]))
    dilation = draw(st.sampled_from([1, 1, 1, 2])) if kernel == 3 and kind == "dense" else 1
    stride = draw(st.sampled_from([1, 1, 2])) if dilation == 1 and kind != "grouped" else 1
    stride = min(stride, kernel) if kind == "depthwise" else stride
    channels = st.sampled_from([1, 3, 8, 17, 20, 32, 64])
    inputs, outputs, groups = draw(channels), draw(channels), 1
    if kind == "depthwise":
        inputs = outputs = groups = draw(st.sampled_from([3, 16, 20, 32]))
    if kind == "grouped":
        groups = draw(st.sampled_from([2, 4]))
        inputs, outputs = groups * 16, groups * draw(st.sampled_from([16, 32]))
    size = draw(st.sampled_from([8, 14, 15, 16, 28]))
    images = draw(st.sampled_from([1, 2, 4, 16]))
    module = nn.Conv2d(
        inputs, outputs, kernel, stride, dilation * (kernel // 2), dilation, groups, bias=draw(st.booleans())
    )
    return module, torch.randn(images, inputs, size, size, requires_grad=draw(st.booleans()))


@with_avx512
@settings(FEW, max_examples=40)
@given(convolutions())
def test_convolutions_of_contiguous_images(case):
    """A convolution and its backward peak where layouts and scratch say, whichever gradients are made."""
    module, x = case
    assert_exact(lambda: gradients(module(x)))


@with_avx512
@FEW
@given(
    st.sampled_from([4, 16, 20, 32, 64]),
    st.sampled_from([8, 16, 32, 64]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2]),
)
def test_convolutions_of_channels_last_images(inputs, outputs, kernel, stride):
    """Channels-last, the activations stay as they are and only weights and scratch are added."""
    module = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2).to(memory_format=torch.channels_last)
    x = torch.randn(4, inputs, 16, 16).to(memory_format=torch.channels_last).requires_grad_()
    assert_exact(lambda: gradients(module(x)))


@with_avx512
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(4, 8, 3, padding=1), (2, 4, 20)),
        (nn.Conv1d(16, 16, 5, padding=2, groups=16), (1, 16, 33)),
        (nn.Conv2d(16, 24, (1, 3), padding=(0, 1)), (4, 16, 12, 9)),
        (nn.ConvTranspose2d(16, 8, 2, 2), (2, 16, 8, 8)),
        (nn.ConvTranspose2d(8, 8, 3, padding=1), (2, 8, 9, 9)),
        (nn.ConvTranspose1d(8, 4, 4, 2, 1), (2, 8, 8)),
        (nn.Conv2d(3, 6, 3).double(), (2, 3, 9, 9)),
    ],
    ids=str,
)
def test_other_convolutions(module, shape):
    """One-dimensional, oblong, transposed and double convolutions are exact too."""
    x = torch.randn(shape, dtype=next(module.parameters()).dtype, requires_grad=True)
    assert_exact(lambda: gradients(module(x)))


@with_avx512
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_convolution_scratch_follows_the_threads(threads):
    """The reductions of weight gradients are divided among however many threads there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        modules = (nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 20, 1), nn.Conv2d(3, 8, 7, 2))
        for module, size in zip(modules, (12, 9, 32), strict=True):
            x = torch.randn(5, module.in_channels, size, size, requires_grad=True)
            assert_exact(lambda module=module, x=x: gradients(module(x)))
    finally:
        torch.set_num_threads(before)


@FEW
@given(
    st.sampled_from([1, 31, 64, 191, 192, 300, 768]),
    st.sampled_from([8, 12, 64]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_flash_attention(tokens, width, causal, dtype, transposed):
    """Attention holds one set of tiles per thread, and its backward two and a row."""
    shape = (2, tokens, 3, width) if transposed else (2, 3, tokens, width)
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    views = [t.transpose(1, 2) if transposed else t for t in tensors]
    assert_exact(lambda: gradients(F.scaled_dot_product_attention(*views, is_causal=causal)))


def test_attention_in_bfloat16():
    """A bfloat16 forward also keeps its scores in bfloat16."""
    q, k, v = (torch.randn(2, 3, 100, 16, dtype=torch.bfloat16) for _ in range(3))
    assert_exact(lambda: aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("module", [nn.BatchNorm2d(12), nn.GroupNorm(3, 12), nn.InstanceNorm2d(12)], ids=str)
def test_channel_normalization(module, training, order):
    """Batch, group and instance norms keep per-channel scales, sums per thread and a second gradient."""
    x = torch.randn(4, 12, 9, 9).to(memory_format=order).requires_grad_()
    module.train(training)
    out = module(x)
    weights = torch.randn(out.shape).to(memory_format=order)
    assert_exact(lambda: (module(x) * weights).sum().backward())


@FEW
@given(
    st.integers(1, 70),
    st.sampled_from([(5,), (3, 4)]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_layer_norm(rows, shape, affine, dtype):
    """A layer norm's backward keeps both parameter gradients per thread."""
    module = nn.LayerNorm(shape, elementwise_affine=affine, dtype=dtype)
    x = torch.randn(rows, *shape, dtype=dtype, requires_grad=True)
    assert_exact(lambda: module(x).backward(torch.randn_like(x)))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_pooling_and_interpolation(order):
    """Pools need nothing but copies, and interpolations convert a contiguous image to channels-last and back."""
    x = torch.randn(2, 6, 8, 8).to(memory_format=order).requires_grad_()

    def run() -> None:
        for out in (
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 2),
            F.adaptive_avg_pool2d(x, 3),
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, size=(11, 5), mode="bilinear"),
            F.interpolate(x, scale_factor=2, mode="bicubic"),
        ):
            out.backward(torch.randn_like(out))

    assert_exact(run)


@FEW
@given(
    st.sampled_from(["add", "sub", "mul", "div", "eq", "lt", "remainder", "maximum"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]),
    st.one_of(st.sampled_from([2, 1.5, True]), st.sampled_from([torch.float32, torch.bfloat16, torch.int64])),
)
def test_numbers_and_mixed_types(name, dtype, other):
    """A number is a tensor of eight bytes and its cast; an operand of another type is cast whole."""
    x = torch.ones(5, 7, dtype=dtype)
    operand = torch.ones(5, 7, dtype=other) if isinstance(other, torch.dtype) else other
    if name == "maximum" and not isinstance(operand, Tensor):
        operand = torch.ones(5, 1, dtype=torch.float32)
    if name == "sub" and torch.bool in (dtype, getattr(operand, "dtype", torch.bool if operand is True else None)):
        return
    assert_exact(lambda: getattr(torch, name)(x, operand))


def test_in_place_updates_in_another_type():
    """An in-place update that is computed in a wider type keeps the widened destination too."""
    x, y = torch.randn(6, 7, dtype=torch.bfloat16), torch.randn(6, 7)
    assert_exact(lambda: (x.add_(y), x.mul_(0.9), y.add_(x), y.div_(3)))


@FEW
@given(st.sampled_from([(6, 10), (300, 257)]), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_reductions_and_losses(shape, dtype):
    """Means divide in place by a number, in float for bfloat16, and large full reductions keep a slot per thread."""
    x, y = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)

    def run() -> None:
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits):
            loss(x, y).backward()
        x.sum(), x.mean(), x.mean(1), x.std(), x.var(1), x.norm(), x.logsumexp(1), x.softmax(1), x.log_softmax(0)
        (x > 0).sum(), (x > 0).any(), x.sort(1), x.cumsum(0), x.amax(1)
        F.cross_entropy(x, torch.arange(shape[0]) % shape[1]).backward()

    assert_exact(run)


def test_moving_data():
    """Transposing copies go through a tile, masks become positions, BLAS copies what it cannot address."""
    x, mask = torch.randn(70, 90), torch.rand(70, 90) > 0.5
    expanded = torch.randn(1).expand(8, 70)

    def run() -> None:
        x.t().contiguous(), x.clone(), x[mask], x[torch.tensor([0, 3])], x.roll((1, 1), (0, 1)), x.t() @ x
        expanded @ x, torch.addmm(x[0], expanded, x), F.dropout(x, 0.1), aten.native_dropout.default(x, 0.1, True)
        x.masked_fill(mask, 0), torch.where(mask, x, 1.0), torch.cat([x, x]), x.tril()
        x.gather(1, torch.zeros(70, 2, dtype=torch.long))

    assert_exact(run)


class Block(nn.Module):
    """A transformer block with a manual mask, dropout and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.qkv, self.proj, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = (t.view(*x.shape, 4, 8).transpose(1, 2) for t in self.qkv(self.norm(h)).split(32, 2))
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape))
        return self.head(F.dropout(F.gelu(h), 0.1)).flatten(0, 1)


def image_net() -> nn.Module:
    """A small network of the layers of a VGG and a ResNet."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(16, 32, 3, 2, 1), nn.SiLU(), nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(), nn.Linear(128, 50),
    )  # fmt: skip


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw each", "adamw fused"])
@pytest.mark.parametrize("model", [pytest.param("image", marks=with_avx512), "text"])
def test_training_steps(model, optimizer):
    """Every operator of two whole training steps, clipping and optimizer included, peaks where it was predicted to."""
    net = image_net() if model == "image" else Block()
    x = torch.randn(4, 3, 32, 32) if model == "image" else torch.randint(0, 50, (4, 12))
    target = torch.randint(0, 50, (4 if model == "image" else 48,))
    step = {
        "sgd": lambda: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1),
        "adam": lambda: torch.optim.Adam(net.parameters(), foreach=True),
        "adamw each": lambda: torch.optim.AdamW(net.parameters(), foreach=False, amsgrad=True),
        "adamw fused": lambda: torch.optim.AdamW(net.parameters(), fused=True),
    }[optimizer]()

    def run() -> None:
        for _ in range(2):
            step.zero_grad()
            F.cross_entropy(net(x), target).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            step.step()

    assert_exact(run)


class Record(TorchDispatchMode):
    """Keeps what was predicted for every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.predicted: list[tuple[str, int | None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.predicted.append((str(func), kernel_peak_bytes(func, args, kwargs or {}, out, threads=2)))
        return out


@pytest.mark.parametrize("build", [image_net, Block])
def test_fake_tensors_give_the_same_answer(build):
    """A training step over fake tensors predicts, operator by operator, what one over real tensors does."""

    def train(images: Tensor, tokens: Tensor, target: Tensor) -> list[tuple[str, int | None]]:
        net = build()
        with Record() as record:
            F.cross_entropy(net(images if build is image_net else tokens), target).backward()
        return record.predicted

    batch = (torch.randn(4, 3, 32, 32), torch.randint(0, 50, (1, 4)), torch.randint(0, 50, (4,)))
    real = train(*batch)
    with FakeTensorMode() as mode:
        assert train(*tree_map(mode.from_tensor, batch)) == real
    assert any(predicted for _, predicted in real)


def test_meta_tensors_are_enough():
    """Shapes alone decide: a convolution on the meta device is predicted as a real one is."""
    shapes = ((4, 3, 20, 20), (8, 3, 3, 3))
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    peaks = []
    for device in ("cpu", "meta"):
        x, weight = (torch.empty(shape, device=device) for shape in shapes)
        out = aten.convolution.default(x, weight, *rest)
        peaks.append(kernel_peak_bytes(aten.convolution.default, (x, weight, *rest), {}, out, threads=2))
    assert peaks[0] == peaks[1] is not None


def test_operators_without_a_formula_are_not_predicted():
    """An operator that allocates its outputs only is left to them."""
    x = torch.randn(3)
    assert kernel_peak_bytes(aten.relu.default, (x,), {}, x.relu(), threads=1) is None
