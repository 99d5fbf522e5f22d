"""Made-up models: layers with any costs that a real layer can have, in chains, plans and programs, without
torch.

One constructor, `layer`, and one generator, `chain`, make all synthetic layers of tests and benchmarks:

    hostile    all features of `LayerCost`: aliases of every origin, values that pass by, buffers that feed
               back or not, in-place work, unused inputs, gradients that are slices, copies or passed on,
               inputs released early, shared and frozen parameters, kernels with a separate workspace
    plain      one value a layer and small integers, so that ties abound
    even       widths and weights drawn evenly
    skewed     the same by orders of magnitude: a layer may fit only late in 1F1B, and a cut fall on a small
               tensor
    alike      all layers equal, so that splits tie everywhere
    heavy      one layer a hundred times as heavy: every other stage has room to spare, so little can be
               pruned
    vgg_like   activations early, most parameters in one late layer, the others cheap

All randomness comes from a `Random`. Tests count seeds from 0 and name the seed in their id, so that a
failure repeats; small seeds draw small models (`small_first`), so that the first failure is the simplest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from pipefit.lowering import SCHEDULES
from pipefit.lowering.passes.recomputation import RECOMPUTE, Recompute, recompute_decisions
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Microbatches, Run, What
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import (
    GradientOrigin,
    LayerCost,
    Origin,
    Parameter,
    SavedTensor,
    SharedBuffer,
    SharedParameter,
    Span,
    Value,
    Work,
)
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Assumptions, Block, Fingerprint, Measurement, ModelProfile
from pipefit.schema.training import Training

INPUT = Origin(kind="input", index=0)
AMPLE = 1 << 50
MADE_UP = Fingerprint(
    layers=(), parameters=(), shared=(), inputs=(), targets=(), loss="", precision="float32", optimizer="SGD",
    options=(), groups="",
)  # fmt: skip


def value(nbytes: int, *, requires_grad: bool = True) -> Value:
    """Return a flat tensor of `nbytes`."""
    return Value(shape=(nbytes,), dtype="float8_e5m2", nbytes=nbytes, requires_grad=requires_grad)


def parameter(name: str, nbytes: int, *, trainable: bool = True) -> Parameter:
    """Return a flat parameter of `nbytes`."""
    return Parameter(name=name, shape=(nbytes,), dtype="uint8", nbytes=nbytes, trainable=trainable)


def work(seconds: float | None = None, *, flops: int = 0, moved_bytes: int = 0) -> Work:
    """Return a pass that takes `seconds`; None leaves the time to the estimate."""
    return Work(flops=flops, moved_bytes=moved_bytes, seconds=seconds)


def layer(
    inputs: tuple[Value, ...],
    outputs: tuple[Value, ...],
    *,
    origins: tuple[Origin, ...] | None = None,
    storages: tuple[int, ...] | None = None,
    saved: tuple[Origin, ...] = (INPUT,),
    lasting: Sequence[int] = (),
    parameters: tuple[Parameter, ...] | None = None,
    parameter_bytes: int = 0,
    buffer_bytes: int = 0,
    fed_back_bytes: int = 0,
    constant_bytes: int = 0,
    scratch_bytes: int = 0,
    checkpoint_peak_bytes: int | None = None,
    mutates_inputs: bool = False,
    first: tuple[Span, ...] | None = None,
    later: tuple[Span, ...] | None = None,
    input_gradients: tuple[GradientOrigin, ...] | None = None,
    gradient_storages: tuple[int, ...] | None = None,
    state_bytes: int = 0,
    early_state_bytes: int = 0,
    update: tuple[int, int] = (0, 0),
    seconds: float | None = 1.0,
    works: tuple[Work, Work, Work] | None = None,
) -> LayerCost:
    """Build a layer that allocates its outputs and saves its input; omitted arguments follow from the rest.

    `parameter_bytes` is one trainable weight, unless `parameters` are given; `update` the additional bytes of
    a first update and a later one in addition to the state; `works` forward, backward and update, if they
    differ; `lasting` the saved tensors that the layer's own backward does not free.
    """
    storages = tuple(v.nbytes for v in outputs) if storages is None else storages
    parameters = (parameter("w", parameter_bytes),) if parameters is None else parameters
    gradient_bytes = sum(p.nbytes for p in parameters if p.trainable)
    if gradient_storages is None:
        gradient_storages = (sum(v.nbytes for v in inputs if v.requires_grad),)
    leaving = sum(gradient_storages)
    forward, backward, update_work = works or (work(seconds),) * 3
    return LayerCost(
        module="Synthetic",
        parameters=parameters,
        buffer_bytes=buffer_bytes,
        fed_back=("fed_back",) * bool(fed_back_bytes),
        fed_back_bytes=fed_back_bytes,
        constant_bytes=constant_bytes,
        inputs=inputs,
        outputs=outputs,
        output_origins=origins or tuple(Origin(kind="own", index=k) for k in range(len(outputs))),
        storages=storages,
        saved=tuple(_saved(k, origin, storages, inputs, k in lasting) for k, origin in enumerate(saved)),
        forward_peak_bytes=sum(storages) + scratch_bytes,
        checkpoint_peak_bytes=sum(storages) if checkpoint_peak_bytes is None else checkpoint_peak_bytes,
        mutates_inputs=mutates_inputs,
        backward_first=(Span(peak_bytes=leaving + gradient_bytes + scratch_bytes),)
        if first is None
        else first,
        backward_later=(Span(peak_bytes=leaving + gradient_bytes + scratch_bytes),)
        if later is None
        else later,
        gradient_bytes=gradient_bytes,
        input_gradients=input_gradients
        or tuple(GradientOrigin(kind="own" if v.requires_grad else "none") for v in inputs),
        gradient_storages=gradient_storages,
        state_bytes=state_bytes,
        early_state_bytes=early_state_bytes,
        update_first_peak_bytes=state_bytes - early_state_bytes + update[0],
        update_peak_bytes=update[1],
        forward=forward,
        backward=backward,
        update=update_work,
    )


def _saved(
    index: int, origin: Origin, storages: Sequence[int], inputs: Sequence[Value], lasting: bool
) -> SavedTensor:
    sizes = {"own": storages, "input": [v.nbytes for v in inputs]}.get(origin.kind)
    nbytes = sizes[origin.index] if sizes else 0
    return SavedTensor(index=index, nbytes=nbytes, dtype="uint8", origin=origin, lasting=lasting)


def measurement(
    layers: Sequence[LayerCost],
    loss: LayerCost,
    *,
    shared: tuple[SharedParameter, ...] = (),
    shared_buffers: tuple[SharedBuffer, ...] = (),
    microbatch_size: int = 1,
) -> Measurement:
    """Return one measurement; equal layers share a kind."""
    kinds = tuple(dict.fromkeys(layers))
    return Measurement(
        microbatch_size=microbatch_size,
        kinds=kinds,
        layers=tuple(kinds.index(cost) for cost in layers),
        loss=loss,
        shared=shared,
        shared_buffers=shared_buffers,
    )


def profile(of: Measurement, *, model: str = "synthetic", blocks: Sequence[int] = ()) -> ModelProfile:
    """Return a profile with one measurement; `blocks` are the numbers of layers that stay together."""
    return ModelProfile(
        model=model,
        fingerprint=MADE_UP,
        layers=tuple(f"layer{k}" for k in range(len(of.layers))),
        measurements=(of,),
        blocks=tuple(Block(name=f"block{k}", layers=size) for k, size in enumerate(blocks)),
        assumptions=Assumptions(
            target="cpu", device="fake", precision="float32", optimizer="sgd", torch="2", threads=1
        ),
    )


def brief(of: Measurement) -> Measurement:
    """Return the same layers without tensors that outlive the layer's own backward."""

    def ending(cost: LayerCost) -> LayerCost:
        return replace(cost, saved=tuple(replace(tensor, lasting=False) for tensor in cost.saved))

    return replace(of, kinds=tuple(map(ending, of.kinds)), loss=ending(of.loss))


