"""Arguments for every operator that CUDA autocast casts, and the results of calling it.

The oracle is torch's own: the CPU build of torch has the autocast kernels for CUDA, and fake tensors on
`cuda` reach them as long as no graph is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Described = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Floats:
    """A tensor of floating-point numbers, of this shape; contiguous."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Indices:
    """A tensor of integers, of this shape."""

    shape: tuple[int, ...]


def f(*shape: int) -> Floats:
    return Floats(shape)


def i(*shape: int) -> Indices:
    return Indices(shape)


_IMAGE, _KERNEL, _BIAS = f(2, 4, 8, 8), f(4, 4, 3, 3), f(4)
_ONE, _ZERO = [1, 1], [0, 0]
_GATES = {"lstm": 24, "gru": 18, "rnn": 6}
_ATTENDED = (f(2, 4, 8, 16),) * 3
_PAIR = (f(4, 6), f(4, 6))
_UNARY = ("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
          "sinh", "tan", "softplus")  # fmt: skip
_PAIRED = ("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
           "soft_margin_loss", "binary_cross_entropy_with_logits", "dist", "cosine_similarity", "atan2")  # fmt: skip


def _cell(kind: str, state: Any) -> tuple[Any, ...]:
    gates = _GATES[kind]
    return f(3, 8), state, f(gates, 8), f(gates, 6), f(gates), f(gates)


