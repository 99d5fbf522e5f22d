"""Made-up chains of layers for `bench_search.py`. Not a benchmark itself.

random   widths and weights drawn evenly
skewed   the same, by orders of magnitude: a layer may fit late in 1F1B alone, and a cut fall on a small tensor
alike    all layers the same, so that splits tie everywhere
heavy    one layer a hundred times as heavy: every other stage has room to spare, so little can be pruned
"""

from __future__ import annotations

from random import Random

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

MADE_UP = Fingerprint(
    layers=(), parameters=(), shared=(), inputs=(), targets=(), loss="", precision="float32", optimizer="SGD",
    options=(), groups="",
)  # fmt: skip


def made_up(chain: str, layers: int, seed: int) -> ModelProfile:
    """A chain and its loss: the last layer again without weights, which takes what they leave."""
    costs = make(chain, layers, seed)
    measured = Measurement(
        microbatch_size=1,
        kinds=tuple(costs),
        layers=tuple(range(layers)),
        loss=layer(costs[-1].outputs[0].nbytes, 4, 0),
    )
    taken = Assumptions(target="cuda", device="fake", precision="float32", optimizer="adam", torch="2", threads=1)
    return ModelProfile(
        model=chain,
        fingerprint=MADE_UP,
        layers=tuple(f"layer{k}" for k in range(layers)),
        measurements=(measured,),
        assumptions=taken,
    )


def make(chain: str, count: int, seed: int) -> list[LayerCost]:
    """Layers of one value each, which save their input and something of their own."""
    rng = Random(seed)
    match chain:
        case "random":
            widths = [rng.randrange(1 << 16, 1 << 20) for _ in range(count + 1)]
            weights = [rng.randrange(1 << 24) for _ in range(count)]
        case "skewed":
            widths = [round(rng.lognormvariate(14, 1.5)) for _ in range(count + 1)]
            weights = [round(rng.lognormvariate(14, 1.5)) for _ in range(count)]
        case _:
            widths, weights = [1 << 19] * (count + 1), [1 << 23] * count
    if chain == "heavy":
        weights[count // 3] *= 100
    return [layer(widths[k], widths[k + 1], weights[k]) for k in range(count)]


def layer(inward: int, outward: int, weight: int) -> LayerCost:
    """One layer: gradients as large as the weights, optimizer state twice that."""
    work = Work(flops=2 * weight, moved_bytes=weight, seconds=None)
    later = (Span(peak_bytes=2 * inward + outward), Span(peak_bytes=2 * inward, released=(0,)))
    return LayerCost(
        module="Synthetic",
        parameters=(Parameter(name="weight", shape=(weight,), dtype="uint8", nbytes=weight, trainable=True),),
        buffer_bytes=0,
        inputs=(value(inward),),
        outputs=(value(outward),),
        output_origins=(Origin(kind="own", index=0),),
        storages=(outward, inward),
        saved=(saved(0, inward, "input", 0), saved(1, inward, "own", 1)),
        checkpoint_peak_bytes=0,
        mutates_inputs=False,
        early_state_bytes=0,
        forward_peak_bytes=outward + 2 * inward,
        backward_first=tuple(Span(peak_bytes=s.peak_bytes + weight, released=s.released) for s in later),
        backward_later=later,
        gradient_bytes=weight,
        input_gradients=(GradientOrigin(kind="own"),),
        gradient_storages=(inward,),
        state_bytes=2 * weight,
        update_first_peak_bytes=3 * weight,
        update_peak_bytes=weight,
        forward=work,
        backward=work,
        update=work,
    )


def value(nbytes: int) -> Value:
    """A boundary tensor."""
    return Value(shape=(nbytes,), dtype="uint8", nbytes=nbytes, requires_grad=True)


def saved(number: int, nbytes: int, kind: str, index: int) -> SavedTensor:
    """A saved tensor of a storage."""
    return SavedTensor(index=number, nbytes=nbytes, dtype="uint8", origin=Origin(kind=kind, index=index))
