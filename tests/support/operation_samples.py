"""Operations of all kinds, each a function that builds its inputs and runs forward, and backward if possible.

They run over real or fake tensors, depending on the active mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributions import Dirichlet, Gamma
from torch.nn import functional as F

Run = Callable[[], object]
FLOAT, DOUBLE, BF16, HALF = torch.float32, torch.float64, torch.bfloat16, torch.float16


def module(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = FLOAT,
    order: torch.memory_format = torch.contiguous_format,
    training: bool = True,
) -> Run:
    """Run forward and backward of a module, with the input's gradient."""

    def run() -> None:
        built = build().to(dtype=dtype).train(training)
        x = torch.rand(shape).to(dtype).to(memory_format=order).requires_grad_()
        backward(built.to(memory_format=order)(x))

    return run


def function(call: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = FLOAT) -> Run:
    """Run forward and backward of a function of tensors between 0 and 1."""

    def run() -> None:
        backward(call(*(torch.rand(shape).to(dtype).requires_grad_() for shape in shapes)))

    return run


def backward(out: object) -> None:
    """Run backward from all results that require it, with dense gradients."""
    results = [
        r for r in (out if isinstance(out, tuple) else (out,)) if isinstance(r, Tensor) and r.requires_grad
    ]
    if results:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def classified(loss: Callable[[Tensor, Tensor], Tensor], *, dtype: torch.dtype = FLOAT) -> Run:
    """Run a classification loss."""
    return function(lambda x: loss(x, torch.zeros(6, dtype=torch.long)), (6, 10), dtype=dtype)


def embedding_bag(mode: str) -> Run:
    """Run bags of different lengths."""

    def run() -> None:
        table = nn.EmbeddingBag(20, 6, mode=mode)
        backward(table(torch.ones(9, dtype=torch.long), torch.tensor([0, 4, 6])))

    return run


class FirstOf(nn.Module):
    """A module that returns the first result of another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)[0]
        return found


class Twice(nn.Module):
    """A module that passes one input twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, x)
        return found


def recurrent(kind: type[nn.RNNBase], *, layers: int = 1, both: bool = False) -> Run:
    """Return outputs and states of a recurrent network."""

    def run() -> None:
        net = kind(8, 12, layers, bidirectional=both)
        backward(net(torch.rand(5, 4, 8).requires_grad_())[0])

    return run