SAMPLES: dict[str, Sequence[Any]] = {
    **{f"aten::{name}": (f(4, 6),) for name in _UNARY},
    **{f"aten::{name}": _PAIR for name in _PAIRED},
    "aten::cudnn_convolution": (_IMAGE, _KERNEL, _ONE, _ONE, _ONE, 1, False, False, False),
    "aten::cudnn_convolution_transpose": (_IMAGE, _KERNEL, _ONE, _ZERO, _ONE, _ONE, 1, False, False, False),
    "aten::_convolution.deprecated": (_IMAGE, _KERNEL, _BIAS, _ONE, _ONE, _ONE, False, _ZERO, 1, False, False, True),
    "aten::_convolution": (_IMAGE, _KERNEL, _BIAS, _ONE, _ONE, _ONE, False, _ZERO, 1, False, False, True, True),
    "aten::convolution": (_IMAGE, _KERNEL, _BIAS, _ONE, _ONE, _ONE, False, _ZERO, 1),
    "aten::conv1d": (f(2, 4, 8), f(4, 4, 3), _BIAS),
    "aten::conv2d": (_IMAGE, _KERNEL, _BIAS),
    "aten::conv3d": (f(2, 4, 6, 6, 6), f(4, 4, 3, 3, 3), _BIAS),
    "aten::conv_tbc": (f(8, 2, 4), f(3, 4, 5), f(5)),
    "aten::conv_transpose1d": (f(2, 4, 8), f(4, 4, 3), _BIAS),
    "aten::conv_transpose2d.input": (_IMAGE, _KERNEL, _BIAS),
    "aten::conv_transpose3d.input": (f(2, 4, 6, 6, 6), f(4, 4, 3, 3, 3), _BIAS),
    "aten::prelu": (f(2, 4, 8), _BIAS),
    "aten::addmm": (f(4, 5), f(4, 6), f(6, 5)),
    "aten::addmv": (f(4), f(4, 6), f(6)),
    "aten::addr": (f(4, 6), f(4), f(6)),
    "aten::matmul": (f(2, 4, 6), f(6, 5)),
    "aten::einsum": ("ij,jk->ik", [f(4, 6), f(6, 5)]),
    "aten::mm": (f(4, 6), f(6, 5)),
    "aten::mv": (f(4, 6), f(6)),
    "aten::linalg_vecdot": _PAIR,
    "aten::linear": (f(3, 4, 6), f(5, 6), f(5)),
    "aten::addbmm": (f(4, 5), f(2, 4, 6), f(2, 6, 5)),
    "aten::baddbmm": (f(2, 4, 5), f(2, 4, 6), f(2, 6, 5)),
    "aten::bmm": (f(2, 4, 6), f(2, 6, 5)),
    "aten::chain_matmul": ([f(4, 6), f(6, 5), f(5, 3)],),
    "aten::linalg_multi_dot": ([f(4, 6), f(6, 5), f(5, 3)],),
    "aten::_thnn_fused_lstm_cell": (f(3, 24), f(3, 24), f(3, 6), f(24), f(24)),
    "aten::_thnn_fused_gru_cell": (f(3, 18), f(3, 18), f(3, 6), f(18), f(18)),
    "aten::lstm_cell": _cell("lstm", [f(3, 6), f(3, 6)]),
    "aten::gru_cell": _cell("gru", f(3, 6)),
    "aten::rnn_tanh_cell": _cell("rnn", f(3, 6)),
    "aten::rnn_relu_cell": _cell("rnn", f(3, 6)),
    "aten::_scaled_dot_product_flash_attention": _ATTENDED,
    "aten::scaled_dot_product_attention": _ATTENDED,
    "aten::pow.Tensor_Scalar": (f(4, 6), 2.0),
    "aten::pow.Tensor_Tensor": _PAIR,
    "aten::pow.Scalar": (2.0, f(4, 6)),
    "aten::layer_norm": (f(4, 6), [6], f(6), f(6)),
    "aten::native_layer_norm": (f(4, 6), [6], f(6), f(6), 1e-5),
    "aten::rms_norm": (f(4, 6), [6], f(6)),
    "aten::group_norm": (_IMAGE, 2, _BIAS, _BIAS),
    "aten::frobenius_norm.dim": (f(4, 6), [1]),
    "aten::nuclear_norm": (f(4, 6),),
    "aten::nuclear_norm.dim": (f(4, 6), [0, 1]),
    "aten::poisson_nll_loss": (*_PAIR, True, False, 1e-8, 1),
    "aten::cosine_embedding_loss": (*_PAIR, f(4)),
    "aten::nll_loss": (f(4, 6), i(4), f(6)),
    "aten::nll_loss2d": (_IMAGE, i(2, 8, 8), _BIAS),
    "aten::margin_ranking_loss": (f(4), f(4), f(4)),
    "aten::multilabel_margin_loss": (f(4, 6), i(4, 6)),
    "aten::triplet_margin_loss": (*_PAIR, f(4, 6)),
    "aten::multi_margin_loss": (f(4, 6), i(4)),
    "aten::pdist": (f(4, 6),),
    "aten::cdist": (f(4, 6), f(5, 6)),
    "aten::renorm": (f(4, 6), 2, 0, 1.0),
    "aten::logsumexp": (f(4, 6), [1]),
    **{f"aten::{name}1d": (f(2, 4, 8), [16]) for name in ("upsample_nearest", "_upsample_nearest_exact")},
    **{f"aten::{name}2d": (_IMAGE, [16, 16]) for name in ("upsample_nearest", "_upsample_nearest_exact")},
    **{f"aten::{name}3d": (f(2, 4, 4, 4, 4), [8] * 3) for name in ("upsample_nearest", "_upsample_nearest_exact")},
    "aten::upsample_linear1d": (f(2, 4, 8), [16], False),
    **{f"aten::{name}": (_IMAGE, [16, 16], False) for name in
       ("upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa")},
    "aten::upsample_trilinear3d": (f(2, 4, 4, 4, 4), [8] * 3, False),
    "aten::prod": (f(4, 6),),
    "aten::prod.dim_int": (f(4, 6), 1),
    "aten::softmax.int": (f(4, 6), 1),
    "aten::log_softmax.int": (f(4, 6), 1),
    "aten::cumprod": (f(4, 6), 1),
    "aten::cumsum": (f(4, 6), 1),
    "aten::linalg_vector_norm": (f(4, 6),),
    "aten::linalg_matrix_norm": (f(4, 6), 1),
    "aten::linalg_matrix_norm.str_ord": (f(4, 6),),
    "aten::sum": (f(4, 6),),
    "aten::sum.dim_IntList": (f(4, 6), [1]),
    "aten::norm.Scalar": (f(4, 6),),
    "aten::norm.ScalarOpt_dim": (f(4, 6), 2, [1]),
    "aten::addcdiv": (*_PAIR, f(4, 6)),
    "aten::addcmul": (*_PAIR, f(4, 6)),
    "aten::bilinear": (f(4, 6), f(4, 5), f(3, 6, 5), f(3)),
    "aten::cross": (f(4, 3), f(4, 3)),
    "aten::dot": (f(6), f(6)),
    "aten::vdot": (f(6), f(6)),
    "aten::grid_sampler": (_IMAGE, f(2, 5, 5, 2), 0, 0, False),
    "aten::index_put": (f(4, 6), [i(3)], f(3, 6)),
    "aten::tensordot": (f(4, 6), f(6, 5), [1], [0]),
    "aten::scatter_add": (f(4, 6), 1, i(4, 6), f(4, 6)),
}  # fmt: skip


