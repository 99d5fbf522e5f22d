"""Compares a module with its chain: the net under every trace.

Two real microbatches, one after the other, go through a copy of the module as a plain loop would send them. They go
through a copy of the chain as a pipeline sends them, with the same random draws: both forward, then both backward, so
that a backward that meets what a later forward has changed is found out, whatever it was changed by. Their losses, the
gradient of every parameter and all buffers are compared. The second microbatch shows what is kept from one call to the
next: an update of a buffer, a count, a tensor in an attribute. The module, its gradients and all random generators stay
as they are.

Parameters that are zero throughout, such as the last layer of a residual branch, would hide whatever is behind them:
both copies have the same small numbers there. Costs, on the host, three times the bytes of the module and the
activations of two microbatches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.capture.caller import recording
from pipefit.capture.chain import Chain, autocasting
from pipefit.capture.copying import copied
from pipefit.capture.cuda_autocast import casting_for
from pipefit.capture.exporting import arguments
from pipefit.capture.flat import plain
from pipefit.capture.random_state import put_back, seed_all
from pipefit.capture.refusals import REMEDY
from pipefit.capture.sample import Sample
from pipefit.capture.structure import Values
from pipefit.capture.task import Task
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.schema.profile import Target
from pipefit.texts import counted

# ----------------------------------------------------------------------------------------------------
# What the comparison of a module with its chain found: which numbers are apart, by how much, and the likely
# cause.
#
# Numbers may round apart where kernels or the order of a sum differ: by `ALLOWED`, a share of the largest
# value in their tensor that depends on the precision. Never allowed are a parameter that has a gradient in
# one of the two alone, and integers that differ.

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Smaller gradients (a share of the largest one), losses and buffers count as that large: they may be rounding alone
_SMALLEST = 1e-3
_TOLD = 3  # differences that are printed


@dataclass(frozen=True, slots=True)
class Run:
    """What a run computed: the loss of each microbatch; gradients, summed, and buffers at the end, by name."""

    losses: list[Tensor]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What is not the same; `apart` is a share of the largest value, None where one of the two has no value at all."""

    what: str
    apart: float | None
    text: str

    def __str__(self) -> str:
        return f"{self.what} {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a comparison of a module with its chain found.

    `losses` are the module's own, of each microbatch; `gradients` and `buffers` count what was compared, and `apart` is
    the most that two numbers were apart of those that agree, as a share of the largest value; `allowed` is the limit.
    `besides` says what else was compared: layers that ranks divide, with whole ones, and losses of microbatches.
    """

    name: str
    microbatch_size: int
    losses: tuple[float, ...]
    gradients: int
    buffers: int
    apart: float
    allowed: float
    differences: tuple[Difference, ...]
    besides: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.differences:
            return self._refusal
        losses = " and ".join(f"{loss:.6g}" for loss in self.losses)
        if not all(map(isfinite, self.losses)):
            return f"the numbers of {self.name} cannot be compared: its losses are {losses} before anything is trained"
        exact = "equal bit by bit" if not self.apart else f"at most {self.apart:.1e} of the largest value apart"
        return (
            f"{self.name} computes as a chain what it computes as a module: {counted(len(self.losses), 'microbatch')} "
            f"of {self.microbatch_size}, losses {losses}, {counted(self.gradients, 'gradient')} and "
            f"{counted(self.buffers, 'buffer')}, {exact} ({self.allowed:.0e} allowed){''.join(self.besides)}"
        )

    @property
    def agrees(self) -> bool:
        """Whether numbers could be compared, and nothing differs."""
        return not self.differences and all(map(isfinite, self.losses))

    def check(self) -> None:
        """Check that nothing differs.

        Raises:
            UsageError: something does; says what, by how much, what may be the cause and what to try.
        """
        if self.differences:
            raise UsageError(self._refusal)

    @property
    def _refusal(self) -> str:
        told, rest = self.differences[:_TOLD], len(self.differences) - _TOLD
        more = f", and {rest} more" if rest > 0 else ""
        return (
            f"{self.name} computes as a chain other numbers than as a module: {', '.join(map(str, told))}{more} "
            f"({self.allowed:.0e} of the largest value is allowed); {self._cause}; change that, or give pipefit the "
            "parts instead, pipefit.chain([...]) in the order they run"
        )

    @property
    def _cause(self) -> str:
        """What such differences come from, in words."""
        what = [difference.what for difference in self.differences]
        losses = [name for name in what if name.startswith("the loss")]
        if losses and losses[0] != _loss_name(0):
            return (
                "only the first microbatch has the same loss, so the forward keeps something from one call to the "
                "next, which the chain does not keep: a count, a tensor in an attribute, a parameter changed in place"
            )
        if losses:
            return (
                "the forward is another, as where it depends on more than its inputs, parameters and buffers: on "
                "Python's state, on whether it is traced, on the data of a tensor (x.data)"
            )
        if any(name.startswith("the gradient") for name in what):
            return "the forward is the same, so that a backward was lost on the way"
        return "losses and gradients are the same, so that the update of a buffer was lost on the way"


def compared(
    plain: Run,
    ours: Run,
    *,
    name: str,
    microbatch_size: int,
    untouched: Mapping[str, Tensor],
    precisions: Iterable[torch.dtype],
) -> Numbers:
    """What a chain computed, held to what the module of that name did.

    `untouched` are the buffers before the runs: those that no layer uses stay so. The coarsest of `precisions` decides
    what is allowed.
    """
    allowed = max((ALLOWED[dtype] for dtype in precisions if dtype in ALLOWED), default=ALLOWED[torch.float32])
    found = list(_differences(plain, replace(ours, buffers={**untouched, **ours.buffers})))
    return Numbers(
        name=name,
        microbatch_size=microbatch_size,
        losses=tuple(loss.item() for loss in plain.losses),
        gradients=sum(gradient is not None for gradient in plain.gradients.values()),
        buffers=len(plain.buffers),
        apart=max((d.apart for d in found if d.apart is not None and d.apart <= allowed), default=0.0),
        allowed=allowed,
        differences=tuple(d for d in found if d.apart is None or not d.apart <= allowed),
    )


def _differences(plain: Run, ours: Run) -> Iterator[Difference]:
    """Everything that is not equal bit by bit."""
    for number, (loss, own) in enumerate(zip(plain.losses, ours.losses, strict=True)):
        if not same(loss, own):
            text = f"is {own.item():.6g} instead of {loss.item():.6g}"
            yield Difference(what=_loss_name(number), apart=_apart(loss, own, _SMALLEST), text=text)
    most = max((largest(gradient) for gradient in plain.gradients.values() if gradient is not None), default=0.0)
    for name, gradient in plain.gradients.items():
        yield from difference(f"the gradient of {name}", gradient, ours.gradients.get(name), _SMALLEST * most)
    for name, buffer in plain.buffers.items():
        yield from difference(f"the buffer {name}", buffer, ours.buffers.get(name), _SMALLEST)


def difference(what: str, plain: Tensor | None, ours: Tensor | None, floor: float) -> Iterator[Difference]:
    """How `ours` differs, if it does, as a part of the largest value, or of `floor` if that is larger."""
    if plain is None or ours is None:
        if plain is not ours:
            yield Difference(what=what, apart=None, text="is missing" if ours is None else "should not be there")
    elif plain.shape != ours.shape or plain.dtype != ours.dtype:
        text = f"is {ours.dtype} {tuple(ours.shape)} instead of {plain.dtype} {tuple(plain.shape)}"
        yield Difference(what=what, apart=None, text=text)
    elif not same(plain, ours):
        apart = _apart(plain, ours, floor)
        yield Difference(what=what, apart=apart, text=f"is {apart:.1e} of its largest value apart")


def same(plain: Tensor, ours: Tensor) -> bool:
    """Whether two tensors are equal; NaN is equal to NaN."""
    if torch.equal(plain, ours):
        return True
    if not plain.is_floating_point() or not plain.isnan().any():
        return False
    return torch.allclose(plain, ours, rtol=0.0, atol=0.0, equal_nan=True)


def _apart(plain: Tensor, ours: Tensor, floor: float) -> float:
    """The largest difference as a share of the largest value, or of `floor`; infinite for integers that differ."""
    if not (plain.is_floating_point() or plain.is_complex()):
        return float("inf")
    far = _norm(plain.to(_wide(plain)) - ours.to(_wide(plain)))
    if isfinite(far):
        return far / max(largest(plain), floor)
    unlike = (plain != ours) & ~(plain.isnan() & ours.isnan())
    far = (plain[unlike].to(_wide(plain)) - ours[unlike].to(_wide(plain))).abs().nan_to_num(float("inf")).max().item()
    return far / max(largest(plain), floor)


def largest(tensor: Tensor) -> float:
    """The largest finite absolute value."""
    if not tensor.numel():
        return 0.0
    if tensor.is_floating_point() and isfinite(found := _norm(tensor)):
        return found
    return tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item()


def _norm(tensor: Tensor) -> float:
    """The largest absolute value, in one pass."""
    return float(torch.linalg.vector_norm(tensor.detach(), ord=inf))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _loss_name(number: int) -> str:
    return f"the loss of microbatch {number + 1}"


# ----------------------------------------------------------------------------------------------------
# Copies of models with fewer of their equal blocks, which share the weights of the original.
#
# What a trace does to one of two hundred equal blocks it does to all of them, so that a copy with two of them
# shows it for a hundredth of the cost. Blocks are equal by structure: classes, parameters, hooks and settings
# that are texts or truth values. Whether a copy can be traced and run is for the caller to find out.

_COUNTS = ("layer", "block", "depth")  # in the names of settings that say how many blocks there are
_ENOUGH = 2  # blocks of a kind: the second one takes what the first one returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A list of blocks of a model, by its path, and the names of the blocks that a copy leaves out."""

    path: str
    blocks: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kept} of {self.blocks} blocks{f' of {self.path}' if self.path else ''}"

    @property
    def kept(self) -> int:
        """How many blocks a copy has."""
        return self.blocks - len(self.left_out)

    def leaves_out(self, path: str) -> bool:
        """Whether a module, or a layer of its name, is in a block that a copy leaves out."""
        around, inside = f"{self.path}." if self.path else "", plain(path)
        return inside.startswith(around) and inside[len(around) :].partition(".")[0] in self.left_out