def optimizer(make: Callable[..., torch.optim.Optimizer]) -> Run:
    """Run two clipped steps: state is created in the first."""

    def run() -> None:
        net = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5))
        stepper = make(net.parameters(), lr=0.1)
        for _ in range(2):
            backward(net(torch.rand(4, 20)))
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            stepper.step()
            stepper.zero_grad()

    return run


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run explicit attention with a mask."""
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(
        torch.ones(q.shape[-2], q.shape[-2]).triu(1) > 0, -1e9
    )
    return F.dropout(scores.softmax(-1), 0.1) @ v


def rearranged(x: Tensor) -> Tensor:
    """Run copies in other orders, forward only: a meter sums the gradients of several uses into one tensor
    more.
    """
    y = torch.cat([x.t().contiguous().t(), x.roll((1, 1), (0, 1)), x.flip(0)]).detach()
    return y.index_select(0, torch.zeros(5, dtype=torch.long)).gather(1, torch.zeros(5, 3, dtype=torch.long))


HEADS = (2, 3, 65, 16)
IMAGE = (4, 12, 14, 14)
LAST = torch.channels_last

PRODUCTS: dict[str, Run] = {
    f"{name} {str(dtype).removeprefix('torch.')}": function(call, *shapes, dtype=dtype)
    for dtype in (FLOAT, DOUBLE, BF16, HALF)
    for name, call, shapes in (
        ("mm", torch.mm, ((70, 30), (30, 50))),
        ("bmm", torch.bmm, ((3, 20, 30), (3, 30, 40))),
        ("linear", F.linear, ((6, 70), (40, 70), (40,))),
        ("transposed mm", lambda a, b: a.t() @ b.t(), ((30, 70), (50, 30))),
        ("expanded mm", lambda a, b: a.expand(8, 30) @ b, ((1, 30), (30, 20))),
    )
}
CONVOLUTIONS: dict[str, Run] = {
    "1d": module(partial(nn.Conv1d, 4, 8, 3, padding=1), (2, 4, 20)),
    "1d depthwise": module(partial(nn.Conv1d, 16, 16, 5, padding=2, groups=16), (1, 16, 33)),
    "1d depthwise, transposed input": function(
        lambda x, w: F.conv1d(x.transpose(1, 2), w, padding=2, groups=16), (2, 33, 16), (16, 1, 5)
    ),
    "transposed 2d grouped": module(partial(nn.ConvTranspose2d, 12, 8, 3, 2, groups=2), IMAGE),
    "transposed 2d depthwise": module(partial(nn.ConvTranspose2d, 12, 12, 4, 2, groups=12), IMAGE),
    "2d of a transposed image": function(lambda x, w: F.conv2d(x.transpose(2, 3), w), IMAGE, (8, 12, 3, 3)),
    "2d": module(partial(nn.Conv2d, 12, 32, 3, padding=1), IMAGE),
    "2d one input channel": module(partial(nn.Conv2d, 1, 6, 5), (3, 1, 14, 14)),
    "2d strided": module(partial(nn.Conv2d, 12, 20, 7, 2, 3, bias=False), IMAGE),
    "2d dilated": module(partial(nn.Conv2d, 12, 8, 3, dilation=2), IMAGE),
    "2d depthwise": module(partial(nn.Conv2d, 12, 12, 3, padding=1, groups=12), IMAGE),
    "2d grouped": module(partial(nn.Conv2d, 12, 24, 3, groups=3), IMAGE),
    "2d pointwise": module(partial(nn.Conv2d, 12, 17, 1), IMAGE),
    "2d channels last": module(partial(nn.Conv2d, 12, 16, 3), IMAGE, order=LAST),
    "2d double": module(partial(nn.Conv2d, 12, 6, 3), IMAGE, dtype=DOUBLE),
    "2d bfloat16": module(partial(nn.Conv2d, 12, 16, 3), IMAGE, dtype=BF16),
    "2d bfloat16 channels last": module(partial(nn.Conv2d, 12, 16, 3), IMAGE, dtype=BF16, order=LAST),
    "2d float16": module(partial(nn.Conv2d, 12, 16, 3), IMAGE, dtype=HALF),
    "3d": module(partial(nn.Conv3d, 4, 8, 3, padding=1), (2, 4, 5, 6, 7)),
    "3d double": module(partial(nn.Conv3d, 4, 8, 3), (2, 4, 5, 6, 7), dtype=DOUBLE),
    "3d depthwise": module(partial(nn.Conv3d, 4, 4, 3, groups=4), (2, 4, 5, 6, 7)),
    "transposed 1d": module(partial(nn.ConvTranspose1d, 8, 4, 4, 2, 1), (2, 8, 8)),
    "transposed 2d": module(partial(nn.ConvTranspose2d, 12, 8, 3, padding=1), IMAGE),
    "transposed 2d double": module(partial(nn.ConvTranspose2d, 12, 8, 2, 2), IMAGE, dtype=DOUBLE),
    "transposed 3d": module(partial(nn.ConvTranspose3d, 4, 3, 2, 2), (2, 4, 3, 4, 5)),
}
NORMALISATIONS: dict[str, Run] = {
    f"{name} {words}": module(build, IMAGE, order=order, training=training, dtype=dtype)
    for name, build in {
        "batch norm": partial(nn.BatchNorm2d, 12),
        "group norm": partial(nn.GroupNorm, 3, 12),
        "instance norm": partial(nn.InstanceNorm2d, 12, affine=True),
        "layer norm": partial(nn.LayerNorm, (14, 14)),
        "rms norm": partial(nn.RMSNorm, 14),
    }.items()
    for words, order, training, dtype in (
        ("", torch.contiguous_format, True, FLOAT),
        ("evaluated", torch.contiguous_format, False, FLOAT),
        ("channels last", LAST, True, FLOAT),
        ("bfloat16", torch.contiguous_format, True, BF16),
    )
} | {
    "batch norm of a slice": function(lambda x: nn.BatchNorm2d(6)(x[:, ::2]), IMAGE),
    "layer norm of a transposed image": function(lambda x: nn.LayerNorm(12)(x.permute(0, 2, 3, 1)), IMAGE),
    "layer norm of an expanded row": function(lambda x: nn.LayerNorm(30)(x.expand(8, 30)), (1, 30)),
    "group norm of a transposed image": function(lambda x: nn.GroupNorm(3, 12)(x.transpose(2, 3)), IMAGE),
}
ATTENTION: dict[str, Run] = {
    "fused": function(F.scaled_dot_product_attention, HEADS, HEADS, HEADS),
    "fused causal": function(partial(F.scaled_dot_product_attention, is_causal=True), HEADS, HEADS, HEADS),
    "fused bfloat16": function(F.scaled_dot_product_attention, HEADS, HEADS, HEADS, dtype=BF16),
    "fused masked": function(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.zeros(65, 65)), HEADS, HEADS, HEADS
    ),
    "with dropout": function(partial(F.scaled_dot_product_attention, dropout_p=0.1), HEADS, HEADS, HEADS),
    "written out": function(masked, HEADS, HEADS, HEADS),
    "module": module(lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 9, 32)),
    "weights returned": function(
        lambda q, k, v: nn.MultiheadAttention(32, 4, batch_first=True)(q, k, v, need_weights=True),
        *((2, 9, 32), (2, 9, 32), (2, 9, 32)),
    ),
    "weights of every head": function(
        lambda q, k, v: nn.MultiheadAttention(32, 4)(q, k, v, average_attn_weights=False),
        *((9, 2, 32), (9, 2, 32), (9, 2, 32)),
    ),
}
RECURRENT: dict[str, Run] = {
    "lstm": recurrent(nn.LSTM),
    "lstm of two layers, both ways": recurrent(nn.LSTM, layers=2, both=True),
    "gru": recurrent(nn.GRU),
    "gru of two layers, both ways": recurrent(nn.GRU, layers=2, both=True),
    "lstm, batch first": module(lambda: FirstOf(nn.LSTM(8, 12, batch_first=True)), (4, 5, 8)),
    "lstm cell": function(lambda x: nn.LSTMCell(8, 12)(x)[0], (4, 8)),
    "rnn": recurrent(nn.RNN),
}
LOSSES: dict[str, Run] = {
    "cross entropy": classified(F.cross_entropy),
    "cross entropy bfloat16": classified(F.cross_entropy, dtype=BF16),
    "smoothed cross entropy": classified(partial(F.cross_entropy, label_smoothing=0.1)),
    "multi margin": classified(F.multi_margin_loss),
    **{
        loss.__name__: function(lambda x, y, loss=loss: loss(x, y.detach()), (6, 300), (6, 300))
        for loss in (
            *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss),
            *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss),
        )
    },
}
IMAGES: dict[str, Run] = {
    f"{name}{words}": function(lambda x, call=call, order=order: call(x.to(memory_format=order)), IMAGE)
    for name, call in {
        "max pool": partial(F.max_pool2d, kernel_size=2),
        "average pool": partial(F.avg_pool2d, kernel_size=3, stride=2),
        "adaptive average pool": partial(F.adaptive_avg_pool2d, output_size=3),
        "adaptive max pool": partial(F.adaptive_max_pool2d, output_size=3),
        "nearest": partial(F.interpolate, scale_factor=2),
        "bilinear": partial(F.interpolate, size=(11, 5), mode="bilinear"),
        "bilinear, smaller": partial(F.interpolate, size=(5, 5), mode="bilinear", antialias=True),
        "bicubic": partial(F.interpolate, scale_factor=2.0, mode="bicubic"),
        "reflection": partial(F.pad, pad=(1, 2, 1, 1), mode="reflect"),
        "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
        "unfold": partial(F.unfold, kernel_size=3),
        "fractions of a grid": lambda x: F.grid_sample(x, torch.zeros(4, 5, 5, 2), align_corners=False),
        "max unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        "local response": partial(F.local_response_norm, size=3),
        "fractional max pool in space": lambda x: F.fractional_max_pool3d(x.unsqueeze(1), 2, output_size=2),
    }.items()
    for words, order in ((", channels last", LAST), ("", torch.contiguous_format))
}
MATRIX = (70, 90)
POINTWISE: dict[str, Run] = {
    f"{name} {str(dtype).removeprefix('torch.')}": function(call, MATRIX, dtype=dtype)
    for dtype in (FLOAT, BF16)
    for name, call in {
        "softmax": partial(torch.softmax, dim=1),
        "log softmax": partial(torch.log_softmax, dim=0),
        "dropout": partial(F.dropout, p=0.3),
        "sort": lambda x: x.detach().sort(1),
        "topk": lambda x: x.detach().topk(7),
        "cumulated": partial(torch.cumsum, dim=0),
        "gelu": F.gelu,
        "silu": F.silu,
        "numbers": lambda x: (x * 1.5 + 2 - x / 3) ** 2,
        "other types": lambda x: x * torch.ones(70, 90) + torch.ones(90, dtype=torch.long),
        "in place": lambda x: x.clone().mul_(0.9).add_(torch.ones(90)),
        "reduced": lambda x: (x.mean(), x.sum(1), x.std(), x.var(1), x.norm(), x.logsumexp(1), x.amax(1)),
        "rearranged": rearranged,
        "where": lambda x: torch.where(x > 0.5, x, 0.0).tril(),
        "masked": lambda x: x.masked_fill(x > 0.5, 0),
    }.items()
}
OTHERS: dict[str, Run] = {
    **{f"bag, {mode}": embedding_bag(mode) for mode in ("sum", "mean")},
    "fold": function(lambda x: F.fold(x, (6, 6), 3), (2, 18, 16)),
    "linear interpolation": function(lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (2, 3, 9)),
    "trilinear interpolation": function(
        lambda x: F.interpolate(x, size=4, mode="trilinear"), (1, 2, 3, 3, 3)
    ),
    "glu": function(F.glu, (6, 20)),
    "scattered": function(
        lambda x: x.detach().scatter_add(0, torch.zeros(3, 5, dtype=torch.long), x[:3].detach()), (6, 5)
    ),
    "bilinear form": module(lambda: Twice(nn.Bilinear(6, 6, 4)), (5, 6)),
    "pairwise distance": function(F.pairwise_distance, (6, 5), (6, 5)),
    "cosine similarity": function(F.cosine_similarity, (6, 5), (6, 5)),
    "repeated": function(lambda x: x.repeat_interleave(3, 0) * x.repeat(3, 1), (6, 5)),
    "embedding": lambda: backward(nn.Embedding(20, 6)(torch.zeros(3, 4, dtype=torch.long))),
    "einsum": function(partial(torch.einsum, "bij,bkj->bik"), (2, 5, 6), (2, 7, 6)),
    "cdist": function(torch.cdist, (2, 5, 6), (2, 7, 6)),
    "large sum": function(torch.sum, (300, 257)),
    "sgd": optimizer(partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "adam": optimizer(partial(torch.optim.Adam, foreach=True, amsgrad=True)),
    "adamw": optimizer(torch.optim.AdamW),
    "adamw fused": optimizer(partial(torch.optim.AdamW, fused=True)),
    "adagrad": optimizer(torch.optim.Adagrad),
    "rmsprop": optimizer(partial(torch.optim.RMSprop, centered=True)),
}
QUANTISATION: dict[str, Run] = {
    "one scale": function(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), MATRIX),
    "one scale as a tensor": function(
        lambda x: torch.fake_quantize_per_tensor_affine(
            x, torch.ones(1), torch.zeros(1, dtype=torch.int), 0, 255
        ),
        MATRIX,
    ),
    "a scale for each column": function(
        lambda x: torch.fake_quantize_per_channel_affine(
            x, torch.ones(MATRIX[1]), torch.zeros(MATRIX[1], dtype=torch.int), 1, 0, 255
        ),
        MATRIX,
    ),
    "a scale that is learnt": function(
        lambda x, scale: torch._fake_quantize_learnable_per_tensor_affine(
            x, scale, torch.zeros(1), 0, 255, 1.0
        ),
        MATRIX,
        (1,),
    ),
}
DRAWS: dict[str, Run] = {
    "gamma": function(lambda x: Gamma(x + 0.1, 1.0, validate_args=False).rsample(), MATRIX),
    "dirichlet": function(lambda x: Dirichlet(x + 0.1, validate_args=False).rsample(), MATRIX),
}
COMPLEX: dict[str, Run] = {
    f"{name} {str(dtype).removeprefix('torch.')}": function(call, *shapes, dtype=dtype)
    for dtype in (torch.complex64, torch.complex128)
    for name, call, shapes in (
        ("mm", torch.mm, ((70, 30), (30, 50))),
        ("mm of a conjugate", lambda a, b: a.conj() @ b, ((70, 30), (30, 50))),
        ("mm of an adjoint", lambda a, b: a.mH @ b, ((30, 70), (30, 50))),
        ("mm by an adjoint", lambda a, b: a @ b.mH, ((70, 30), (50, 30))),
        ("mm of conjugates", lambda a, b: a.conj() @ b.conj(), ((70, 30), (30, 50))),
        ("mm of transposed ones", lambda a, b: a.t() @ b.t(), ((30, 70), (50, 30))),
        ("mm of a negative", lambda a, b: torch._neg_view(a) @ b, ((70, 30), (30, 50))),
        ("mm of an expanded conjugate", lambda a, b: a.conj().expand(8, 30) @ b, ((1, 30), (30, 20))),
        ("mv", lambda a, b: a.conj() @ b, ((70, 30), (30,))),
        ("dot", lambda a, b: a.conj() @ b, ((300,), (300,))),
        ("vdot", torch.vdot, ((300,), (300,))),
        ("addmm", lambda c, a, b: torch.addmm(c.conj(), a.conj(), b), ((70, 50), (70, 30), (30, 50))),
        ("bmm", torch.bmm, ((3, 20, 30), (3, 30, 40))),
        ("bmm of a conjugate", lambda a, b: torch.bmm(a.conj(), b), ((3, 20, 30), (3, 30, 40))),
        ("bmm by an adjoint", lambda a, b: torch.bmm(a, b.mH), ((3, 20, 30), (3, 40, 30))),
        ("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b.conj()), ((3, 20, 40), (3, 20, 30), (3, 30, 40))),
        ("matmul", lambda a, b: a.conj() @ b, ((2, 3, 20, 30), (30, 40))),
        ("linear", F.linear, ((6, 70), (40, 70), (40,))),
        ("linear in three dimensions", lambda x, w: F.linear(x, w.conj()), ((2, 6, 70), (40, 70))),
        ("einsum of modes", partial(torch.einsum, "bix,iox->box"), ((4, 6, 9), (6, 8, 9))),
        (
            "einsum of modes in a plane",
            partial(torch.einsum, "bixy,ioxy->boxy"),
            ((2, 6, 5, 4), (6, 8, 5, 4)),
        ),
        ("outer product", lambda a, b: torch.outer(a, b.conj()), ((70,), (50,))),
        ("product with a conjugate", lambda a, b: a * b.conj() + a.conj(), (MATRIX, MATRIX)),
        ("numbers", lambda a: (a * 2 + 1j) / 3, (MATRIX,)),
        ("sums", lambda a: (a.sum(), a.mean(1), a.conj().sum(0)), (MATRIX,)),
        ("absolute", lambda a: (a.abs(), a.angle()), (MATRIX,)),
        ("parts", lambda a: a.real * a.imag, (MATRIX,)),
        ("parts of a conjugate", lambda a: a.conj().real * a.conj().imag, (MATRIX,)),
        ("view as real", lambda a: torch.view_as_real(a) * 2, (MATRIX,)),
        ("view of pairs as complex", lambda a: torch.view_as_complex(torch.view_as_real(a) * 2), (MATRIX,)),
        ("conjugated in memory", lambda a: (a.conj_physical(), a.conj().resolve_conj()), (MATRIX,)),
        (
            "negated in memory",
            lambda a: torch._neg_view(a).resolve_neg() + a.conj().imag.resolve_neg(),
            (MATRIX,),
        ),
        ("exponential", lambda a: torch.exp(a) + torch.sqrt(a), (MATRIX,)),
        ("joined", lambda a, b: torch.cat((a, b.conj())), (MATRIX, MATRIX)),
        ("copied", lambda a: a.conj().contiguous().t().contiguous() + a.conj().clone().t(), (MATRIX,)),
        ("fft", torch.fft.fft, (MATRIX,)),
        ("fft of a conjugate", lambda a: torch.fft.fft(a.conj()), (MATRIX,)),
        ("fft along columns", partial(torch.fft.fft, dim=0), (MATRIX,)),
        ("ifft", partial(torch.fft.ifft, norm="ortho"), (MATRIX,)),
        ("fft2", torch.fft.fft2, ((2, 3, 12, 10),)),
        ("ifft2 of a permuted image", lambda a: torch.fft.ifft2(a.permute(0, 3, 1, 2)), ((2, 12, 10, 3),)),
        ("irfft", partial(torch.fft.irfft, n=90), ((70, 46),)),
        ("irfft2", torch.fft.irfft2, ((2, 3, 12, 6),)),
        ("hfft", torch.fft.hfft, ((70, 46),)),
        ("shifted", torch.fft.fftshift, (MATRIX,)),
    )
} | {
    f"{name} {str(dtype).removeprefix('torch.')}": function(call, *shapes, dtype=dtype)
    for dtype in (FLOAT, DOUBLE)
    for name, call, shapes in (
        ("rfft", torch.fft.rfft, (MATRIX,)),
        ("rfft2", torch.fft.rfft2, ((2, 3, 12, 10),)),
        ("rfftn, padded", partial(torch.fft.rfftn, s=(16, 16), dim=(-2, -1)), ((2, 3, 12, 10),)),
        ("fft of real numbers", torch.fft.fft, (MATRIX,)),
        ("polar", torch.polar, (MATRIX, MATRIX)),
        ("complex", torch.complex, (MATRIX, MATRIX)),
        (
            "rotary",
            lambda x, a: torch.view_as_real(
                torch.view_as_complex(x.view(4, 9, 8, 2)) * torch.polar(torch.ones_like(a), a)
            ),
            ((4, 9, 16), (9, 8)),
        ),
    )
}
ROWS = (48, 64)
PICKS: dict[str, Run] = {  # autograd changes a new tensor in place, but not under a dispatch mode
    name: function(call, *shapes)
    for name, call, *shapes in (
        ("gather", lambda x: x.gather(1, torch.zeros(48, 40, dtype=torch.long)), ROWS),
        ("index", lambda x: x[:, torch.zeros(40, dtype=torch.long)], ROWS),
        ("index_select", lambda x: x.index_select(0, torch.zeros(40, dtype=torch.long)), ROWS),
        ("take", lambda x: x.take(torch.zeros(9, dtype=torch.long)), ROWS),
        ("trace", lambda x: x.trace(), ROWS),
        ("max", lambda x: x.max(1).values, ROWS),
        ("median", lambda x: x.median(1).values, ROWS),
        ("kthvalue", lambda x: x.kthvalue(3, 1).values, ROWS),
        ("mode", lambda x: x.mode(1).values, ROWS),
        ("sort", lambda x: x.sort(1).values, ROWS),
        ("topk", lambda x: x.topk(5, 1).values, ROWS),
        ("cummax", lambda x: x.cummax(1).values, ROWS),
        ("binary cross entropy", lambda x, y: F.binary_cross_entropy(x, y, reduction="sum"), ROWS, ROWS),
        (
            "binary cross entropy of logits",
            lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(48, 64), reduction="none"),
            ROWS,
        ),
        (
            "weighed binary cross entropy of logits",
            lambda x: F.binary_cross_entropy_with_logits(
                x, torch.ones(48, 64), weight=torch.ones(64), pos_weight=torch.ones(48, 64), reduction="none"
            ),
            ROWS,
        ),
    )
}
OPERATIONS: dict[str, Run] = dict(
    chain.from_iterable(
        ((f"{family}: {name}", run) for name, run in runs.items())
        for family, runs in {
            "product": PRODUCTS,
            "convolution": CONVOLUTIONS,
            "normalisation": NORMALISATIONS,
            "attention": ATTENTION,
            "recurrent": RECURRENT,
            "loss": LOSSES,
            "image": IMAGES,
            "pointwise": POINTWISE,
            "quantisation": QUANTISATION,
            "draw": DRAWS,
            "complex": COMPLEX,
            "picks": PICKS,
            "other": OTHERS,
        }.items()
    )
)
