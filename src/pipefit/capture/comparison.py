"""Comparison of a module with its chain: the safety net under every trace.

Two real microbatches run through a copy of the module as a plain loop runs them, and through a copy of the
chain as a pipeline runs them, with equal random draws: both forwards, then both backwards, so that a backward
that meets what a later forward changed is detected. Losses, the gradient of every parameter and all buffers
are compared. The second microbatch reveals state between calls: an updated buffer, a count, a tensor in an
attribute. The module, its gradients and all random generators are left unchanged.

Parameters that are all zero, such as the last layer of a residual branch, would hide everything before them
in the backward: both copies get equal small numbers instead. The comparison needs three times the bytes of
the module and the activations of two microbatches on the host.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture.caller import recording
from pipefit.capture.chain import Chain, autocasting
from pipefit.capture.copying import copied
from pipefit.capture.cuda_autocast import casting_for
from pipefit.capture.exporting import arguments
from pipefit.capture.flat_graph import plain
from pipefit.capture.random_state import put_back, seed_all
from pipefit.capture.refusals import REMEDY
from pipefit.capture.sample import Sample, samples_of
from pipefit.capture.structure import Values
from pipefit.capture.task import Task
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.schema.profile import Target
from pipefit.texts import counted, first_of
from pipefit.torch_internals import pytree

# ---- Results of a comparison
#
# Numbers may differ by rounding if kernels or the order of a sum differ: by up to `ALLOWED`, a share of the
# largest value in their tensor that depends on the precision. A gradient that only one side has, and integers
# that differ, are never allowed.

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Gradients (as a share of the largest), losses and buffers below this size are compared as if they had it:
# rounding alone may make them.
_SMALLEST = 1e-3


@dataclass(frozen=True, slots=True)
class RunResult:
    """Results of a run: the loss of each microbatch; by name, the summed gradients and the final buffers."""

    losses: list[Tensor]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference; `apart` is a share of the largest value, None if the two sides are not comparable."""

    what: str
    apart: float | None
    text: str

    def __str__(self) -> str:
        return f"{self.what} {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Result of comparing a module with its chain.

    - `losses` are the module's losses of each microbatch; `gradients` and `buffers` count the compared
      tensors.
    - `apart` is the largest difference within the limit `allowed`, both as shares of the largest value.
    - `besides` describes further comparisons: tensor-parallel layers with whole layers, and losses of
      microbatches.
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
            return f"the numbers of {self.name} cannot be compared: its losses are {losses} before training"
        exact = (
            "equal bit by bit" if not self.apart else f"at most {self.apart:.1e} of the largest value apart"
        )
        return (
            f"{self.name} computes the same numbers as a chain and as a module: "
            f"{counted(len(self.losses), 'microbatch')} of {self.microbatch_size}, losses {losses}, "
            f"{counted(self.gradients, 'gradient')} and {counted(self.buffers, 'buffer')}, {exact} "
            f"({self.allowed:.0e} allowed){''.join(self.besides)}"
        )

    @property
    def agrees(self) -> bool:
        """True if the numbers are finite, and nothing differs."""
        return not self.differences and all(map(isfinite, self.losses))

    def check(self) -> None:
        """Check that nothing differs.

        Raises:
            UsageError: something does. The message says what, by how much, the likely cause and what to try.
        """
        if self.differences:
            raise UsageError(self._refusal)

    @property
    def _refusal(self) -> str:
        return (
            f"{self.name} computes different numbers as a chain than as a module: "
            f"{first_of(self.differences)} ({self.allowed:.0e} of the largest value is allowed). "
            f"{self._cause}. Change that, or give pipefit the parts with pipefit.chain([...]), in the order "
            "in which they run"
        )

    @property
    def _cause(self) -> str:
        """The likely cause of the differences, in words."""
        what = [difference.what for difference in self.differences]
        losses = [name for name in what if name.startswith("the loss")]
        if losses and losses[0] != _loss_name(0):
            return (
                "Only the first microbatch has the same loss, so the forward keeps state between calls "
                "that the chain does not: a count, a tensor in an attribute, a parameter changed in place"
            )
        if losses:
            return (
                "The forward differs: it depends on more than its inputs, parameters and buffers, such as "
                "Python state, being traced, or the data of a tensor (x.data)"
            )
        if any(name.startswith("the gradient") for name in what):
            return "The forward is the same, so the chain lacks a backward"
        return "Losses and gradients are the same, so the chain lacks the update of a buffer"