def rows_of(module: nn.Module) -> list[Row]:
    """The lists of blocks of which a copy can leave some out; none in blocks that are left out themselves."""
    found = list[Row]()
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and not any(row.leaves_out(path) for row in found):
            names = tuple(part._modules)
            superfluous = _superfluous([_kind(block) for block in part._modules.values()])
            if superfluous:
                left_out = names[superfluous.start : superfluous.stop]
                found.append(Row(path=path, blocks=len(names), left_out=left_out))
    return found


def with_fewer_blocks(task: Task, rows: Sequence[Row]) -> Task:
    """The task with a copy of its module, which exists, that has fewer blocks in `rows`. The two share their weights.

    Settings around a list that say how many blocks it has, as `config.num_hidden_layers` does, agree with the copy.
    """
    assert isinstance(task.module, nn.Module)
    own = copied(task.module, lambda tensor: tensor.detach())
    for row in rows:
        blocks = own.get_submodule(row.path)._modules
        for name in row.left_out:
            del blocks[name]
        for settings in _settings_around(row.path, task.module, own):
            for name, value in settings.items():
                if type(value) is int and value == row.blocks and any(part in str(name) for part in _COUNTS):
                    settings[name] = row.kept
    return replace(task, module=own, name=f"{task.name} with {' and '.join(map(str, rows))}")


