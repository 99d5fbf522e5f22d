"""Chains made up for planner tests: hostile ones for exactness, plain ones full of ties, one in the shape of VGG."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from pipefit.cluster import Cluster
from pipefit.fingerprints import Fingerprint
from pipefit.profiles import (
    Assumptions,
    GradientOrigin,
    LayerCost,
    Measurement,
    ModelProfile,
    Origin,
    Parameter,
    SavedTensor,
    Span,
    Value,
    Work,
)
from pipefit.training import Training

INPUT = Origin(kind="input", index=0)
MADE_UP = Fingerprint(
    layers=(), parameters=(), shared=(), inputs=(), targets=(), loss="", precision="float32", optimizer="SGD",
    options=(), groups="",
)  # fmt: skip


def value(nbytes: int, *, grad: bool = True) -> Value:
    """A flat tensor of `nbytes`."""
    return Value(shape=(nbytes,), dtype="uint8", nbytes=nbytes, requires_grad=grad)


def layer(
    inputs: tuple[Value, ...],
    outputs: tuple[Value, ...],
    *,
    origins: tuple[Origin, ...] | None = None,
    storages: tuple[int, ...] | None = None,
    saved: tuple[Origin, ...] = (INPUT,),
    parameter_bytes: int = 0,
    scratch_bytes: int = 0,
    first: tuple[Span, ...] | None = None,
    later: tuple[Span, ...] | None = None,
    input_gradient_bytes: int | None = None,
    state_bytes: int = 0,
    update: tuple[int, int] = (0, 0),
    seconds: float = 1.0,
) -> LayerCost:
    """A layer that allocates its outputs and saves its input; what is not given follows from the rest."""
    storages = tuple(v.nbytes for v in outputs) if storages is None else storages
    leaving = sum(v.nbytes for v in inputs if v.requires_grad)
    entering = leaving + parameter_bytes + scratch_bytes
    work = Work(flops=0, moved_bytes=0, seconds=seconds)
    weight = Parameter(name="w", shape=(parameter_bytes,), dtype="uint8", nbytes=parameter_bytes, trainable=True)
    return LayerCost(
        module="Synthetic",
        parameters=(weight,),
        buffer_bytes=0,
        inputs=inputs,
        outputs=outputs,
        output_origins=origins or tuple(Origin(kind="own", index=k) for k in range(len(outputs))),
        storages=storages,
        saved=tuple(SavedTensor(index=k, nbytes=0, dtype="uint8", origin=o) for k, o in enumerate(saved)),
        forward_peak_bytes=sum(storages) + scratch_bytes,
        checkpoint_peak_bytes=sum(storages),
        mutates_inputs=False,
        backward_first=first or (Span(peak_bytes=entering),),
        backward_later=later or (Span(peak_bytes=entering),),
        gradient_bytes=parameter_bytes,
        input_gradients=tuple(GradientOrigin(kind="own" if v.requires_grad else "none") for v in inputs),
        gradient_storages=(leaving if input_gradient_bytes is None else input_gradient_bytes,),
        state_bytes=state_bytes,
        early_state_bytes=0,
        update_first_peak_bytes=state_bytes + update[0],
        update_peak_bytes=update[1],
        forward=work,
        backward=work,
        update=work,
    )


def measurement(layers: list[LayerCost], loss: LayerCost) -> Measurement:
    """One measurement at microbatch size 1."""
    return Measurement(microbatch_size=1, kinds=(*layers,), layers=(*range(len(layers)),), loss=loss)


def profile(of: Measurement) -> ModelProfile:
    """A profile that holds one measurement."""
    return ModelProfile(
        model="synthetic",
        fingerprint=MADE_UP,
        layers=tuple(f"layer{k}" for k in range(len(of.layers))),
        measurements=(of,),
        assumptions=Assumptions(
            target="cpu", device="fake", precision="float32", optimizer="sgd", torch="2", threads=1
        ),
    )


def training(schedule: str = "1f1b", microbatches: int = 4) -> Training:
    """Microbatches of one sample."""
    return Training(batch_size=microbatches, microbatches=microbatches, schedule=schedule)


def devices(*budgets: int) -> Cluster:
    """Emulated devices with these budgets."""
    return Cluster.emulated(*((1, budget) for budget in budgets))


# ------------------------------------------------------------------ hostile: any aliasing that the data model allows


def hostile(rng: Random, count: int, *, size: int = 20) -> Measurement:
    """`count` layers with every mix of aliases, pass-through values, saved tensors and released inputs, and a loss."""
    values = _values(rng, size)
    layers = []
    for _ in range(count):
        outputs = _values(rng, size)
        layers.append(_hostile_layer(rng, values, outputs, size))
        values = outputs
    targets = tuple(value(rng.randrange(size), grad=False) for _ in range(rng.randrange(1, 3)))
    return measurement(layers, _hostile_layer(rng, values + targets, (value(4),), size))


def _values(rng: Random, size: int) -> tuple[Value, ...]:
    sizes = [rng.randrange(size), size // 2]  # the latter often, so that values can pass by
    return tuple(value(rng.choice(sizes), grad=rng.random() < 0.7) for _ in range(rng.randrange(1, 4)))


def _hostile_layer(rng: Random, inputs: tuple[Value, ...], outputs: tuple[Value, ...], size: int) -> LayerCost:
    storages = tuple(rng.randrange(size) for _ in range(rng.randrange(4)))
    candidates = [Origin(kind="own", index=k) for k in range(len(storages))]
    candidates += [Origin(kind="input", index=k) for k in range(len(inputs))]
    elsewhere = [Origin(kind="parameter"), Origin(kind="constant")]
    parameter_bytes = rng.choice((0, rng.randrange(size)))
    entering = sum(v.nbytes for v in inputs if v.requires_grad) + parameter_bytes
    made = layer(
        inputs,
        outputs,
        storages=storages,
        origins=tuple(rng.choice(candidates + elsewhere) for _ in outputs),
        saved=tuple(origin for origin in candidates + elsewhere[:1] if rng.random() < 0.5),
        parameter_bytes=parameter_bytes,
        scratch_bytes=rng.choice((0, rng.randrange(size))),
        first=_spans(rng, len(inputs), entering, size),
        later=_spans(rng, len(inputs), entering, size),
        input_gradient_bytes=rng.randrange(entering - parameter_bytes + 1),
        state_bytes=rng.randrange(size),
        update=(rng.randrange(size), rng.randrange(size)),
        seconds=rng.random(),
    )
    gradients = tuple(_hostile_gradient(rng, v, outputs) for v in inputs)
    return replace(made, input_gradients=gradients)


def _hostile_gradient(rng: Random, given: Value, outputs: tuple[Value, ...]) -> GradientOrigin:
    """Of an input: the layer's own, that of an output as large, or none, as the layer does not use the input."""
    alike = [k for k, v in enumerate(outputs) if v.requires_grad and v.nbytes == given.nbytes]
    if not given.requires_grad or rng.random() < 0.2:
        return GradientOrigin(kind="none")
    if alike and rng.random() < 0.5:
        return GradientOrigin(kind="output", index=rng.choice(alike))
    return GradientOrigin(kind="own")


