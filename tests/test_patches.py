"""Canary for process-wide patches: each one still has its effect, in its body alone."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributions import Distribution
from torch.utils import checkpoint

from pipefit.torch_internals import patches
from pipefit.torch_internals.fake_tensors import (
    DataDependentOutputException,
    FakeTensorMode,
    meta_registrations,
)


class Case(NamedTuple):
    """A patch, something that it changes, and the result inside and outside its body."""

    patch: Callable[[], AbstractContextManager[None]]
    observed: Callable[[], object]
    inside: object
    outside: object


class Refused(Exception):
    """A call that a patch intercepts."""


def refuse(original: Any) -> Callable[..., Any]:
    def refused(*args: object, **options: object) -> None:
        raise Refused

    return refused


def intercepting(call: patches.Call, use: Callable[[], object]) -> Case:
    """Return the case of a call that is refused."""

    def observed() -> bool:
        try:
            use()
        except Refused:
            return True
        return False

    return Case(lambda: patches.intercepted({call: refuse}), observed, inside=True, outside=False)


def checkpointed(*, reentrant: bool) -> object:
    return checkpoint.checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=reentrant)


def forked() -> None:
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)


def in_context(context: AbstractContextManager[object]) -> None:
    with context:
        pass


def compiled() -> object:
    return torch.compile(torch.sin, backend="eager")(torch.ones(1))


def data() -> object:
    return torch.ones(1).data


def counting(calls: dict[str, int], name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **options)

        return counted

    return make


def fake_is_cuda() -> tuple[bool, str]:
    with FakeTensorMode():
        x = torch.empty(1)
        return x.is_cuda, meta_registrations.device_hint(x)


SEEN: list[object] = []


def resized() -> int:
    SEEN.clear()
    torch.empty(2).untyped_storage().resize_(0)
    return len(SEEN)


def sampled() -> str:
    """Return whether a distribution checks its arguments."""
    try:
        torch.distributions.Normal(0.0, torch.tensor(-1.0))
    except ValueError:
        return "checked"
    return "unchecked"


def likelihood() -> str:
    """Return whether the Gaussian likelihood finds a negative variance."""
    x = torch.ones(1)
    try:
        F.gaussian_nll_loss(x, x, -x)
    except ValueError:
        return "checked"
    return "unchecked"


def formatted() -> str:
    """Return the text of a fake tensor with a known number."""
    with FakeTensorMode():
        number = torch.tensor(0.5)
        try:
            return f"{number:.3f}"
        except TypeError:
            return "refused"


def copied_with() -> str:
    """Return whether a copy of a fake parameter has a gradient."""
    with FakeTensorMode():
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        return "data" if copy.deepcopy(parameter).grad is None else "gradient"


def copied_value() -> str:
    """Return the number of a copy of a fake tensor with a known number."""
    with FakeTensorMode() as mode:
        try:
            return read(copy.deepcopy(torch.tensor(3.0), {id(mode): mode}))
        except RuntimeError:
            return "refused"


def value_of_other_data() -> str:
    """Return the number of a fake tensor whose data was replaced by that of one without a known number."""
    with FakeTensorMode():
        number = torch.tensor(3.0)
        number.data = torch.empty(())
        return read(number)


def read(number: Tensor) -> str:
    try:
        return str(number.item())
    except DataDependentOutputException:
        return "unknown"


def scaled() -> str:
    """Return whether a loss scaler steps its optimizer in spite of an infinite gradient."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), float("inf"))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))  # makes the scale
    scaler.step(optimizer)
    return "skipped" if parameter.item() == 0 else "stepped"