def _settings_around(path: str, original: nn.Module, own: nn.Module) -> Iterator[dict[Any, Any]]:
    """The attributes of the modules around `path` in `own`, and of objects in them that the original does not share."""
    parts = path.split(".") if path else []
    for around in (".".join(parts[:depth]) for depth in range(len(parts) + 1)):
        held, before = vars(own.get_submodule(around)), vars(original.get_submodule(around))
        yield held
        for name, value in held.items():
            settings = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            if isinstance(settings, dict) and value is not before.get(name):
                yield settings


def _superfluous(kinds: Sequence[object]) -> range:
    """The longest run of blocks with enough blocks of their kinds before it; empty where there is none.

    It is one run, and a late one, because models also look blocks up by number.
    """
    found, before = range(0), Counter[object]()
    for start, kind in enumerate(kinds):
        stop = start
        while stop < len(kinds) and before[kinds[stop]] >= _ENOUGH:
            stop += 1
        found = max(found, range(start, stop), key=len)
        before[kind] += 1
    return found


def _kind(block: nn.Module | None) -> object:
    """What is the same for blocks that compute alike."""
    return block and tuple((name, *_structure(part)) for name, part in block.named_modules())


def _structure(part: nn.Module) -> Iterator[object]:
    yield type(part)
    yield tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in part.named_parameters(recurse=False))
    yield tuple((name, b.shape, b.dtype) for name, b in part.named_buffers(recurse=False))
    yield tuple((name, value) for name, value in vars(part).items() if isinstance(value, str | bool))
    yield bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


# ----------------------------------------------------------------------------------------------------

_REVEALING = 0.02  # what stands, at most, where a parameter is zero throughout


