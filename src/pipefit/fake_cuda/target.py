"""Fake devices: profiles and dry runs build the model there; their kernels determine the saved tensors.

    with FakeTarget("cuda") as fake:
        model = torch.nn.Linear(4096, 4096, device=fake.device)     # or built as usual, then
        `.to(fake.device)` loss = model(fake.fake(batch)).sum()
        loss.backward()                                             # no bytes, no GPU: shapes, strides,
        storages

Target `cpu` is `FakeTensorMode` over CPU tensors: the CPU's kernels. Target `cuda` follows CUDA's: dropout
saves a boolean mask, normalizations float32 statistics, attention is fused (`attention_choice`), RNN cells
are fused, optimizers and gradient clipping take their foreach path.

Its fake tensors are on `fakecuda:0`, registered from Python as the one device type that torch leaves open for
extensions (PrivateUse1). Torch's C++ code treats such a device like CUDA almost everywhere, which patches of
Python functions could not achieve. Behavior that torch reserves for CUDA is added here: the choice of kernels
(`attention_choice`, and the rules below), and autocast (`autocast_of`). A GPU of the machine is not used: the
answers are equal on every machine, no CUDA context is created, and no random generator of the caller changes.

The first `cuda` target registers the device type for the rest of the process. Then
`torch.accelerator.is_available()` is false, `device_count()` is zero, and `current_accelerator()` is
`fakecuda`. Autograd has streams for that accelerator alone: in such a process a backward on a real GPU fails.
Hence `fake_cuda.isolation`, and `runtime.hardware.check_backwards`.

Not imitated:

- memory that a GPU kernel allocates and frees in one call: flash backward's float32 accumulators, cuDNN's,
  cuBLAS's;
- kernel reserves that last until backward: instead of cuDNN's, RNNs save those of fused cells, and batch norm
  saves none; that of oneDNN for an LSTM on the CPU is measured by a meter with `Kernels`;
- branches of torch's C++ code on `tensor.is_cuda`, which is false on `fakecuda`, except those that are known
  to matter; the choices for CUDA under `torch.inference_mode`.

An operator whose shapes torch does not know is refused by name (`UnsupportedOperatorException`): nothing is
computed. Results of operations that depend on values are assumed (`capture.whole_modules`).

`tests/test_private_torch.py` fails first if torch changes a private interface that fake devices use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.optim import optimizer as optim_optimizer
from torch.utils import backend_registration

from pipefit.capture import CudaCasts, as_on_cuda, assumed, is_named, unknown
from pipefit.errors import UsageError
from pipefit.fake_cuda.results import Key, Known, QuickFakeMode
from pipefit.schema.layer_costs import Kernel, KernelMemory
from pipefit.schema.profile import Target
from pipefit.texts import dtype_name
from pipefit.torch_internals import enabled_kernels, has_kernel, pytree, without_dispatch_modes
from pipefit.torch_internals.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    PrivateUse1Hooks,
    foreach_utils,
    privateuse1_name,
)
from pipefit.torch_internals.patches import (
    counting_as_cuda,
    no_negative_variance,
    values_known_of_originals,
    without_gpus,
)

# ---- The attention kernel that CUDA chooses
#
# The kernel, not the model, determines what an attention layer saves for backward. With q, k, v, out of B x H
# x T x D:
#
#     flash       q, k, v, out, logsumexp (B, H, T) float32                            half precision, no mask
#     efficient   q, k, v, out, mask, logsumexp (B, H, T rounded up to 32) float32     float32, or a mask, any
#     precision cudnn       q, k, v, out, mask, logsumexp (B, H, T, 1) float32                   only if
#     requested, see below math        q, k, v, and every intermediate B x H x T x T score matrix
#     everything else
#
# The conditions are those of torch's `sdp_utils` for compute capability 8.0 and later; the first match in
# priority order counts. Dropout inside a fused kernel saves a seed, never a mask. The order is torch's:
# flash, efficient, math; then cuDNN. Hopper and datacenter Blackwell builds with cuDNN 9.15.1 or later put
# cuDNN first. That choice is not imitated: its bytes are flash's, except that with a mask its logsumexp is
# not rounded. `torch.nn.attention.sdpa_kernel` is obeyed.


_HALVES = (torch.float16, torch.bfloat16)
_BIAS_ALIGNMENT = 8  # elements: the efficient kernel reads its bias in blocks of this size
_FLASH_ALIGNMENT = 8  # elements: flash pads head dimensions to a multiple of this


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> SDPBackend:
    """Return the kernel that CUDA chooses: the first enabled one in torch's order that can run these tensors.

    Raises:
        UsageError: `sdpa_kernel` (or `torch.backends.cuda.enable_*_sdp`) left no kernel that can.
    """
    enabled: list[SDPBackend] = enabled_kernels(with_priority=True)
    fusable = _fusable(query, key, value, mask, enable_gqa)
    able = {
        SDPBackend.FLASH_ATTENTION: fusable and _flash_can(query, key, value, mask, is_causal),
        SDPBackend.EFFICIENT_ATTENTION: fusable and _efficient_can(query, key, value, enable_gqa),
        SDPBackend.CUDNN_ATTENTION: fusable and _cudnn_can(query, key, value, dropout_p),
        SDPBackend.MATH: True,
    }
    for backend in enabled:
        if able.get(backend, False):
            return backend
    raise UsageError(
        f"no enabled attention kernel supports query {tuple(query.shape)} {query.dtype}: "
        f"{[b.name for b in enabled]} are enabled; add SDPBackend.MATH, which supports all"
    )


def _fusable(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    """Return whether fused kernels are possible: 4-D, one batch size, matching heads, dense last
    dimension.
    """
    tensors = (query, key, value)
    if (
        any(t.dim() != 4 for t in tensors)
        or len({t.shape[0] for t in tensors}) > 1
        or key.shape[1] != value.shape[1]
    ):
        return False
    heads_match = query.shape[1] % key.shape[1] == 0 if enable_gqa else query.shape[1] == key.shape[1]
    dense = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors) and (
        mask is None or mask.stride(-1) == 1
    )
    return heads_match and dense and query.shape[2] > 0 and key.shape[2] > 0


def _flash_can(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    same_head_dim = query.shape[-1] == key.shape[-1] == value.shape[-1]
    square = query.shape[2] == key.shape[2]
    return (
        mask is None
        and query.dtype in _HALVES
        and same_head_dim
        and query.shape[-1] <= 256
        and (square or not is_causal)
    )


def _efficient_can(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    aligned = 16 // query.element_size()  # tensor cores load 16 bytes at a time
    head_dims = (
        query.shape[-1] == key.shape[-1] and query.shape[-1] % aligned == 0 and value.shape[-1] % aligned == 0
    )
    same_heads = not enable_gqa or query.shape[1] == key.shape[1]
    return query.dtype in (*_HALVES, torch.float32) and head_dims and same_heads


def _cudnn_can(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> bool:
    head_dims = all(t.shape[-1] <= 128 and t.shape[-1] % 8 == 0 for t in (query, value))
    return query.dtype in _HALVES and head_dims and key.shape[2] > 1 and (dropout_p * 16).is_integer()


def cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `scaled_dot_product_attention` as its CUDA path composes it, for any device with fake tensors."""
    aten = torch.ops.aten
    backend = choose_kernel(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    mask = _additive(attn_mask, query.dtype)
    logsumexp = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if backend is SDPBackend.FLASH_ATTENTION:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend is SDPBackend.EFFICIENT_ATTENTION:
        bias = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, logsumexp, dropout_p, is_causal, scale=scale
        )
    elif backend is SDPBackend.CUDNN_ATTENTION:
        out = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, logsumexp, dropout_p, is_causal, False, scale=scale
        )
    else:
        out = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    attended: Tensor = out[0]
    return attended


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Run flash attention with padded head dimensions, as CUDA does: the padded copies are saved."""
    head_dim = query.shape[-1]
    padded = [
        F.pad(t, (0, -head_dim % _FLASH_ALIGNMENT)) if head_dim % _FLASH_ALIGNMENT else t
        for t in (query, key, value)
    ]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        *padded, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head_dim] if out.shape[-1] != head_dim else out


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as the bias that kernels take: a new tensor, which is then saved."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _aligned(mask: Tensor) -> Tensor:
    """Return the bias, copied into padded rows if its strides are not multiples of eight elements."""
    if mask.stride(-1) == 1 and all(stride % _BIAS_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, _BIAS_ALIGNMENT - length % _BIAS_ALIGNMENT))[..., :length]


# ---- Decisions by which torch distinguishes CUDA tensors, made equally for `fakecuda`
#
# - The shapes of some results, and what some operators keep for backward (`logsigmoid`, `embedding_bag`,
#   transforms): torch's Python code for fake tensors reads `is_cuda`, or `device_hint`. So does the code of
#   models.
# - `softmax` of float16 into float32, which is one kernel on CUDA, and a conversion and a kernel elsewhere.
# - Operators that are composed of others on devices without a kernel for them, which CUDA has (`KERNELS`).
# - Attention, in `attention_choice`.
#
# Torch's C++ code reads `is_cuda` too; no further decision is known to matter.

aten = torch.ops.aten
KERNELS = ("_fused_rms_norm", "mish_backward", "silu_backward")


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Run `softmax` as its CUDA path composes it."""
    return _normalised(aten._softmax.default, x, dim, dtype)


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Run `log_softmax` as its CUDA path composes it."""
    return _normalised(aten._log_softmax.default, x, dim, dtype)


def _normalised(kernel: Callable[..., Any], x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    half_to_float = x.dtype == torch.float16 and dtype == torch.float32
    result: Tensor = kernel(x if half_to_float or dtype is None else x.to(dtype), dim, half_to_float)
    return result


def kernel(*_: object, **__: object) -> None:
    """Stand for a CUDA kernel: its presence decides, and fake tensors never reach it."""
    raise NotImplementedError("a kernel of a device without bytes")


# ---- Products of tensors of different dtypes, refused as the real kernels refuse them
#
# torch's shape rules for products ignore dtypes, so a float32 batch would pass through a float64 model in a
# profile, and fail in training.


_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.convolution.default,
    }
)


def check_product(func: Any, args: tuple[Any, ...]) -> None:
    """Check that the tensors in a product have one dtype.

    Raises:
        TypeError: they have several.
    """
    if func in _PRODUCTS:
        dtypes = dict.fromkeys(dtype_name(arg.dtype) for arg in args if isinstance(arg, Tensor))
        if len(dtypes) > 1:
            raise TypeError(f"a product of {' and '.join(dtypes)}")


# ---- Results of convolutions in cuDNN's layout, by ATen's rule: channels last if images or weights are


_CONVOLUTIONS = {aten.convolution.default: slice(0, 2), aten.convolution_backward.default: slice(1, 3)}
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def cudnn_format(func: Any, args: tuple[Any, ...]) -> torch.memory_format:
    """Return the memory format in which cuDNN writes the results of an operation."""
    for tensor in args[_CONVOLUTIONS[func]]:
        last = _LAST.get(tensor.dim(), torch.contiguous_format)
        if tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
            return torch.contiguous_format if tensor.dtype == torch.float64 else last
    return torch.contiguous_format


# ---- Products of groups, which torch's shape function refuses in all dtypes but bfloat16, unlike its kernels


def grouped_product(mat: Tensor, other: Tensor, groups: Tensor | None) -> Tensor:
    """Return the result of `_grouped_mm`; of two matrices one for each group. CUDA pads rows to 16 bytes."""
    shape = [mat.shape[-2], other.shape[-1]]
    if mat.dim() == other.dim():
        shape.insert(0, mat.shape[0] if mat.dim() == 3 or groups is None else groups.shape[0])
    each = 16 // mat.element_size() if mat.device.type == FAKE_CUDA else 1
    row = -(-shape[-1] // each) * each
    return mat.new_empty_strided(shape, (shape[-2] * row, row, 1)[-len(shape) :])


# ---- Shape functions of a few training kernels that torch cannot run on fake tensors
#
# These are fused optimizers, the fused GRU cell, margin losses, the backward of CTC, quantization-aware
# training, and draws with a gradient. Fake tensors need a function from input shapes to output shapes for
# every operator. For an operator without one, torch would run the real kernel on zeros as large as the model;
# a `FakeTarget` refuses that and names the operator.


@functools.cache
def register_missing_shapes() -> torch.library.Library:
    """Register the functions that this torch lacks, once. They last as long as the returned library."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, shapes in _SHAPES.items():
        if not has_kernel(f"aten::{name}", "Meta"):
            library.impl(name, shapes, "Meta")  # type: ignore[no-untyped-call]
    return library