CASES = {
    "checkpoint": intercepting("checkpoint", lambda: checkpointed(reentrant=False)),
    "reentrant checkpoint": intercepting("reentrant checkpoint", lambda: checkpointed(reentrant=True)),
    "fork": intercepting("fork", forked),
    "compiled": intercepting("compiled", compiled),
    "inference mode": intercepting("inference_mode", lambda: in_context(torch.inference_mode())),
    "tensor hook": intercepting(
        "tensor hook", lambda: torch.ones(1, requires_grad=True).register_hook(lambda _: None)
    ),
    "backward": intercepting("backward", lambda: torch.ones(1, requires_grad=True).sin().backward()),
    "saved tensors": intercepting(
        "saved_tensors_hooks",
        lambda: in_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
    ),
    "data": Case(
        lambda: patches.intercepted({"data": lambda _: property(lambda tensor: "read")}),
        lambda: "read" if isinstance(data(), str) else "tensor",
        "read",
        "tensor",
    ),
    "GPUs": Case(
        patches.without_gpus,
        lambda: (torch.cuda.is_available(), torch.cuda.device_count()),
        (False, 0),
        (torch.cuda.is_available(), torch.cuda.device_count()),
    ),
    "fake CUDA": Case(lambda: patches.counting_as_cuda("cpu"), fake_is_cuda, (True, "cuda"), (False, "cpu")),
    "sizes of storages": Case(lambda: patches.resizes_seen(SEEN.append), resized, 1, 0),
    "distributions": Case(patches.unchecked_arguments, sampled, "unchecked", "checked"),
    "copied parameters": Case(patches.parameters_copied_alone, copied_with, "data", "gradient"),
    "copied values": Case(patches.values_known_of_originals, copied_value, "unknown", "refused"),
    "values of other data": Case(patches.values_known_of_originals, value_of_other_data, "unknown", "3.0"),
    "numbers in texts": Case(patches.formatted_numbers, formatted, "0.500", "refused"),
    "loss scaling": Case(patches.always_stepping, scaled, "stepped", "skipped"),
    "variances": Case(patches.no_negative_variance, likelihood, "unchecked", "checked"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_patch_has_its_effect_in_its_body_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The effect ends with the body, also if the body fails."""
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile turns it off for good
    if "torch._dynamo.eval_frame" not in sys.modules:
        compiled()  # a compiler that is not loaded is not patched
    assert case.observed() == case.outside
    with case.patch():
        assert case.observed() == case.inside
    assert case.observed() == case.outside
    with suppress(ZeroDivisionError), case.patch():
        raise ZeroDivisionError
    assert case.observed() == case.outside


def test_deep_copies_are_made_by_the_given_functions() -> None:
    """Tensors, parameters and objects of the given types are copied by them, and then as before."""
    module, other = nn.Linear(1, 1), SimpleNamespace()
    module.other = other  # type: ignore[assignment]
    made = torch.zeros(1)

    def of_tensor(tensor: Tensor, memo: dict[int, object]) -> Tensor:
        return nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made

    with patches.deep_copies(of_tensor, {SimpleNamespace: lambda original, memo: original}):
        copied = copy.deepcopy(module)
    assert copied.weight.data_ptr() == made.data_ptr() and copied.other is other
    again = copy.deepcopy(module)
    assert torch.equal(again.weight, module.weight) and again.other is not other


def test_every_call_of_autocast_goes_through_its_replacement() -> None:
    """Constructor, entry, exit, the cast of `custom_fwd` and the clearing of the cache are all called."""

    class Half(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

    calls: dict[str, int] = {}
    names = ("begin", "enter", "leave", "cast", "clear")

    def use() -> None:
        with torch.autocast("cpu"):
            Half.apply(torch.ones(1))
        torch.clear_autocast_cache()

    with patches.autocast_calls(**{name: counting(calls, name) for name in names}):
        use()
    assert set(calls) == set(names)
    before = dict(calls)
    use()
    assert calls == before


def test_traces_leave_out_lines_of_code() -> None:
    """Torch has the switch from 2.12 on."""
    if not hasattr(fx.config, "do_not_emit_stack_traces"):
        pytest.skip("this torch cannot omit them")
    before = fx.config.do_not_emit_stack_traces
    with patches.without_code_lines():
        assert fx.config.do_not_emit_stack_traces
    assert fx.config.do_not_emit_stack_traces == before


class _Switching(nn.Module):
    """Blocks that compute a factor without gradients."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(blocks))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.no_grad():
                factor = values.exp()
            with torch.autocast("cpu", torch.bfloat16):
                values = block(values) * factor
        return values


def test_an_export_writes_the_code_of_a_graph_equally_often_for_any_number_of_regions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The code and the graph are those of an export without the patch."""

    def exported(blocks: int) -> tuple[int, str]:
        model, largest = _Switching(blocks), 0

        def recompile(graph: fx.GraphModule) -> Any:
            nonlocal largest
            largest += len(graph.graph.nodes) > 6 * blocks
            return original(graph)

        monkeypatch.setattr(fx.GraphModule, "recompile", recompile)
        program = torch.export.export(model, (torch.ones(2, 2),), strict=False)
        monkeypatch.undo()
        return largest, program.graph_module.code

    original = fx.GraphModule.recompile
    _, as_usual = exported(6)
    with patches.recompiled_once():
        few, code = exported(6)
        many, _ = exported(12)
    assert code == as_usual
    assert few == many


def test_transformers_builds_masks_eagerly_and_caches_without_copies() -> None:
    """The patched names exist, and are those that transformers reads."""
    masks = pytest.importorskip("transformers.masking_utils")
    caches = pytest.importorskip("transformers.cache_utils")
    exporting, find, one = masks.is_torchdynamo_exporting, masks.find_packed_sequence_indices, torch.ones(2)
    with patches.eager_masks(lambda original: lambda positions: (original, positions)):
        assert masks.is_torchdynamo_exporting() is False
        assert masks.find_packed_sequence_indices(one) == (find, one)
    with patches.caches_without_copies():
        assert caches.torch.cat([one, torch.empty(0)]) is one and caches.torch.ones is torch.ones
    assert (masks.is_torchdynamo_exporting, masks.find_packed_sequence_indices) == (exporting, find)
    assert caches.torch is torch