def compare(task: Task, chain: Chain, batches: Sequence[Sample], *, target: Target = "cpu") -> Numbers:
    """Compare `task.module`, a module, with `chain`, which was made of it and holds its tensors, on `batches`.

    Both run on the CPU, under the casts of the target for which the chain was made.

    Raises:
        NotComparable: the module itself fails on a batch.
        UsageError: a layer of the chain fails where the module does not.
    """
    module = task.module
    assert isinstance(module, nn.Module)
    with put_back(), recording("comparing numbers"), casting_for(target):
        with tensors_put_back(module):
            plain = _plain_run(task, module, chain, batches)
        with tensors_put_back(module):
            ours = _chain_run(module, chain, batches, in_flight=True)
        if ours is None:
            with tensors_put_back(module):
                ours = _chain_run(module, chain, batches, in_flight=False)
        assert ours is not None
        return compared(
            plain,
            ours,
            name=task.name,
            microbatch_size=len(next(leaf for leaf in pytree.tree_leaves(batches[0]) if isinstance(leaf, Tensor))),
            untouched={name: buffer.cpu() for name, buffer in module.named_buffers()},
            precisions={
                *(parameter.dtype for parameter in module.parameters()),
                *([task.autocast] if task.autocast else []),
            },
        )


def evaluated(
    task: Task, batches: Sequence[Sample], *, traced: bool, target: Target = "cpu", training: bool = False
) -> list[float]:
    """The losses of `task.module` on `batches`, without gradients, in evaluation or in `training`; each with draws of
    its own. `traced` says that the module takes inputs as `torch.export` does, not as an `nn.Sequential`.

    Raises:
        NotComparable: the module fails on a batch.
    """
    module = task.module
    assert isinstance(module, nn.Module)
    with put_back(), recording("comparing numbers"), casting_for(target), tensors_put_back(module), torch.no_grad():
        (own,), loss_of = copies_of([module], task.loss)
        with plainly(task, "evaluation"):
            forward = plain_forward(task, own if training else own.eval(), loss_of, traced=traced)
            return [loss.item() for loss in _losses(forward, batches)]


def values_before(
    layers: Sequence[int], task: Task, chain: Chain, batch: Sample, *, target: Target = "cpu"
) -> list[Values]:
    """The values that come into some layers of a chain of modules for `batch`, in evaluation and without gradients."""
    module = task.module
    assert isinstance(module, nn.Module)
    with put_back(), recording("comparing numbers"), casting_for(target), tensors_put_back(module), torch.no_grad():
        own, _ = copies_of([layer.module for layer in chain.layers], None)
        seed_all(0)
        values = chain.flatten(pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), batch[0]))
        found = []
        for number, (layer, copy) in enumerate(zip(chain.layers, own, strict=True)):
            if number in layers:
                found.append(tuple(value.clone() for value in values))
            values = replace(layer, module=copy.eval())(values)
        return found


class NotComparable(UsageError):
    """The module itself cannot be trained here, such as one whose kernels are those of a GPU alone."""


# -------------------------------------------------------------------- two runs


def _plain_run(task: Task, module: nn.Module, chain: Chain, batches: Sequence[Sample]) -> Run:
    """A copy of the module, trained as a plain loop does, without an update."""
    (own,), loss_of = copies_of([module], task.loss)
    with plainly(task, "training"):
        losses = _losses(plain_forward(task, own, loss_of, traced=chain.traced), batches)
    return Run(losses, _gradients(own.named_parameters(), module), dict(own.named_buffers()))