def compared(
    plain: RunResult,
    ours: RunResult,
    *,
    name: str,
    microbatch_size: int,
    untouched: Mapping[str, Tensor],
    precisions: Iterable[torch.dtype],
) -> Numbers:
    """Compare the results of a chain with those of the module `name`.

    `untouched` are the buffers before the runs: buffers that no layer uses keep these values. The coarsest of
    `precisions` determines the allowed difference.
    """
    allowed = max(
        (ALLOWED[dtype] for dtype in precisions if dtype in ALLOWED), default=ALLOWED[torch.float32]
    )
    result = list(_differences(plain, replace(ours, buffers={**untouched, **ours.buffers})))
    return Numbers(
        name=name,
        microbatch_size=microbatch_size,
        losses=tuple(loss.item() for loss in plain.losses),
        gradients=sum(gradient is not None for gradient in plain.gradients.values()),
        buffers=len(plain.buffers),
        apart=max((d.apart for d in result if d.apart is not None and d.apart <= allowed), default=0.0),
        allowed=allowed,
        differences=tuple(d for d in result if d.apart is None or not d.apart <= allowed),
    )


def _differences(plain: RunResult, ours: RunResult) -> Iterator[Difference]:
    """Yield everything that is not bitwise equal."""
    for number, (loss, own) in enumerate(zip(plain.losses, ours.losses, strict=True)):
        if not same(loss, own):
            text = f"is {own.item():.6g} instead of {loss.item():.6g}"
            yield Difference(what=_loss_name(number), apart=_apart(loss, own, _SMALLEST), text=text)
    most = max(
        (largest(gradient) for gradient in plain.gradients.values() if gradient is not None), default=0.0
    )
    for name, gradient in plain.gradients.items():
        yield from difference(f"the gradient of {name}", gradient, ours.gradients.get(name), _SMALLEST * most)
    for name, buffer in plain.buffers.items():
        yield from difference(f"the buffer {name}", buffer, ours.buffers.get(name), _SMALLEST)


def difference(what: str, plain: Tensor | None, ours: Tensor | None, floor: float) -> Iterator[Difference]:
    """Yield the difference of `ours` from `plain`, if any, as a share of the largest value, at least
    `floor`.
    """
    if plain is None or ours is None:
        if plain is not ours:
            yield Difference(
                what=what, apart=None, text="is missing" if ours is None else "should not be there"
            )
    elif plain.shape != ours.shape or plain.dtype != ours.dtype:
        text = f"is {ours.dtype} {tuple(ours.shape)} instead of {plain.dtype} {tuple(plain.shape)}"
        yield Difference(what=what, apart=None, text=text)
    elif not same(plain, ours):
        apart = _apart(plain, ours, floor)
        yield Difference(what=what, apart=apart, text=f"is {apart:.1e} of its largest value apart")


def same(plain: Tensor, ours: Tensor) -> bool:
    """Return whether two tensors are equal; NaN is equal to NaN."""
    if torch.equal(plain, ours):
        return True
    if not plain.is_floating_point() or not plain.isnan().any():
        return False
    return torch.allclose(plain, ours, rtol=0.0, atol=0.0, equal_nan=True)


def _apart(plain: Tensor, ours: Tensor, floor: float) -> float:
    """Return the largest difference as a share of the largest value, at least `floor`; infinite for
    integers.
    """
    if not (plain.is_floating_point() or plain.is_complex()):
        return float("inf")
    far = _norm(plain.to(_wide(plain)) - ours.to(_wide(plain)))
    if isfinite(far):
        return far / max(largest(plain), floor)
    unlike = (plain != ours) & ~(plain.isnan() & ours.isnan())
    far = (
        (plain[unlike].to(_wide(plain)) - ours[unlike].to(_wide(plain)))
        .abs()
        .nan_to_num(float("inf"))
        .max()
        .item()
    )
    return far / max(largest(plain), floor)


def largest(tensor: Tensor) -> float:
    """Return the largest finite absolute value."""
    if not tensor.numel():
        return 0.0
    if tensor.is_floating_point() and isfinite(result := _norm(tensor)):
        return result
    return tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item()


def _norm(tensor: Tensor) -> float:
    """Return the largest absolute value, in one pass."""
    return float(torch.linalg.vector_norm(tensor.detach(), ord=inf))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _loss_name(number: int) -> str:
    return f"the loss of microbatch {number + 1}"


