"""A profile as text: what every layer costs, and what its forward keeps for its backward."""

from __future__ import annotations

from collections import defaultdict

from pipefit.additive_costs import AdditiveCosts
from pipefit.fingerprints import samples
from pipefit.kernels import KernelMemory
from pipefit.profiles import LayerCost, Measurement, ModelProfile, SavedTensor
from pipefit.tables import Block, Table
from pipefit.units import format_bytes, format_seconds
from pipefit.work import Work


def describe_profile(profile: ModelProfile) -> list[Block]:
    """The model, what the profile assumes, and two tables for every measured microbatch size."""
    taken = profile.assumptions
    head = (
        f"{profile.model}: {len(profile.layers)} layers, fingerprint {profile.fingerprint.digest}\n"
        f"{taken.precision} and {taken.optimizer}, kernels of {taken.target}, profiled on {taken.device} "
        f"with torch {taken.torch} and {taken.threads} thread{'s' * (taken.threads > 1)}"
    )
    if taken.cpu:
        head += f"\nkernels measured on {taken.cpu} with {taken.capability}"
    blocks: list[Block] = [head]
    for measurement in profile.measurements:
        blocks += [_layers(profile, measurement), _saved(profile, measurement)]
    if profile.kernels.unknown:
        blocks.append(_unknown(profile.kernels))
    if profile.additive is not None:
        blocks.append(_additive(profile, profile.additive))
    return blocks


def _unknown(memory: KernelMemory) -> Table:
    """Operations that could not be measured: where one of them runs, the peak is without its kernel's workspace."""
    rows = tuple((kernel.operation, kernel.reason) for kernel in memory.unknown)
    return Table(("operation", "why"), rows, title="not measured: peaks are without what these kernels take inside")


def _additive(profile: ModelProfile, costs: AdditiveCosts) -> Table:
    """The two numbers that training runs measured for every layer."""
    named = enumerate(zip(profile.layers, costs.mem_isolated, costs.mem_added, strict=True))
    rows = [(str(number), name, format_bytes(isolated), _signed(added)) for number, (name, isolated, added) in named]
    return Table(
        ("layer", "name", "alone", "added"),
        tuple(rows),
        title=f"peaks of training runs: {', '.join(costs.training.phrases)}, recompute {costs.recompute}",
    )


def _signed(nbytes: int) -> str:
    return f"-{format_bytes(-nbytes)}" if nbytes < 0 else format_bytes(nbytes)


def _layers(profile: ModelProfile, measurement: Measurement) -> Table:
    named = enumerate(zip(profile.layers, measurement.costs, strict=True))
    rows = [_layer_row(str(number), name, cost) for number, (name, cost) in named]
    rows.append(_layer_row("", "(loss)", measurement.loss))
    size = samples(measurement.microbatch_size, profile.fingerprint.lengths)
    columns = ("layer", "name", "module", "parameters", "state", "saved", "output", "peak", "forward", "backward")
    return Table(columns, tuple(rows), title=f"a microbatch of {size}")


def _layer_row(number: str, name: str, cost: LayerCost) -> tuple[str, ...]:
    sizes = (
        cost.static_bytes,
        cost.state_bytes,
        cost.saved_bytes,
        sum(value.nbytes for value in cost.outputs),
        cost.forward_peak_bytes,
    )
    return number, name, cost.module, *map(format_bytes, sizes), _work(cost.forward), _work(cost.backward)


def _work(work: Work) -> str:
    """Seconds where they were measured, otherwise floating-point operations."""
    return f"{work.flops / 1e9:.3g} GFLOP" if work.seconds is None else format_seconds(work.seconds)


def _saved(profile: ModelProfile, measurement: Measurement) -> Table:
    """What each kind of layer saves, by operation, dtype and storage: masks and score matrices show here."""
    rows = []
    for number, cost in enumerate((*measurement.kinds, measurement.loss)):
        example = profile.layers[measurement.layers.index(number)] if number in measurement.layers else "(loss)"
        groups: dict[tuple[str, str, str], list[SavedTensor]] = defaultdict(list)
        for tensor in cost.saved:
            groups[tensor.operation or "-", tensor.dtype, tensor.origin.kind].append(tensor)
        rows += [(example, cost.module, *group, *_figures(tensors)) for group, tensors in groups.items()]
    columns = ("for example", "module", "operation", "dtype", "storage", "tensors", "together", "largest")
    return Table(columns, tuple(rows), title="saved for backward")


def _figures(tensors: list[SavedTensor]) -> tuple[str, str, str]:
    """How many, their bytes, and those of the largest. Tensors that share a storage of the layer's count once."""
    sizes: dict[object, int] = {}
    for tensor in tensors:
        key = tensor.origin if tensor.origin.kind in ("own", "input") else tensor.index
        sizes[key] = max(sizes.get(key, 0), tensor.nbytes)
    return str(len(tensors)), format_bytes(sum(sizes.values())), format_bytes(max(sizes.values()))