def _spans(rng: Random, inputs: int, entering: int, size: int) -> tuple[Span, ...]:
    spans, released = [Span(peak_bytes=rng.randrange(size))], ()
    for _ in range(rng.randrange(4)):
        released = tuple(sorted({*released, *(k for k in range(inputs) if rng.random() < 0.4)}))
        spans.append(Span(peak_bytes=rng.randrange(4 * size), released=released))
    return (*spans, Span(peak_bytes=entering + rng.randrange(size), released=released))


# ------------------------------------------------------------------ plain: small integers, so that ties abound


def plain(rng: Random, count: int, *, size: int = 4) -> Measurement:
    """`count` layers of one value each."""
    widths = [rng.randrange(1, size + 1) for _ in range(count + 1)]
    layers = [_plain_layer(rng, value(widths[k]), value(widths[k + 1]), size) for k in range(count)]
    return measurement(layers, _loss(widths[-1]))


def _plain_layer(rng: Random, inward: Value, outward: Value, size: int) -> LayerCost:
    return layer(
        (inward,),
        (outward,),
        saved=(INPUT,) if rng.random() < 0.7 else (),
        parameter_bytes=rng.choice((0, 1, rng.randrange(size * 4))),
        state_bytes=rng.choice((0, 1)),
        scratch_bytes=rng.randrange(size),
        seconds=float(rng.randrange(1, 4)),
    )


def skewed(rng: Random, count: int) -> Measurement:
    """`count` layers whose activations and weights differ by orders of magnitude."""
    widths = [round(rng.lognormvariate(14, 2)) for _ in range(count + 1)]
    weights = [round(rng.lognormvariate(8, 2)) for _ in range(count)]
    saved = (INPUT, Origin(kind="own", index=1))
    layers = [
        layer((value(a),), (value(b),), storages=(b, a), saved=saved, parameter_bytes=weight)
        for a, b, weight in zip(widths, widths[1:], weights, strict=False)
    ]
    return measurement(layers, _loss(widths[-1]))


def alike(count: int, *, size: int = 8) -> Measurement:
    """`count` layers that are all the same."""
    return measurement([layer((value(size),), (value(size),), parameter_bytes=3 * size)] * count, _loss(size))


def vgg_like(count: int = 30) -> Measurement:
    """Activations early, most parameters in one late layer, the others cheap."""
    widths = [max(1, 400 // (1 + k // 3)) for k in range(count + 1)]
    weights = [9000 if k == count - 7 else 20 * k * (k % 3 == 0) for k in range(count)]
    layers = [
        layer(
            (value(widths[k], grad=k > 0),),
            (value(widths[k + 1]),),
            parameter_bytes=weights[k],
            state_bytes=weights[k],
            scratch_bytes=3 * (k % 4),
            seconds=1.0 + k % 5,
        )
        for k in range(count)
    ]
    return measurement(layers, _loss(widths[-1]))


def _loss(inward: int) -> LayerCost:
    return layer((value(inward), value(1, grad=False)), (value(4),))