def block_sizes(rng: Random, layers: int, blocks: int) -> list[int]:
    """Split the layers into this number of blocks, each with at least one."""
    inner = sorted(rng.sample(range(1, layers), blocks - 1))
    return [stop - start for start, stop in pairwise((0, *inner, layers))]


def training(schedule: str = "1f1b", microbatches: int = 4, *, clip_norm: float | None = None) -> Training:
    """Return a training with microbatches of one sample."""
    return Training(
        batch_size=microbatches, microbatches=microbatches, schedule=schedule, clip_norm=clip_norm
    )


def devices(*budgets: int) -> Cluster:
    """Return emulated devices with these budgets."""
    return Cluster.emulated(*((1, budget) for budget in budgets))


# ------------------------------------------------------------------ the generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a chain: layer k turns a value of `widths[k]` bytes into one of `widths[k + 1]`.

    `saves_input` is the probability that a layer saves its input. With `keeps` it saves the same number of
    additional bytes, and its backward releases the input before the end. With `odd`, a layer has each unusual
    feature of real layers with that probability, with sizes below `size`, and `shared` parameters are spread
    over the chain.
    """

    widths: Sequence[int]
    weights: Sequence[int]
    states: Sequence[int]
    scratch: Sequence[int] = ()
    seconds: Sequence[float] = ()
    saves_input: float = 1.0
    keeps: bool = False
    odd: float = 0.0
    size: int = 20
    shared: int = 0


def chain(rng: Random, like: Settings) -> Measurement:
    """Draw layers and a loss, one after the other."""
    count = len(like.weights)
    early = (
        rng.choice((0.0, 0.5, 1.0)) if _odd(rng, like) else 0.0
    )  # the part of the state that exists before a step
    shared = (
        tuple(_shared_parameter(rng, k, count, like.size, early) for k in range(like.shared))
        if count > 1
        else ()
    )
    boundaries = [_values(rng, width, like, given=k == 0) for k, width in enumerate(like.widths)]
    layers = [
        _layer(rng, like, k, ends, early, [s for s in shared if k in s.users])
        for k, ends in enumerate(pairwise(boundaries))
    ]
    layers, loss = _knowing_unused(layers, _loss(rng, like, boundaries[-1]))
    return measurement(layers, loss, shared=shared, shared_buffers=_buffers(rng, layers))


def _knowing_unused(layers: Sequence[LayerCost], loss: LayerCost) -> tuple[list[LayerCost], LayerCost]:
    """Mark values without a gradient as unused, and drop the gradients that they would pass on."""
    found, outputs = list[LayerCost](), loss.outputs
    for cost in (loss, *reversed(layers)):
        none = GradientOrigin(kind="none")
        origins = [
            none if o.kind == "output" and not outputs[o.index].has_gradient else o
            for o in cost.input_gradients
        ]
        unused = [v.requires_grad and o.kind == "none" for v, o in zip(cost.inputs, origins, strict=True)]
        inputs = tuple(replace(v, unused=flag) for v, flag in zip(cost.inputs, unused, strict=True))
        found.append(replace(cost, inputs=inputs, outputs=outputs, input_gradients=tuple(origins)))
        outputs = inputs[: len(layers[-1].outputs)] if cost is loss else inputs
    return found[:0:-1], found[0]


def _odd(rng: Random, like: Settings) -> bool:
    return rng.random() < like.odd


def _values(rng: Random, width: int, like: Settings, *, given: bool) -> tuple[Value, ...]:
    """Draw the values at a boundary. A model's inputs, which are `given`, need no gradient if layers are
    odd.
    """
    if not like.odd:
        return (value(width),)
    sizes = [rng.randrange(like.size), like.size // 2, width]  # the second often, so that values can pass by
    count = rng.randrange(1, 4) if _odd(rng, like) else 1
    return tuple(
        value(rng.choice(sizes), requires_grad=not given and rng.random() < 0.75) for _ in range(count)
    )


def _shared_parameter(rng: Random, number: int, count: int, size: int, early: float) -> SharedParameter:
    """Draw a parameter of two or three layers, sometimes frozen."""
    nbytes, trainable = rng.randrange(1, size), rng.random() < 0.75
    state = rng.randrange(size) if trainable else 0
    users = tuple(sorted(rng.sample(range(count), rng.randrange(2, min(count, 3) + 1))))
    copying = users[nbytes % 2 :] if trainable and nbytes % 3 else ()
    cast_only = copying[: len(copying) - nbytes // 2 % 2] if nbytes > 1 and nbytes % 5 else ()
    return SharedParameter(
        name=f"shared{number}",
        users=users,
        copying=copying,
        cast_only=cast_only,
        copy_bytes=nbytes // 2 if copying else 0,
        nbytes=nbytes,
        gradient_bytes=nbytes if trainable else 0,
        state_bytes=state,
        early_state_bytes=int(state * early),
    )


def _buffers(rng: Random, layers: Sequence[LayerCost]) -> tuple[SharedBuffer, ...]:
    """Draw a buffer shared by layers that have any, at most as large as the smallest of theirs; the same for
    plain attributes.
    """
    found = []
    for name, sizes in (
        ("mask", [cost.buffer_bytes for cost in layers]),
        ("table", [cost.constant_bytes for cost in layers]),
    ):
        users = tuple(number for number, nbytes in enumerate(sizes) if nbytes and rng.random() < 0.8)
        if len(users) > 1:
            nbytes = rng.randrange(min(sizes[user] for user in users) + 1)
            found.append(SharedBuffer(name=name, users=users, nbytes=nbytes, copied=name == "mask"))
    return tuple(found)


def _layer(
    rng: Random,
    like: Settings,
    number: int,
    ends: tuple[tuple[Value, ...], tuple[Value, ...]],
    early: float,
    shared: Sequence[SharedParameter],
) -> LayerCost:
    inputs, outputs = ends
    weight, state = like.weights[number], like.states[number]
    if like.odd:
        found = _odd_layer(rng, like, inputs, outputs, weight, state, early, shared, like.seconds[number])
        return copied(
            found, [(s.name, s.copy_bytes, number in s.cast_only) for s in shared if number in s.copying]
        )
    if like.keeps:
        return _keeping_layer(inputs, outputs, weight, state)
    return layer(
        inputs,
        outputs,
        saved=(INPUT,) if rng.random() < like.saves_input else (),
        parameter_bytes=weight,
        scratch_bytes=like.scratch[number],
        state_bytes=state,
        seconds=like.seconds[number],
    )


def _keeping_layer(
    inputs: tuple[Value, ...], outputs: tuple[Value, ...], weight: int, state: int
) -> LayerCost:
    """Build a layer that saves its input and the same number of additional bytes; its passes need the same
    again, its update the gradient.
    """
    inward, outward = inputs[0].nbytes, outputs[0].nbytes
    spans = (2 * inward + outward, ()), (2 * inward, (0,))
    return layer(
        inputs,
        outputs,
        storages=(outward, inward),
        saved=(INPUT, Origin(kind="own", index=1)),
        parameter_bytes=weight,
        scratch_bytes=inward,
        first=tuple(Span(peak_bytes=peak + weight, released=released) for peak, released in spans),
        later=tuple(Span(peak_bytes=peak, released=released) for peak, released in spans),
        state_bytes=state,
        update=(weight, weight),
        works=(work(flops=2 * weight, moved_bytes=weight),) * 3,
    )


def _loss(rng: Random, like: Settings, outputs: tuple[Value, ...]) -> LayerCost:
    if like.keeps:
        return _keeping_layer(outputs, (value(4),), 0, 0)
    if not like.odd:
        return layer((*outputs, value(1, requires_grad=False)), (value(4),))
    targets = tuple(value(rng.randrange(like.size), requires_grad=False) for _ in range(rng.randrange(3)))
    return _odd_layer(rng, like, (*outputs, *targets), (value(4),), 0, 0, 0.0, (), rng.random())


def _odd_layer(
    rng: Random,
    like: Settings,
    inputs: tuple[Value, ...],
    outputs: tuple[Value, ...],
    weight: int,
    state: int,
    early: float,
    shared: Sequence[SharedParameter],
    seconds: float,
) -> LayerCost:
    """Draw a layer with any unusual feature of real layers."""
    size = like.size
    storages = tuple(rng.randrange(size) for _ in range(rng.randrange(4)))
    candidates = [Origin(kind="own", index=k) for k in range(len(storages))]
    candidates += [Origin(kind="input", index=k) for k in range(len(inputs))]
    elsewhere = [Origin(kind="parameter"), Origin(kind="constant")]
    origins = tuple(rng.choice(candidates + elsewhere * _odd(rng, like)) for _ in outputs)
    saved = [o for o in candidates + elsewhere if rng.random() < 0.5]
    saved += (
        rng.choices(saved, k=rng.randrange(3)) if saved and _odd(rng, like) else []
    )  # another view of the same
    parameters = _parameters(rng, like, weight, shared)
    learned = sum(p.nbytes for p in parameters if p.trainable)
    own_state = state if learned else 0
    made = tuple(rng.randrange(size) for _ in range(rng.randrange(1, 3)))
    gradients = tuple(_odd_gradient(rng, like, v, outputs, made) for v in inputs)
    lasting = [k for k in range(len(saved)) if rng.random() < 0.3] if _odd(rng, like) else []
    remaining = {saved[k] for k in lasting}
    releasable = sorted({o.index for o in saved if o.kind == "input" and o not in remaining})
    returned = {o.index for o in origins if o.kind == "own"}
    buffers = rng.randrange(size) * _odd(rng, like) * bool(weight or parameters)
    cost = layer(
        inputs,
        outputs,
        origins=origins,
        storages=storages,
        saved=tuple(saved),
        lasting=lasting,
        parameters=parameters,
        buffer_bytes=buffers,
        fed_back_bytes=rng.randint(0, buffers) * _odd(rng, like),
        constant_bytes=rng.randrange(size) * _odd(rng, like),
        scratch_bytes=rng.choice((0, rng.randrange(size))),
        checkpoint_peak_bytes=sum(storages[k] for k in returned) + rng.choice((0, rng.randrange(2 * size))),
        mutates_inputs=_odd(rng, like),
        first=_spans(rng, releasable, sum(made) + learned, size),
        later=_spans(rng, releasable, sum(made) + learned, size),
        input_gradients=gradients,
        gradient_storages=made,
        state_bytes=own_state + sum(s.state_bytes for s in shared),
        early_state_bytes=int(own_state * early) + sum(s.early_state_bytes for s in shared),
        update=_update(rng, size) if learned else (0, 0),
        seconds=seconds,
    )
    if _odd(rng, like):  # gradients that are not dense arrive from the next layer
        inner = [_spans(rng, releasable, sum(made) + learned, size) for _ in range(2)]
        cost = replace(cost, inner_first=inner[0], inner_later=inner[1])
    return _with_workspaces(rng, cost) if _odd(rng, like) else cost


def _with_workspaces(rng: Random, cost: LayerCost) -> LayerCost:
    """Split each peak between tensors and one kernel's workspace: none, some, or all of it."""

    def part(peak: int) -> int:
        return rng.choice((0, rng.randrange(peak + 1), peak))

    def parts(spans: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple(replace(span, workspace_bytes=part(span.peak_bytes)) for span in spans)

    return replace(
        cost,
        forward_workspace_bytes=part(cost.forward_peak_bytes),
        checkpoint_workspace_bytes=part(cost.checkpoint_peak_bytes),
        backward_first=parts(cost.backward_first),
        backward_later=parts(cost.backward_later),
        inner_first=parts(cost.inner_first),
        inner_later=parts(cost.inner_later),
        update_first_workspace_bytes=part(cost.update_first_peak_bytes),
        update_workspace_bytes=part(cost.update_peak_bytes),
    )


def _update(rng: Random, size: int) -> tuple[int, int]:
    """Draw the bytes of a first update and a later one in addition to the state: sometimes more than a
    backward.
    """
    first, later = (rng.randrange(size) * rng.choice((1, 1, 1, 20)) for _ in range(2))
    return first, later


def _parameters(
    rng: Random, like: Settings, weight: int, shared: Sequence[SharedParameter]
) -> tuple[Parameter, ...]:
    """Draw a weight, or none, sometimes frozen or next to a frozen one; and parameters shared with other
    layers.
    """
    own = [parameter("weight", weight, trainable=not _odd(rng, like))] if weight else []
    own += (
        [parameter("frozen", rng.randrange(like.size), trainable=False)] if weight and _odd(rng, like) else []
    )
    return (*own, *(parameter(s.name, s.nbytes, trainable=s.gradient_bytes > 0) for s in shared))


def copied(cost: LayerCost, shared: Sequence[tuple[str, int, bool]] = ()) -> LayerCost:
    """Return the layer with half-precision copies of some of its trained weights, and of the `shared` ones
    that it computes with in half precision: with their bytes, and whether it reads only the copy.
    """
    own = [p for p in cost.parameters if p.name in ("weight", "w") and p.trainable and p.nbytes % 3]
    copies = {p.name: (p.nbytes // 2, p.nbytes % 4 > 1) for p in own}
    copies |= {name: (nbytes, cast_only) for name, nbytes, cast_only in shared}
    none = 0, False
    every = [(p, *copies.get(p.name, none)) for p in cost.parameters]
    made = (replace(p, copy_bytes=nbytes, cast_only=nbytes > 0 and alone) for p, nbytes, alone in every)
    return replace(cost, parameters=tuple(made))


def _odd_gradient(
    rng: Random, like: Settings, given: Value, outputs: tuple[Value, ...], made: Sequence[int]
) -> GradientOrigin:
    """Draw the gradient of an input: a new storage or a part of one, a part of an output's gradient, or none
    for an unused input. A gradient larger than its storage repeats one number and is not contiguous.
    """
    larger = [k for k, v in enumerate(outputs) if v.requires_grad and v.nbytes >= given.nbytes]
    contiguous = rng.random() < 0.75
    if not given.requires_grad or rng.random() < 0.4 * like.odd:
        return GradientOrigin(kind="none")
    if larger and rng.random() < like.odd:
        return GradientOrigin(kind="output", index=rng.choice(larger), contiguous=contiguous)
    index = rng.randrange(len(made))
    return GradientOrigin(kind="own", index=index, contiguous=contiguous and made[index] >= given.nbytes)


def _spans(rng: Random, releasable: Sequence[int], leaving: int, size: int) -> tuple[Span, ...]:
    """Draw a backward's rising peaks and the storages released before each: none before the first, and the
    last peak is above the final level.
    """
    order = rng.sample(releasable, len(releasable))
    steps = [0, *sorted(rng.sample(range(1, len(order) + 1), rng.randrange(len(order) + 1)))]
    peaks = sorted(rng.randrange(4 * size) for _ in steps)
    peaks[-1] = max(leaving, *peaks) + rng.randrange(size)
    return tuple(Span(peak_bytes=p, released=tuple(order[:k])) for p, k in zip(peaks, steps, strict=True))


# ------------------------------------------------------------------ chains by name


def hostile(rng: Random, count: int, *, size: int = 20, shared: int | None = None) -> Measurement:
    """Draw `count` layers with any feature of a layer; up to two shared parameters unless given; shared
    buffers.
    """
    return chain(
        rng,
        Settings(
            widths=[rng.randrange(size) for _ in range(count + 1)],
            weights=[rng.choice((0, rng.randrange(size))) for _ in range(count)],
            states=[rng.randrange(size) for _ in range(count)],
            scratch=[0] * count,
            seconds=[rng.random() for _ in range(count)],
            odd=0.5,
            size=size,
            shared=rng.choice((0, 0, 1, 2)) if shared is None else shared,
        ),
    )


def plain(rng: Random, count: int, *, size: int = 4) -> Measurement:
    """Draw `count` layers of one value each."""
    return chain(
        rng,
        Settings(
            widths=[rng.randrange(1, size + 1) for _ in range(count + 1)],
            weights=[rng.choice((0, 1, rng.randrange(size * 4))) for _ in range(count)],
            states=[rng.choice((0, 1)) for _ in range(count)],
            scratch=[rng.randrange(size) for _ in range(count)],
            seconds=[float(rng.randrange(1, 4)) for _ in range(count)],
            saves_input=0.7,
        ),
    )


def even(rng: Random, count: int) -> Measurement:
    """Draw `count` layers with evenly drawn activations and weights."""
    return keeping(
        rng,
        widths=[rng.randrange(1 << 16, 1 << 20) for _ in range(count + 1)],
        weights=[rng.randrange(1 << 24) for _ in range(count)],
    )


def skewed(rng: Random, count: int, *, heaviest: float = 8, spread: float = 2) -> Measurement:
    """Draw `count` layers whose activations and weights differ by orders of magnitude."""
    return keeping(
        rng,
        widths=[round(rng.lognormvariate(14, spread)) for _ in range(count + 1)],
        weights=[round(rng.lognormvariate(heaviest, spread)) for _ in range(count)],
    )


def heavy(count: int, *, times: int = 100) -> Measurement:
    """Build `count` equal layers, except one that weighs a given multiple."""
    weights = [1 << 23] * count
    weights[count // 3] *= times
    return keeping(Random(0), widths=[1 << 19] * (count + 1), weights=weights)


def keeping(rng: Random, *, widths: Sequence[int], weights: Sequence[int]) -> Measurement:
    """Build layers that save as many additional bytes as their input has; optimizer state is twice the
    weights.
    """
    return chain(rng, Settings(widths=widths, weights=weights, states=[2 * w for w in weights], keeps=True))


def alike(count: int, *, size: int = 8) -> Measurement:
    """Build `count` equal layers."""
    none, once = [0] * count, [1.0] * count
    like = Settings(
        widths=[size] * (count + 1), weights=[3 * size] * count, states=none, scratch=none, seconds=once
    )
    return chain(Random(0), like)


def vgg_like(count: int = 30) -> Measurement:
    """Build layers with activations early, most parameters in one late layer, the others cheap."""
    weights = [9000 if k == count - 7 else 20 * k * (k % 3 == 0) for k in range(count)]
    return chain(
        Random(0),
        Settings(
            widths=[max(1, 400 // (1 + k // 3)) for k in range(count + 1)],
            weights=weights,
            states=weights,
            scratch=[3 * (k % 4) for k in range(count)],
            seconds=[1.0 + k % 5 for k in range(count)],
        ),
    )


# ------------------------------------------------------------------ plans


WHOLE_STAGES: tuple[Recompute, ...] = (
    "never",
    "stages",
    "except_last",
    "except_one",
)  # whole stages, or nothing


def small_first(seed: int, *, largest: int) -> int:
    """Return the number of layers of a seed's model: few for small seeds, up to `largest` for seeds of 100
    and more.
    """
    return 1 + Random(seed).randrange(min(largest, 2 + seed * largest // 100))


def any_training(rng: Random) -> Training:
    """Draw any schedule, one to eight microbatches, clipped or not."""
    return training(rng.choice(sorted(SCHEDULES)), rng.randrange(1, 9), clip_norm=rng.choice((None, 1.0)))


def any_plan(
    rng: Random,
    of: Measurement,
    how: Training,
    *,
    stages: int | None = None,
    recompute: Recompute | None = None,
) -> Plan:
    """Draw any split of the layers over up to four devices, in any order, some of them unused, with any
    recomputation of whole stages unless given.
    """
    layers = len(of.layers)
    stages = stages or rng.randrange(1, min(4, layers) + 1)
    edges = (0, *sorted(rng.sample(range(1, layers), stages - 1)), layers)
    order = rng.sample(range(stages + 1), stages)
    return plan_of(of, how, edges, order=order, recompute=recompute or rng.choice(RECOMPUTE))


def plan_of(
    of: Measurement,
    how: Training,
    edges: Sequence[int],
    *,
    order: Sequence[int] | None = None,
    recompute: Recompute = "never",
) -> Plan:
    """Build a plan: stage s holds layers `edges[s]` to `edges[s + 1] - 1`, on device s or `order[s]`."""
    order = range(len(edges) - 1) if order is None else order
    stages = tuple(
        Stage(start=a, stop=b, grid=Grid.of(d)) for (a, b), d in zip(pairwise(edges), order, strict=True)
    )
    return Plan(
        profile=profile(of),
        cluster=devices(*[AMPLE] * (max(order) + 1)),
        training=how,
        stages=stages,
        decisions=recompute_decisions(
            stages, range(len(of.layers) + 1), recompute, how.schedule, how.microbatches
        ),
    )


def any_runs(rng: Random, plan: Plan) -> tuple[Decision, ...]:
    """Recompute a run of layers in some stages for some microbatches, early or just in time."""
    decisions = []
    for number, stage in enumerate(plan.stages):
        start, stop = sorted(rng.sample(range(stage.start, stage.stop + 1), 2))
        if rng.random() < 0.2:
            continue
        every = rng.randrange(1, 4)
        which = Microbatches(taken=rng.randrange(1, every + 1), every=every, first=rng.randrange(every))
        run = Run(start=start, stop=stop)
        ahead = rng.choice((0, 0, 1, 2))
        decisions.append(
            Decision(stage=number, subject=run, what=What.RECOMPUTE, microbatches=which, ahead=ahead)
        )
    return tuple(decisions)


def any_round(rng: Random, of: Measurement, how: Training) -> Plan:
    """Assign stages to two devices in turn, several on each; stages on one device share no parameter."""
    layers = len(of.layers)
    chunks = rng.randrange(1, layers // 2 + 1)
    edges = (0, *sorted(rng.sample(range(1, layers), 2 * chunks - 1)), layers)
    return plan_of(replace(of, shared=()), how, edges, order=[0, 1] * chunks, recompute=rng.choice(RECOMPUTE))
