"""Fake devices: a profile or a dry run builds the model there, and their kernels decide what autograd saves.

    with FakeTarget("cuda") as fake:
        model = torch.nn.Linear(4096, 4096, device=fake.device)     # or built as usual, then `.to(fake.device)`
        loss = model(fake.fake(batch)).sum()
        loss.backward()                                             # no bytes, no GPU: shapes, strides, storages

Target `cpu` is `FakeTensorMode` over CPU tensors: the CPU's kernels. Target `cuda` follows CUDA's: dropout saves a
boolean mask, normalisations float32 statistics, attention is fused (`attention_choice`), RNN cells are fused,
optimizers and gradient clipping take their foreach path.

Its fake tensors are on `fakecuda:0`. This is the one device type that torch leaves open for others (PrivateUse1),
registered from Python. Torch's C++ code treats such a device like CUDA almost everywhere, which could not be achieved
by replacing Python functions. What it does for CUDA alone is done here too: the choices of `attention_choice` and
`cuda_choices`, and autocast (`autocast`). Where the machine has a GPU nothing is asked of it: the answers are the same
on every machine, no context is made there, and no random generator of the caller's changes.

The first `cuda` target registers the device type for the rest of the process. Then `torch.accelerator.is_available()`
is false and `device_count()` zero, and `current_accelerator()` is `fakecuda`. Autograd has streams for that accelerator
alone: in such a process a backward on a real GPU fails. Hence `apart`, and `check_backwards` of `runtime/hardware`.

Not imitated:

- memory that a GPU kernel allocates and frees in one call: flash backward's float32 accumulators, cuDNN's, cuBLAS's;
- reserves of kernels that last until backward: in place of cuDNN's, RNNs save what the fused cells save, and batch norm
  nothing; that of oneDNN for an LSTM on the CPU is measured by a meter with `Kernels`;
- branches of torch's C++ code on `tensor.is_cuda`, which is false there on `fakecuda`, but for those that are known to
  matter; the choices for CUDA under `torch.inference_mode`.

An operator whose shapes torch does not know is refused by name (`UnsupportedOperatorException`): nothing is computed.
Of operations that depend on values something is assumed (`by_value`).

`tests/test_private_torch.py` tells which files use torch's private interfaces to fake devices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
)
from torch.optim import optimizer as optim_optimizer
from torch.utils import _foreach_utils, backend_registration
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.by_value import assumed, is_named, unknown
from pipefit.capture.no_gpu import without_gpus
from pipefit.capture.unchecked import no_negative_variance
from pipefit.errors import UsageError
from pipefit.fake.attention_choice import cuda_attention
from pipefit.fake.autocast import autocast_of
from pipefit.fake.cuda_choices import KERNELS, counting_as_cuda, kernel, log_softmax, softmax
from pipefit.fake.missing_shapes import register_missing_shapes
from pipefit.fake.products import check_product
from pipefit.fake.results import Known, QuickFakeMode
from pipefit.kernels import Kernel, KernelMemory
from pipefit.profiles import Target

aten = torch.ops.aten

FAKE_CUDA = "fakecuda"
_FREE_SLOT = "privateuseone"  # torch's name for the open device slot while nobody has taken it
_CHOICES = {"scaled_dot_product_attention": cuda_attention, "softmax.int": softmax, "log_softmax.int": log_softmax}
_NUMBERS = frozenset((aten.zeros.default, aten.ones.default, aten.full.default))  # where they make a single one
_FOREACH_TYPES = (optim_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)


class FakeTarget:
    """A context in which tensors have shapes, strides and storages but no bytes, on a device with `target`'s kernels.

    Meters, saved-tensor hooks and other modes go inside it. Each instance has its own tensors: they do not mix.

    Raises:
        UsageError: `target` is neither `cpu` nor `cuda`; or another extension holds torch's open device slot.
    """

    def __init__(self, target: Target) -> None:
        if target not in ("cpu", "cuda"):
            raise UsageError(f"{target!r} is not a target: write 'cpu' or 'cuda', the device whose kernels to follow")
        self.target: Target = target
        self.device = _device_of(target)
        self._mode = _Mode(_known(target))
        self._entered: list[ExitStack] = []

    def __enter__(self) -> FakeTarget:
        with ExitStack() as stack:
            stack.enter_context(without_gpus())
            stack.enter_context(no_negative_variance())
            for types in _FOREACH_TYPES:
                stack.enter_context(_Listed(types))
            if self.target == "cuda":
                stack.enter_context(autocast_of(FAKE_CUDA))
                stack.enter_context(counting_as_cuda(FAKE_CUDA))
            stack.enter_context(torch.autograd.set_detect_anomaly(mode=False))  # by which every number is a NaN
            # Backward on the calling thread: autograd counts devices at a process's first backward, and may know none.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self._mode)
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def fake(self, tensor: Tensor) -> Tensor:
        """A fake tensor with the shape, strides and dtype of `tensor`, on `self.device`, in a storage of its own."""
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def again(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of a model: like `fake`, with what is known of a fake number; real values stay real."""
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return tensor.detach().clone()
        made = self.fake(tensor)
        if tensor.constant is not None:
            with _disable_current_modes():
                known = tensor.constant.detach().clone()
            self._mode.know(made, known)
        return made

    @contextmanager
    def assuming_nothing(self) -> Iterator[None]:
        """Inside, an operation whose result depends on values raises an exception, instead of what `by_value` says."""
        self._mode.assumes = False
        try:
            yield
        finally:
            self._mode.assumes = True

    @property
    def unknown(self) -> KernelMemory:
        """The operations met so far of which something had to be assumed, because they depend on values."""
        return KernelMemory(kernels=tuple(self._mode.by_value))

    def set_value(self, tensor: Tensor, value: int) -> None:
        """Give one fake number a value, for models that read it; what is computed from it alone has values too."""
        with _disable_current_modes():
            known = torch.full(tensor.shape, value, dtype=tensor.dtype)
        self._mode.know(tensor, known)