def plain_forward(task: Task, own: nn.Module, loss_of: Any, *, traced: bool) -> Callable[[Any, Any], Tensor]:
    """The loss of a plain module for inputs and targets."""

    def forward(inputs: Any, targets: Any) -> Tensor:
        leaves = tuple(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
        args, keywords = arguments(inputs) if traced else ((inputs,), {})
        with autocasting(task.autocast, leaves):
            outputs = own(*args, **keywords)
            loss: Tensor = _own_loss(outputs) if loss_of is None else loss_of(outputs, targets)
        return loss

    return forward


@contextmanager
def plainly(task: Task, doing: str) -> Iterator[None]:
    """Inside, a plain module runs.

    Raises:
        NotComparable: it fails.
    """
    try:
        yield
    except PipefitError:
        raise
    except Exception as error:
        raise NotComparable(
            f"{task.name} itself, as a plain module on the CPU, fails in {doing} ({in_one_line(error)})"
        ) from error


def _chain_run(module: nn.Module, chain: Chain, batches: Sequence[Sample], *, in_flight: bool) -> Run | None:
    """A copy of the chain, trained in the same way or with all microbatches `in_flight`.

    Its tensors have the names that they have in the module. None if autograd sees that a later forward has changed
    what a backward needs: training says so where it happens, and a plan may recompute.
    """
    own, loss_of = copies_of([layer.module for layer in chain.layers], chain.criterion)
    layers = tuple(replace(layer, module=copy) for layer, copy in zip(chain.layers, own, strict=True))
    copy = replace(chain, layers=layers, criterion=loss_of)

    def forward(inputs: Any, targets: Any) -> Tensor:
        values = copy.flatten(inputs)
        for layer in copy.layers:
            values = layer(values)
        return copy.loss(values, copy.flatten_targets(targets))

    try:
        losses = _losses(forward, batches, in_flight=in_flight)
    except PipefitError:
        raise
    except Exception as error:
        if in_flight and "modified by an inplace operation" in str(error):
            return None
        raise UsageError(
            f"{chain.name} fails as a chain, and as a module it does not ({in_one_line(error)}): {REMEDY}"
        ) from error
    parameters, buffers = _by_names_of(module, chain, own)
    return Run(losses, _gradients(parameters.items(), module), buffers)


def _by_names_of(
    module: nn.Module, chain: Chain, own: Sequence[nn.Module]
) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Parameters and buffers of `own`, copies of the layers, by the names that the originals have in the module."""
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    for layer, made in zip(chain.layers, own, strict=True):
        for local, parameter in layer.module.named_parameters(remove_duplicate=False):
            parameters[names[id(parameter)]] = made.get_parameter(local)
        for local, tensor in layer.module.named_buffers(remove_duplicate=False):
            if id(tensor) in names:  # else a constant of the trace
                buffers[names[id(tensor)]] = made.get_buffer(local)
    return parameters, buffers


def _losses(
    forward: Callable[[Any, Any], Tensor], batches: Sequence[Sample], *, in_flight: bool = False
) -> list[Tensor]:
    """The loss of each microbatch, which has gone backward too: before the next one goes forward, unless all are
    `in_flight`. Random draws depend on its number alone.
    """
    losses, waiting = [], deque[tuple[Tensor, Tensor]]()
    for number, batch in enumerate(batches):
        seed_all(number)
        inputs, targets = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), batch)
        loss = forward(inputs, targets)
        losses.append(loss.detach().reshape(()))
        if loss.requires_grad:
            waiting.append((loss.reshape(()), torch.get_rng_state()))
        del loss  # and with it, soon, its graph
        while waiting and (not in_flight or number + 1 == len(batches)):
            _go_backward(*waiting.popleft())
    return losses


def _go_backward(loss: Tensor, draws: Tensor) -> None:
    """The backward of a microbatch, with the `draws` that follow those of its forward."""
    torch.set_rng_state(draws)
    torch.autograd.backward(loss)


def _own_loss(outputs: Any) -> Tensor:
    """The loss among what a module returns that computes it itself."""
    if isinstance(outputs, Tensor):
        return outputs
    loss: Tensor | None = getattr(outputs, "loss", None)
    if loss is None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss


def _gradients(parameters: Iterable[tuple[str, nn.Parameter]], module: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of copies of the module's parameters, by name.

    A function that holds the module itself (a closure) reaches the originals instead.
    """
    leaked = {name: original.grad.cpu() for name, original in module.named_parameters() if original.grad is not None}
    return {name: leaked.get(name, parameter.grad) for name, parameter in parameters}


@contextmanager
def tensors_put_back(module: nn.Module) -> Iterator[None]:
    """Inside, parameters have no gradients; afterwards they have their own again, and buffers their values.

    A run does not touch the module, unless a function in it holds the original.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                if not same(buffer, value):
                    buffer.copy_(value)


# -------------------------------------------------------------------- copies


class _Clones:
    """Makes copies on the CPU; tensors that share memory have copies that share it too.

    In copies of `trained` parameters no zeros hide what is behind them.
    """

    def __init__(self, trained: Iterable[nn.Parameter]) -> None:
        self._trained = {id(parameter) for parameter in trained if parameter.requires_grad}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor.detach().cpu().clone()
        storage = tensor.untyped_storage()
        own = self._storages.get(storage.data_ptr())
        if own is None or not storage.nbytes():
            own = self._storages[storage.data_ptr()] = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            own.copy_(storage)
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
        if id(tensor) in self._trained and not made.any():
            made.copy_((torch.arange(made.numel()) + 1).sin().mul(_REVEALING).reshape(made.shape))
        return made


def copies_of(modules: Sequence[nn.Module], loss: Any) -> tuple[list[nn.Module], Any]:
    """Copies of modules, and of the loss where it is one, which share what the originals share."""
    whole = nn.ModuleList([*modules, *([loss] if isinstance(loss, nn.Module) else [])])
    own = list(copied(whole, _Clones(whole.parameters())).children())
    return own[: len(modules)], own[-1] if isinstance(loss, nn.Module) else loss