def _in_place(*_: object, **__: object) -> None:
    """Do nothing: a fused optimizer step writes into its arguments and returns nothing."""


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the next state, batch x hidden, and the five gates kept for backward."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Return gradients of input gates, hidden gates, state, and the two biases."""
    gates = workspace.new_empty(grad_hy.shape[0], 3 * grad_hy.shape[1])
    bias = workspace.new_empty(3 * grad_hy.shape[1]) if has_bias else None
    return (
        gates,
        torch.empty_like(gates),
        torch.empty_like(grad_hy),
        bias,
        None if bias is None else torch.empty_like(bias),
    )


def _loss_backward(grad: Tensor, x: Tensor, *_: object, **__: object) -> Tensor:
    """Return the gradient of a loss in its first argument."""
    return torch.empty_like(x)


def _like_the_first(x: Tensor, *_: object, **__: object) -> Tensor:
    """Return a draw, or its gradient, for each element."""
    return torch.empty_like(x)


def _rounded(x: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Return the rounded values, and a mask of those that were in range, kept for backward."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _learnt_backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *_: object
) -> tuple[Tensor, ...]:
    """Return gradients of the values, the scale and the zero point."""
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(zero_point)


_SHAPES = {
    "_fused_sgd_": _in_place,
    "_fused_sgd_.tensor_lr": _in_place,
    "_fused_adam_.tensor_lr": _in_place,
    "_fused_adamw_.tensor_lr": _in_place,
    "_fused_adagrad_": _in_place,
    "_fused_adagrad_.tensor_lr": _in_place,
    "_ctc_loss_backward.Tensor": _loss_backward,
    "multi_margin_loss_backward": _loss_backward,
    "multilabel_margin_loss_backward": _loss_backward,
    "fractional_max_pool3d_backward": _loss_backward,
    "_standard_gamma": _like_the_first,
    "_standard_gamma_grad": _like_the_first,
    "_sample_dirichlet": _like_the_first,
    "_dirichlet_grad": _like_the_first,
    "fake_quantize_per_tensor_affine_cachemask": _rounded,
    "fake_quantize_per_channel_affine_cachemask": _rounded,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _rounded,
    "_fake_quantize_learnable_per_tensor_affine": _like_the_first,
    "_fake_quantize_learnable_per_channel_affine": _like_the_first,
    "_fake_quantize_learnable_per_tensor_affine_backward": _learnt_backward,
    "_fake_quantize_learnable_per_channel_affine_backward": _learnt_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


# ---- CUDA's autocast on `fakecuda`
#
# The casts are those of `capture.cuda_autocast`, as kernels of the open device slot's autocast key.

_KEY = "AutocastPrivateUse1"


def autocast_of(device_type: str) -> AbstractContextManager[None]:
    """Let autocast for `cuda`, and for the open device slot of this name, behave as on CUDA in the body."""
    registered = _registered(device_type)
    registered.follow()
    return as_on_cuda(device_type, registered.casts)


class _Registered:
    """CUDA's casts in the open device slot of this name, for the lifetime of the object."""

    def __init__(self, device_type: str) -> None:
        self.casts = CudaCasts(device_type, _KEY)
        # On every device type except the open slot, torch lets operators outside its lists pass.
        everything = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        everything.fallback(torch.library.fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
        self._libraries = {"_": everything}
        self._known: set[str] = set()

    def follow(self) -> None:
        """Register kernels for the operators that CUDA casts by now, including those of extensions."""
        for name, kernel in self.casts.kernels(known=self._known):
            namespace, _, operator = name.partition("::")
            if namespace not in self._libraries:
                library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                self._libraries[namespace] = library
            self._libraries[namespace].impl(operator, kernel, _KEY)  # type: ignore[no-untyped-call]
            self._known.add(name)


_registered = functools.cache(_Registered)


# ---- The target


FAKE_CUDA = "fakecuda"
_FREE_SLOT = "privateuseone"  # torch's name for the open device slot while it is free
_CHOICES = {
    "scaled_dot_product_attention": cuda_attention,
    "softmax.int": softmax,
    "log_softmax.int": log_softmax,
}
_NUMBERS = frozenset(
    (aten.zeros.default, aten.ones.default, aten.full.default)
)  # if they make a single number
_RANGES = frozenset(
    (aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default)
)  # which a model's factory may read, such as a rate for every block
_MOST_KNOWN = 1024  # values of a tensor that a factory makes
_FOREACH_TYPES = (optim_optimizer._foreach_supported_types, foreach_utils._foreach_supported_types)


class FakeTarget:
    """A context of fake tensors (shapes, strides, storages) on a device with `target`'s kernels.

    Enter meters, saved-tensor hooks and other modes inside it. Each instance has separate tensors: they do
    not mix.

    Raises:
        UsageError: `target` is neither `cpu` nor `cuda`; or another extension holds torch's open device slot.
    """

    def __init__(self, target: Target) -> None:
        if target not in ("cpu", "cuda"):
            raise UsageError(
                f"{target!r} is not a target: write 'cpu' or 'cuda', the kind of device whose kernels are "
                "modeled"
            )
        self.target: Target = target
        self.device = _device_of(target)
        self._mode = _BuildMode(_known(target))
        self._entered: list[ExitStack] = []

    def __enter__(self) -> FakeTarget:
        with ExitStack() as stack:
            stack.enter_context(without_gpus())
            stack.enter_context(no_negative_variance())
            stack.enter_context(values_known_of_originals())
            for types in _FOREACH_TYPES:
                stack.enter_context(_Listed(types))
            if self.target == "cuda":
                stack.enter_context(autocast_of(FAKE_CUDA))
                stack.enter_context(counting_as_cuda(FAKE_CUDA))
            stack.enter_context(
                torch.autograd.set_detect_anomaly(mode=False)
            )  # it would take fake numbers for NaN
            # Backward on the calling thread: autograd counts devices at a process's first backward, and may
            # know none.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self._mode)
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def fake(self, tensor: Tensor) -> Tensor:
        """Return a new fake tensor with the shape, strides and dtype of `tensor`, on `self.device`."""
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def again(self, tensor: Tensor) -> Tensor:
        """Return a copy of a model's tensor: like `fake`, with a known number's value; real ones stay
        real.
        """
        if not isinstance(tensor, FakeTensor):
            with without_dispatch_modes():
                return tensor.detach().clone()
        made = self.fake(tensor)
        if tensor.constant is not None:
            with without_dispatch_modes():
                known = tensor.constant.detach().clone()
            self._mode.know(made, known)
        return made

    @contextmanager
    def assuming_nothing(self) -> Iterator[None]:
        """Let value-dependent operations in the body raise exceptions instead of returning assumed
        results.
        """
        self._mode.assumes = False
        try:
            yield
        finally:
            self._mode.assumes = True

    @property
    def unknown(self) -> KernelMemory:
        """Operations so far that depend on values, so their results were assumed."""
        return KernelMemory(kernels=tuple(self._mode.by_value))

    def set_value(self, tensor: Tensor, value: int) -> None:
        """Give one fake number a value, for models that read it; numbers computed from it have values too."""
        with without_dispatch_modes():
            known = torch.full(tensor.shape, value, dtype=tensor.dtype)
        self._mode.know(tensor, known)


def follows_fake_streams() -> bool:
    """Return whether a `cuda` target was used in this process, so autograd uses streams of `fakecuda`."""
    result: str = privateuse1_name()
    return result == FAKE_CUDA


def is_fake(tensor: Tensor) -> bool:
    """Return whether `tensor` has no bytes, so that its values cannot be read."""
    return isinstance(tensor, FakeTensor)


@functools.cache
def _known(_: Target) -> Known:
    """Return this process's cache of results over fake tensors of a target."""
    return {}


class _BuildMode(QuickFakeMode):  # type: ignore[no-untyped-call]
    """`QuickFakeMode` for modules that are moved and copied after they were built."""

    fake_tensor_converter: _Forgetful

    def __init__(self, known: Known) -> None:
        super().__init__(known, allow_fallback_kernels=False)  # a fallback would compute on real zeros
        register_missing_shapes()
        self.fake_tensor_converter = _Forgetful(copy_data=False, export=False)
        self.assumes, self.by_value = True, dict[Kernel, None]()

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        check_product(func, args)
        self._forget_numbers(args)
        if func is aten._grouped_mm.default and args[0].dtype in (torch.float32, torch.float16):
            with self:
                mat, other, *groups = args
                return grouped_product(mat, other, groups[0] if groups else kwargs.get("offs"))
        try:
            made = super()._run(func, types, args, kwargs)
            if func in _CONVOLUTIONS and args[0].device.type == FAKE_CUDA:
                layout = cudnn_format(func, args)
                with self:
                    return pytree.tree_map_only(Tensor, lambda each: _laid_out(each, layout), made)
            single = func in _NUMBERS and made.shape == ()
            if func is aten.lift_fresh.default and not self.assumes and _is_shared(args[0]):
                self.know(made, args[0])
            listed = func in _RANGES and not self.assumes and made.numel() <= _MOST_KNOWN
            if (single or listed) and made.device.type == "cpu":
                with without_dispatch_modes():
                    self.know(made, func(*args, **kwargs))
            return made
        except (DataDependentOutputException, DynamicOutputShapeException):
            with self:
                result = assumed(func, args) if self.assumes else None
            if result is None:
                raise
            if is_named(func):
                self.by_value[unknown(func)] = None
            return result

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Key | None:
        """Return the key; None for a range that a factory makes, as its values become known."""
        if func in _RANGES and not self.assumes:
            return None
        return super()._key(func, args, kwargs, tensors)

    def may_turn_const(self, t: Tensor) -> bool:
        """Return whether the values of a tensor become known: those of few elements while a factory runs."""
        plain = t.layout is torch.strided and not isinstance(t, FakeTensor) and t.device.type != "meta"
        return plain and t.numel() <= (1 if self.assumes else _MOST_KNOWN)

    def _forget_numbers(self, args: Any) -> None:
        """Forget the values of parameters that were made from known numbers: training changes them."""
        for arg in args:
            if isinstance(arg, FakeTensor) and arg.constant is not None and isinstance(arg, nn.Parameter):
                self.fake_tensor_converter.forget(arg)

    def __deepcopy__(self, memo: dict[int, object]) -> _BuildMode:
        return self  # copied fake tensors, as in `nn.TransformerEncoder`, keep their mode


def _is_shared(tensor: Tensor) -> bool:
    """Return whether a real tensor is over memory of another library, such as an array of NumPy."""
    return type(tensor) is Tensor and not tensor.untyped_storage().resizable()


class _Forgetful(FakeTensorConverter):
    """Keeps no weak reference to results, as `Module.to` refuses to swap a tensor that has one, and no number
    of them.
    """

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        pass

    def from_real_tensor(self, *args: Any, **kwargs: Any) -> FakeTensor:
        """Return a fake tensor without the number that torch since 2.14 remembers of integers and doubles: it
        would outlast the tensor's known value.
        """
        made: FakeTensor = super().from_real_tensor(*args, **kwargs)
        made.item_memo = None
        return made

    def forget(self, known: FakeTensor) -> None:
        """Forget the value of a tensor, such as that of `torch.tensor(0.5)`, and the weak references to
        it.
        """
        assert known.constant is not None
        self.invalidate_constant_aliases(known.constant)
        memo = self.meta_converter.tensor_memo
        for key in [key for key, tensor in memo.items() if tensor is known]:
            del memo[key]


class _Listed:
    """Counts fake tensors among the types that foreach kernels take in the body, as real ones are."""

    def __init__(self, types: list[Any]) -> None:
        self._types = types

    def __enter__(self) -> None:
        self._types.append(FakeTensor)

    def __exit__(self, *_: object) -> None:
        self._types.remove(FakeTensor)


def _laid_out(result: Tensor, layout: torch.memory_format) -> Tensor:
    """Return a fresh result in a memory format, if it has its dimensions."""
    return torch.empty_like(result, memory_format=layout) if result.dim() >= 4 else result


def _device_of(target: Target) -> torch.device:
    if target == "cpu":
        return torch.device("cpu")
    _fill_slot()
    return torch.device(FAKE_CUDA, 0)


def run_a_backward() -> None:
    """Run a backward, which torch refuses in a fork of a process whose autograd has threads of devices.

    Without this check, a profile in such a fork would report that a layer fails.
    """
    with without_dispatch_modes(), torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(torch.ones((), requires_grad=True))


@functools.cache
def _fill_slot() -> torch.library.Library:
    """Register `fakecuda`, once per process; the returned library keeps the overrides alive."""
    holder = privateuse1_name()
    if holder != _FREE_SLOT:
        raise UsageError(
            f"target 'cuda' needs torch's one open device slot, which {holder!r} holds: "
            f"use a process that does not import that extension, or target 'cpu'"
        )
    # Autograd counts devices at a process's first backward, and starts a thread for each; without such
    # threads forks of this process can run backwards too. So it counts before `fakecuda` exists.
    run_a_backward()
    backend_registration._setup_privateuseone_for_python_backend(
        FAKE_CUDA, backend_module=_DeviceModule(), hook=_Hooks()
    )
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, choice in _CHOICES.items():
        library.impl(name, choice, "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
    for name in KERNELS:
        library.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
    return library


class _DeviceModule:
    """The interface of `torch.fakecuda`: nothing to seed, no streams, nothing available for real work."""

    Event, Stream = torch.cpu.Event, torch.cpu.Stream
    current_stream, stream = staticmethod(torch.cpu.current_stream), staticmethod(torch.cpu.stream)

    def is_available(self) -> bool:
        return False  # so DataLoader, fork_rng etc. ignore it

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: object) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class _Hooks(PrivateUse1Hooks):
    """Autograd's queries before it starts the device's thread."""

    def is_available(self) -> bool:
        return False

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True