def overload(name: str) -> Any:
    """Return the operator of that name in `torch.ops`."""
    base, _, form = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), form or "default")


def made(
    sample: Sequence[Any], dtypes: Sequence[torch.dtype], device: str, *, leaves: bool = False
) -> list[Any]:
    """Return the arguments of a sample: its floating-point tensors take the dtypes in turn; `leaves` get
    gradients.
    """
    count = 0

    def make(spec: Any) -> Any:
        nonlocal count
        if isinstance(spec, Indices):
            return torch.zeros(spec.shape, dtype=torch.long, device=device)
        if not isinstance(spec, Floats):
            return spec
        dtype = dtypes[count % len(dtypes)]
        count += 1
        return torch.empty(spec.shape, dtype=dtype, device=device, requires_grad=leaves)

    return [pytree.tree_map(make, spec) for spec in sample]


@dataclass
class Call:
    """An operation that reached a device, with its tensor arguments and results."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def described(self) -> tuple[str, list[Described], list[Described]]:
        return str(self.func), described((self.args, self.kwargs)), described(self.out)


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations that reach a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self.calls.append(Call(func, args, kwargs or {}, out))
        return out


def described(tree: Any) -> list[Described]:
    """Return shape, strides and dtype of every tensor in a tree."""
    return [(tuple(t.shape), t.stride(), t.dtype) for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


@contextmanager
def cuda_casts(low: torch.dtype) -> Iterator[None]:
    """Turn on torch's autocast for CUDA, whose context manager turns itself off without a GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", low)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


def on_cuda(name: str, dtypes: Sequence[torch.dtype], low: torch.dtype) -> tuple[list[Any], Kernels, str]:
    """Return an operator's arguments, the calls that reach a fake `cuda` under torch's autocast, and the
    exception.
    """
    with (
        FakeTensorMode(allow_fallback_kernels=False),
        torch.no_grad(),
        torch.backends.cudnn.flags(enabled=False),
    ):
        arguments = made(SAMPLES[name], dtypes, "cuda")
        with cuda_casts(low), Kernels() as kernels:
            return arguments, kernels, raised(lambda: overload(name)(*arguments))


def raised(call: Callable[[], Any]) -> str:
    """Return the message of the exception that a call raises, or an empty text."""
    logging.disable(logging.CRITICAL)  # fake tensors log the exceptions they raise
    try:
        call()
    except Exception as error:  # noqa: BLE001 -- whatever torch raises
        return f"{type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)
    return ""


def replayed(arguments: Sequence[Any], kernels: Kernels, own: Sequence[Any], device: torch.device) -> Any:
    """Replay the operations one by one, without autocast, on `own` arguments on `device`."""
    known = dict(zip(map(id, pytree.tree_leaves(arguments)), pytree.tree_leaves(own), strict=True))
    out = None
    for call in kernels.calls:
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t, known=known: known[id(t)], (call.args, call.kwargs)
        )
        kwargs |= {"device": device} if "device" in kwargs else {}
        out = call.func(*args, **kwargs)
        known |= dict(zip(map(id, pytree.tree_leaves(call.out)), pytree.tree_leaves(out), strict=True))
    return out