# ---- Copies of models with fewer of their equal blocks, which share the weights of the original
#
# A trace treats two hundred equal blocks as it treats one, so a copy with two of them shows errors for a
# hundredth of the cost. Blocks are equal by structure: classes, parameters, buffers, hooks, and settings
# other than floats, which often rise from block to block, and numbers of the blocks. The caller finds out
# whether a copy can be traced and run.

_COUNTS = ("layer", "block", "depth")  # in the names of settings that hold a number of blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualBlocks:
    """A list of blocks of a model, by its path, with their names, and those that a copy leaves out.

    `stand_ins` maps the left-out blocks, and the last blocks of their kinds before them, to blocks of the
    copy that compute the same between equal neighbours; it is empty if kinds do not alternate evenly.
    """

    path: str
    names: tuple[str, ...]
    left_out: tuple[str, ...]
    stand_ins: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.kept} of {self.blocks} blocks{f' of {self.path}' if self.path else ''}"

    @property
    def blocks(self) -> int:
        """Number of blocks of the model."""
        return len(self.names)

    @property
    def kept(self) -> int:
        """Number of blocks in a copy."""
        return self.blocks - len(self.left_out)

    @property
    def around(self) -> str:
        """The beginning of all paths of blocks."""
        return f"{self.path}." if self.path else ""

    def block(self, path: str) -> str:
        """Return the block at `path` or around it, or the layer of that name; empty if there is none."""
        if not path.startswith(self.around):
            return ""
        name = plain(path)[len(self.around) :].partition(".")[0]
        return name if name in self.names else ""

    def leaves_out(self, path: str) -> bool:
        """Return whether a copy leaves out the module at `path`, or the layer with that name."""
        return self.block(path) in self.left_out


def rows_of(module: nn.Module, enough: int = 2) -> list[EqualBlocks]:
    """Return lists, not in left-out blocks, that a copy can shorten to `enough` blocks of a kind."""
    result = list[EqualBlocks]()
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and not any(
            row.leaves_out(path) for row in result
        ):
            names = tuple(part._modules)
            kinds = _kinds(list(part._modules.values()))
            superfluous = _superfluous(kinds, enough)
            if superfluous:
                left_out = names[superfluous.start : superfluous.stop]
                pairs = tuple(
                    (names[one], names[other]) for one, other in _stand_ins(kinds, superfluous).items()
                )
                result.append(EqualBlocks(path=path, names=names, left_out=left_out, stand_ins=pairs))
    return result


def with_fewer_blocks(task: Task, rows: Sequence[EqualBlocks]) -> Task:
    """Return `task`, whose module exists, with a copy of the module that leaves out blocks of `rows`.

    The two modules share their weights. Settings around a list that hold its number of blocks, such as
    `config.num_hidden_layers`, are reduced in the copy.
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
    """Yield the attributes of modules around `path` in `own`, and of objects that `original` does not
    share.
    """
    parts = path.split(".") if path else []
    for around in (".".join(parts[:depth]) for depth in range(len(parts) + 1)):
        held, before = vars(own.get_submodule(around)), vars(original.get_submodule(around))
        yield held
        for name, value in held.items():
            settings = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            if isinstance(settings, dict) and value is not before.get(name):
                yield settings


def _stand_ins(kinds: Sequence[object], left_out: range) -> dict[int, int]:
    """Return the blocks that stand for the left-out ones, and for the last ones before them, by number.

    The last left-out blocks, whose neighbours are others, become the last blocks before the run.
    """
    last = len({kinds[number] for number in left_out})
    first = left_out.start - last
    result = {number: number - len(left_out) for number in left_out[-last:]}
    before = {kind: number for number, kind in enumerate(kinds[: max(first, 0)])}
    if any(kinds[one] != kinds[other] for one, other in result.items()):
        return {}
    inside = range(first, left_out.stop - last)
    if any(kinds[number] not in before for number in inside):
        return {}
    return {number: before[kinds[number]] for number in inside} | result


def _superfluous(kinds: Sequence[object], enough: int) -> range:
    """Return the longest run of blocks with `enough` blocks of their kinds before it, or an empty range.

    It is a single run, and a late one, because models also look blocks up by number.
    """
    result, before = range(0), Counter[object]()
    for start, kind in enumerate(kinds):
        stop = start
        while stop < len(kinds) and before[kinds[stop]] >= enough:
            stop += 1
        result = max(result, range(start, stop), key=len)
        before[kind] += 1
    return result


def _kinds(blocks: Sequence[nn.Module | None]) -> list[object]:
    """Return keys of the blocks of a list, which are equal for blocks that compute the same.

    An integer that counts the blocks, such as `layer_idx`, makes no difference.
    """
    settings = [{} if block is None else dict(_settings(block)) for block in blocks]
    less_number = defaultdict[object, set[object]](set)  # integers less the number of their block, by setting
    for number, own in enumerate(settings):
        for name, value in own.items():
            less_number[name].add(value - number if type(value) is int else None)
    counting = {name for name, values in less_number.items() if len(values) == 1 and values != {None}}
    return [
        None
        if block is None
        else (
            tuple((name, *_structure(part)) for name, part in block.named_modules()),
            tuple((name, value) for name, value in own.items() if name not in counting),
        )
        for block, own in zip(blocks, settings, strict=True)
    ]


def _settings(block: nn.Module) -> Iterator[tuple[object, object]]:
    """Yield settings of a block's modules by their names: strings, integers, booleans, None, and tuples."""
    plain_types = str | bool | int | None
    for path, part in block.named_modules():
        for name, value in vars(part).items():
            parts = value if isinstance(value, tuple) else (value,)
            if all(isinstance(one, plain_types) for one in parts):
                yield (path, name), value