def follows_fake_streams() -> bool:
    """Whether a `cuda` target has been used in this process, so that autograd asks `fakecuda` for streams, not GPUs."""
    found: str = torch._C._get_privateuse1_backend_name()
    return found == FAKE_CUDA


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has no bytes, so that nothing can be read from it."""
    return isinstance(tensor, FakeTensor)


@functools.cache
def _known(_: Target) -> Known:
    """What operations return over fake tensors of a target, as it is found in this process."""
    return {}


class _Mode(QuickFakeMode):  # type: ignore[no-untyped-call]
    """`QuickFakeMode` for modules that are moved and copied after they were built."""

    fake_tensor_converter: _Forgetful

    def __init__(self, known: Known) -> None:
        super().__init__(known, allow_fallback_kernels=False)  # a fallback would compute, on real zeros
        register_missing_shapes()
        self.fake_tensor_converter = _Forgetful(copy_data=False, export=False)
        self.assumes, self.by_value = True, dict[Kernel, None]()

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        check_product(func, args)
        self._forget_numbers(args)
        try:
            made = super()._run(func, types, args, kwargs)
            if func in _NUMBERS and made.shape == () and made.device.type == "cpu":
                with _disable_current_modes():
                    self.know(made, func(*args, **kwargs))
            return made
        except (DataDependentOutputException, DynamicOutputShapeException):
            with self:
                found = assumed(func, args) if self.assumes else None
            if found is None:
                raise
            if is_named(func):
                self.by_value[unknown(func)] = None
            return found

    def know(self, tensor: Tensor, known: Tensor) -> None:
        """Give a fake number a value."""
        assert isinstance(tensor, FakeTensor)
        tensor.constant = known
        self.fake_tensor_converter.add_constant_storage_mapping(tensor)

    def _forget_numbers(self, args: Any) -> None:
        """Forget those of parameters that were made of known numbers: training changes them."""
        for arg in args:
            if isinstance(arg, FakeTensor) and arg.constant is not None and isinstance(arg, nn.Parameter):
                self.fake_tensor_converter.forget(arg)

    def __deepcopy__(self, memo: dict[int, object]) -> _Mode:
        return self  # a copied fake tensor, as `nn.TransformerEncoder` makes of its layer, stays in the mode it is in


class _Forgetful(FakeTensorConverter):
    """Keeps no weak reference to the results of operations: `Module.to` refuses to swap a tensor that has one."""

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        pass

    def forget(self, known: FakeTensor) -> None:
        """Keep neither the number of a tensor, as of `torch.tensor(0.5)`, nor the weak references that came with it."""
        assert known.constant is not None
        self.invalidate_constant_aliases(known.constant)
        memo = self.meta_converter.tensor_memo
        for key in [key for key, tensor in memo.items() if tensor is known]:
            del memo[key]


class _Listed:
    """Counts fake tensors among the types the foreach kernels take, as real ones are, while the context lasts."""

    def __init__(self, types: list[Any]) -> None:
        self._types = types

    def __enter__(self) -> None:
        self._types.append(FakeTensor)

    def __exit__(self, *_: object) -> None:
        self._types.remove(FakeTensor)


def _device_of(target: Target) -> torch.device:
    if target == "cpu":
        return torch.device("cpu")
    _fill_slot()
    return torch.device(FAKE_CUDA, 0)


@functools.cache
def _fill_slot() -> torch.library.Library:
    """Registers `fakecuda`, once per process; the library returned keeps the overrides alive."""
    holder = torch._C._get_privateuse1_backend_name()
    if holder != _FREE_SLOT:
        raise UsageError(
            f"target 'cuda' needs torch's one open device slot, which {holder!r} holds: "
            f"use a process that does not import that extension, or target 'cpu'"
        )
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
    """What torch asks of `torch.fakecuda`: nothing to seed, nothing available for real work."""

    def is_available(self) -> bool:
        return False  # so that DataLoader, fork_rng and the like pass it by

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """What autograd asks before it starts the device's thread."""

    def is_available(self) -> bool:
        return False

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True
