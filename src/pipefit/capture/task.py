"""The user's task: a module, its batches, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer

from pipefit.capture.refusals import LAZY_REMEDY
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.schema.training import Precision
from pipefit.schema.validation import check_types
from pipefit.texts import kind_of
from pipefit.torch_internals.fake_tensors import DataDependentOutputException

# ---- Limit on the size of a model under construction, such as a trillion layers by mistake
#
# Modules are counted as they become parts of others, in 0.1 microseconds each.

MOST_MODULES = 200_000  # per model; a mixture of 384 experts in 61 layers has fewer


@contextmanager
def limited_modules(name: str) -> Iterator[None]:
    """Limit the number of modules that this thread creates in the body for the model `name`.

    Raises:
        UsageError: there are more than `MOST_MODULES`.
    """
    count, thread = 0, get_ident()

    def counted(parent: nn.Module, child: str, module: nn.Module | None) -> None:
        nonlocal count
        if get_ident() != thread:
            return
        count += 1
        if count > MOST_MODULES:
            raise UsageError(
                f"{name} has more than {MOST_MODULES:,} modules, and building stopped there: check its "
                "settings, such as the number of layers"
            )

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


# ---- The task

_CALLABLE = {
    "module": "an nn.Module or a function that builds one",
    "batch": "a function of the batch size that returns (inputs, targets), such as lambda size: "
    "next(iter(DataLoader(dataset, batch_size=size)))",
    "optimizer": "a function of parameter groups that returns a torch.optim optimizer, such as its class",
}
# `module.to(dtype)` drops imaginary parts of complex numbers; these methods leave complex tensors unchanged
_CASTS: dict[torch.dtype, Callable[[nn.Module], nn.Module]] = {
    torch.float64: lambda module: module.double(),
    torch.float32: lambda module: module.float(),
    torch.float16: lambda module: module.half(),
    torch.bfloat16: lambda module: module.bfloat16(),
}
ParameterOptions = Callable[[str, nn.Parameter], dict[str, Any]]
Granularity = Literal["blocks", "halves", "layers"]


@dataclass(frozen=True, slots=True)
class Task:
    """A training task.

    Args:
        module: any `nn.Module` that `torch.export` can trace, or a function that builds one. An
        `nn.Sequential` is
            used as it is, each part a layer; its parts pass a tensor, or a tuple or list of tensors. Profiles
            and dry runs call a function under fake tensors, so a model too large for this machine is never
            allocated.
        batch: batch size -> (inputs, targets): tensors with the samples along dimension 0, or tuples or
        dictionaries
            of such tensors, without gradients. A tuple of inputs is the module's positional arguments, a
            dictionary its keyword arguments; an `nn.Sequential` takes a tuple or list as its one argument. A
            dictionary alone is inputs without targets. Use torch's default generator, so that a seed before
            the call fixes the batch.
        loss: (outputs, targets) -> mean loss over the samples, a scalar; the outputs are as the module
        returns them.
            None if the module computes the loss: it returns a scalar, or outputs with a scalar `loss`. The
            targets may be None then.
        optimizer: parameter groups -> `torch.optim` optimizer. Every stage makes its own, with a group per
        layer. groups: (name, parameter) -> options of its parameter group, such as `{"weight_decay": 0.0}`
        for biases. scheduler: optimizer -> learning-rate scheduler, stepped after every update.
        precision: None leaves the module as it is. `bfloat16` or `float16` casts its parameters and its data.
        So does
            `master-bfloat16` or `master-float16`, and the optimizer then works on float32 copies of the
            parameters. `mixed-bfloat16` or `mixed-float16` runs the module under `torch.autocast`. With
            `mixed-float16` and `master-float16` the loss is scaled.
        granularity: where a stage may end in a module that is not an `nn.Sequential`: after `blocks` (a
        module's own
            blocks, such as transformer.h.3), after `halves` (attention and MLP separately), or after any of
            its `layers`.
        name: name in reports, messages and file names.
    """

    module: nn.Module | Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]] = field(kw_only=True)
    loss: Callable[[Any, Any], Tensor] | None = field(kw_only=True)
    optimizer: Callable[..., Optimizer] = field(kw_only=True, default=torch.optim.AdamW)
    groups: ParameterOptions | None = field(kw_only=True, default=None)
    scheduler: Callable[[Optimizer], Any] | None = field(kw_only=True, default=None)
    precision: Precision | None = field(kw_only=True, default=None)
    granularity: Granularity = field(kw_only=True, default="blocks")
    name: str = field(kw_only=True, default="model")

    def __post_init__(self) -> None:
        for name in ("module", "batch", "optimizer"):
            if not callable(getattr(self, name)):
                raise UsageError(
                    f"{name} of a Task must be {_CALLABLE[name]}, not {kind_of(getattr(self, name))}"
                )
        if self.loss is not None and not callable(self.loss):
            raise UsageError(
                "loss of a Task must be a function of (outputs, targets), or None if the module computes "
                f"it, not {kind_of(self.loss)}"
            )
        check_types(self)
        if isinstance(self.loss, nn.Module) and any(p.requires_grad for p in self.loss.parameters()):
            raise UsageError(
                "loss of a Task has parameters, which no stage would train: make it part of the module, "
                "let the module return the loss, and give loss=None"
            )

    def __repr__(self) -> str:
        """Return one line, unlike a module's own repr with a line for every layer."""
        module, optimizer = (
            getattr(one, "__name__", type(one).__name__) for one in (self.module, self.optimizer)
        )
        return f"<Task: {self.name}, {module} trained by {optimizer}>"

    def build(self) -> nn.Module:
        """Return the module in the task's precision; call the factory if there is one."""
        module = self.module if isinstance(self.module, nn.Module) else self._made()
        return module if self.dtype is None else _CASTS[self.dtype](module)

    def _made(self) -> nn.Module:
        """Return the module that the factory builds.

        Raises:
            UsageError: the factory fails, or returns something other than a module.
        """
        assert not isinstance(self.module, nn.Module)
        try:
            with limited_modules(self.name):
                module = self.module()
        except (
            PipefitError,
            DataDependentOutputException,
        ):  # the latter: the factory reads numbers from fake tensors
            raise
        except Exception as error:
            remedy = "check that it works without pipefit, or pass the built module"
            if "UninitializedParameter" in str(error):
                remedy = LAZY_REMEDY
            elif "meta tensor" in str(error):
                remedy = (
                    "it reads numbers of tensors, but plans build modules without memory: "
                    "pass the built module"
                )
            raise UsageError(
                f"the function that builds {self.name} fails ({in_one_line(error)}): {remedy}"
            ) from error
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"the function that builds {self.name} returned {kind_of(module)}: "
                "it must return an nn.Module"
            )
        return module

    def cast(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in the task's precision if it is floating point, otherwise unchanged."""
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype to which parameters and data are cast; None if they are not cast."""
        if self.precision is None or self.precision.startswith("mixed-"):
            return None
        result: torch.dtype = getattr(torch, self.precision.removeprefix("master-"))
        return result

    @property
    def master_weights(self) -> bool:
        """True if the optimizer works on float32 copies of the parameters."""
        return self.precision is not None and self.precision.startswith("master-")

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of autocast; None without autocast."""
        if self.precision is None or not self.precision.startswith("mixed-"):
            return None
        result: torch.dtype = getattr(torch, self.precision.removeprefix("mixed-"))
        return result