def _structure(part: nn.Module) -> Iterator[object]:
    yield type(part)
    yield tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in part.named_parameters(recurse=False))
    yield tuple((name, b.shape, b.dtype) for name, b in part.named_buffers(recurse=False))
    yield bool(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    )


# ---- The comparison

_REVEALING = 0.02  # largest number put into a parameter that is all zero


def compare(task: Task, chain: Chain, batches: Sequence[Sample], *, target: Target = "cpu") -> Numbers:
    """Compare `task.module`, a module, with `chain`, which was made of it and holds its tensors.

    Both run on the CPU, under the autocast rules of the target for which the chain was made.

    Raises:
        NotComparable: the module itself fails on a batch.
        UsageError: the chain fails where the module does not.
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
            microbatch_size=samples_of(batches[0]),
            untouched={name: buffer.cpu() for name, buffer in module.named_buffers()},
            precisions={
                *(parameter.dtype for parameter in module.parameters()),
                *([task.autocast] if task.autocast else []),
            },
        )


def evaluated(
    task: Task, batches: Sequence[Sample], *, traced: bool, target: Target = "cpu", training: bool = False
) -> list[float]:
    """Return the losses of `task.module` on `batches` without gradients, in evaluation or `training` mode.

    Each batch has its own random draws. `traced` says that the module takes inputs as `torch.export` passes
    them, not as an `nn.Sequential` does.

    Raises:
        NotComparable: the module fails on a batch.
    """
    module = task.module
    assert isinstance(module, nn.Module)
    with (
        put_back(),
        recording("comparing numbers"),
        casting_for(target),
        tensors_put_back(module),
        torch.no_grad(),
    ):
        (own,), loss_of = copies_of([module], task.loss)
        with plainly(task, "evaluation"):
            forward = plain_forward(task, own if training else own.eval(), loss_of, traced=traced)
            return [loss.item() for loss in _losses(forward, batches)]


def values_before(
    layers: Sequence[int], task: Task, chain: Chain, batch: Sample, *, target: Target = "cpu"
) -> list[Values]:
    """Return the inputs of some layers of a chain of modules for `batch`, in evaluation mode."""
    module = task.module
    assert isinstance(module, nn.Module)
    with (
        put_back(),
        recording("comparing numbers"),
        casting_for(target),
        tensors_put_back(module),
        torch.no_grad(),
    ):
        own, _ = copies_of([layer.module for layer in chain.layers], None)
        seed_all(0)
        values = chain.flatten(
            pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), batch[0])
        )
        result = []
        for number, (layer, copy) in enumerate(zip(chain.layers, own, strict=True)):
            if number in layers:
                result.append(tuple(value.clone() for value in values))
            values = replace(layer, module=copy.eval())(values)
        return result


class NotComparable(UsageError):
    """The module itself cannot be trained on the CPU, for example because its kernels need a GPU."""


# -------------------------------------------------------------------- two runs


def _plain_run(task: Task, module: nn.Module, chain: Chain, batches: Sequence[Sample]) -> RunResult:
    """Run a copy of the module forward and backward as a plain loop does, without an update."""
    (own,), loss_of = copies_of([module], task.loss)
    with plainly(task, "training"):
        losses = _losses(plain_forward(task, own, loss_of, traced=chain.traced), batches)
    return RunResult(losses, _gradients(own.named_parameters(), module), dict(own.named_buffers()))


def plain_forward(task: Task, own: nn.Module, loss_of: Any, *, traced: bool) -> Callable[[Any, Any], Tensor]:
    """Return a function that computes the loss of a plain module for inputs and targets."""

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
    """Run a plain module in the body.

    Raises:
        NotComparable: it fails.
    """
    try:
        yield
    except PipefitError:
        raise
    except Exception as error:
        raise NotComparable(
            f"{task.name} fails without pipefit too, as a plain module on the CPU, in {doing} "
            f"({in_one_line(error)})"
        ) from error


def _chain_run(
    module: nn.Module, chain: Chain, batches: Sequence[Sample], *, in_flight: bool
) -> RunResult | None:
    """Run a copy of the chain forward and backward, like the module or with all microbatches `in_flight`.

    Its tensors have their names in the module. Returns None if autograd detects that a later forward changed
    what a backward needs: training reports that when it happens, and a plan may recompute instead.
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
            f"{chain.name} fails as a chain but not as a module ({in_one_line(error)}): {REMEDY}"
        ) from error
    parameters, buffers = _by_names_of(module, chain, own)
    return RunResult(losses, _gradients(parameters.items(), module), buffers)


def _by_names_of(
    module: nn.Module, chain: Chain, own: Sequence[nn.Module]
) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Return parameters and buffers of `own`, copies of the layers, by the originals' names in the module."""
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    for layer, made in zip(chain.layers, own, strict=True):
        for local, parameter in layer.module.named_parameters(remove_duplicate=False):
            parameters[names[id(parameter)]] = made.get_parameter(local)
        for local, tensor in layer.module.named_buffers(remove_duplicate=False):
            if id(tensor) in names:  # otherwise a constant of the trace
                buffers[names[id(tensor)]] = made.get_buffer(local)
    return parameters, buffers


def _losses(
    forward: Callable[[Any, Any], Tensor], batches: Sequence[Sample], *, in_flight: bool = False
) -> list[Tensor]:
    """Return the loss of each microbatch after its backward.

    Each backward precedes the next forward, unless all microbatches are `in_flight`. Random draws depend only
    on the number of the microbatch.
    """
    losses, waiting = [], deque[tuple[Tensor, Tensor]]()
    for number, batch in enumerate(batches):
        seed_all(number)
        inputs, targets = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), batch)
        loss = forward(inputs, targets)
        losses.append(loss.detach().reshape(()))
        if loss.requires_grad:
            waiting.append((loss.reshape(()), torch.get_rng_state()))
        del loss  # free the graph
        while waiting and (not in_flight or number + 1 == len(batches)):
            _run_backward(*waiting.popleft())
    return losses


def _run_backward(loss: Tensor, draws: Tensor) -> None:
    """Run the backward of a microbatch, with the random state `draws` that followed its forward."""
    torch.set_rng_state(draws)
    torch.autograd.backward(loss)


def _own_loss(outputs: Any) -> Tensor:
    """Return the loss among the outputs of a module that computes it."""
    if isinstance(outputs, Tensor):
        return outputs
    loss: Tensor | None = getattr(outputs, "loss", None)
    if loss is None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss


def _gradients(parameters: Iterable[tuple[str, nn.Parameter]], module: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of copies of the module's parameters, by name.

    A function that holds the original module (a closure) puts gradients into the original's parameters
    instead.
    """
    leaked = {
        name: original.grad.cpu() for name, original in module.named_parameters() if original.grad is not None
    }
    return {name: leaked.get(name, parameter.grad) for name, parameter in parameters}


@contextmanager
def tensors_put_back(module: nn.Module) -> Iterator[None]:
    """Clear the gradients of parameters in the body; restore gradients and buffers afterwards.

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
    """Makes copies of tensors on the CPU; copies share memory if their originals do.

    Copies of trained parameters that are all zero get small numbers instead.
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
            own = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            self._storages[storage.data_ptr()] = own
            own.copy_(storage)
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
        if id(tensor) in self._trained and not made.any():
            made.copy_((torch.arange(made.numel()) + 1).sin().mul(_REVEALING).reshape(made.shape))
        return made


def copies_of(modules: Sequence[nn.Module], loss: Any) -> tuple[list[nn.Module], Any]:
    """Copy modules, and the loss if it is a module; tensors shared by originals are shared by copies."""
    whole = nn.ModuleList([*modules, *([loss] if isinstance(loss, nn.Module) else [])])
    own = list(copied(whole, _Clones(whole.parameters())).children())
    return own[: len(modules)], own[-1] if isinstance(loss, nn.Module) else loss
