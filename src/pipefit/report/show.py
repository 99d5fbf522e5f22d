"""Any document as blocks of text: one function for each kind, chosen by type.

A post-mortem has the contents of the memory when it ran out, and plans that would fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from pipefit import tables
from pipefit.errors import UsageError
from pipefit.planner import Ranges, Remedy, remedies
from pipefit.report.difference import PlanDifference, describe_difference
from pipefit.report.fit import describe_fit, describe_overview
from pipefit.report.plan import describe_plan
from pipefit.report.traces import Comparison, describe_comparison, describe_trace
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Member, MemberKind
from pipefit.schema.fit import Fit, Overview
from pipefit.schema.layer_costs import KernelMemory, LayerCost, SavedTensor, Work
from pipefit.schema.plan import LoopPlan, Plan, fullness, is_tight
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.profile import AdditiveCosts, Measurement, ModelProfile, samples
from pipefit.schema.program import Program, UncheckedProgram
from pipefit.schema.trace import Trace
from pipefit.simulator import Contents, LayerContents, contents_at, simulate
from pipefit.tables import Block, Table
from pipefit.texts import counted, kind_of, numbered, shortened
from pipefit.units import format_bytes, format_flops, format_seconds

# ---- Plans that would have fitted, with their costs

_PRICES = (
    "Each plan has been simulated for the same batch. The price is the additional step time over the plan "
    "that ran out of memory."
)


def describe_remedies(post_mortem: PostMortem) -> list[Block]:
    """Return a row for each remedy with its price: the additional seconds of a step."""
    own = simulate(post_mortem.plan).step_seconds[-1]
    rows = tuple(_row(remedy, own) for remedy in remedies(post_mortem))
    if not rows:
        return [
            "No plan that was tried would have fitted: with recomputation, offloading or 8 times the devices."
        ]
    columns = ("what would fit", "fullest device", "full", "step", "price", "options of pipefit plan")
    training = post_mortem.plan.training
    each = (
        f"--batch-size {training.batch_size} --microbatches {training.microbatches} --schedule "
        f"{training.schedule}"
    )
    return [Table(columns, rows), f"{_PRICES} Add {each}, unless the row says otherwise."]


def _row(remedy: Remedy, own: float) -> tuple[str, ...]:
    cluster, seconds = remedy.plan.cluster, remedy.prediction.step_seconds
    peaks, budgets = remedy.prediction.peak_bytes, cluster.budgets
    share, peak, device = max((peak / budgets[number], peak, number) for number, peak in enumerate(peaks))
    full = fullness(share, tight=is_tight(cluster, device, peak))
    price = f"{100 * (seconds / own - 1):+z.1f} %" if own else "-"
    return remedy.what, format_bytes(peak), full, format_seconds(seconds), price, remedy.asked_by


# ---- The report

_MOST_LAYERS = 12  # layers that are listed individually


def describe_post_mortem(post_mortem: PostMortem) -> list[Block]:
    """Describe a post-mortem: the failed request, the contents of the memory, layer by layer, and
    remedies.
    """
    return [post_mortem.head, categories(post_mortem), *layers(post_mortem), *describe_remedies(post_mortem)]


def categories(post_mortem: PostMortem) -> Table:
    """Return the memory by category, including the failed request."""
    total = post_mortem.moment.total_bytes or 1
    held = sorted(post_mortem.moment.by_category.items(), key=lambda item: -item[1])
    rows = tuple((name.value, format_bytes(nbytes), f"{100 * nbytes / total:.1f} %") for name, nbytes in held)
    title = "with the failed request" if post_mortem.asked_bytes else "at the peak of the action"
    return Table(("used for", "bytes", "share"), rows, title=title)


def layers(post_mortem: PostMortem) -> list[Block]:
    """Return the layers with the most bytes at the start of the action.

    Returns an empty list if the action is not of a training step.
    """
    contents = contents_at(post_mortem.plan, post_mortem.device, post_mortem.moment)
    if contents is None:
        return []
    title = f"layers, by the plan's prediction, as {post_mortem.moment.action} began"
    return [
        filled(post_mortem.plan, contents, title),
        *([largest(post_mortem.plan, contents)] if contents.tensors else []),
    ]


def filled(plan: Plan, contents: Contents, title: str = "") -> Table:
    """Return a row for each of the fullest layers, one for all others, and one for the rest of the peak."""
    ordered = sorted(contents.layers, key=lambda row: -row.total_bytes)
    rows = [_layer(plan, row) for row in ordered[:_MOST_LAYERS]]
    rest = ordered[_MOST_LAYERS:]
    if rest:
        rows.append(
            (
                counted(len(rest), "other"),
                *map(format_bytes, map(sum, zip(*map(_sizes, rest), strict=True))),
                "",
            )
        )
    left = contents.peak.total_bytes - sum(row.total_bytes for row in contents.layers)
    rows.append(
        (f"added by {contents.peak.action}, and buffers", format_bytes(max(0, left)), "", "", "", "", "", "")
    )
    state = "parameters", "half-precision copies", "gradients", "optimizer state"
    columns = ("layer", "in all", *state, "activations", "microbatches")
    table = Table(columns, tuple(rows), title=title)
    copies = any(row.copy_bytes for row in contents.layers)
    return table if copies else table.part([place for place, name in enumerate(columns) if name != state[1]])


def largest(plan: Plan, contents: Contents) -> Table:
    """Return a row for each of the largest activations, and one for all others."""
    ordered = sorted(contents.tensors, key=lambda tensor: -tensor.nbytes * tensor.microbatches)
    rows = [
        (_named(plan, one.layer), one.operation or "passed on", " x ".join(map(str, one.shape)) or "-",
         format_bytes(one.nbytes), str(one.microbatches), format_bytes(one.nbytes * one.microbatches))
        for one in ordered[:_MOST_LAYERS]
    ]  # fmt: skip
    if rest := ordered[_MOST_LAYERS:]:
        rows.append(
            (
                counted(len(rest), "other"),
                "",
                "",
                "",
                "",
                format_bytes(sum(o.nbytes * o.microbatches for o in rest)),
            )
        )
    columns = ("layer", "kept by", "shape", "bytes", "microbatches", "in all")
    return Table(columns, tuple(rows), title="the largest activations")


def _layer(plan: Plan, row: LayerContents) -> tuple[str, ...]:
    return (_named(plan, row.layer), *map(format_bytes, _sizes(row)), str(row.microbatches or ""))


def _named(plan: Plan, layer: int | None) -> str:
    return "from the previous stage, or the data" if layer is None else plan.profile.layers[layer]


def _sizes(row: LayerContents) -> tuple[int, ...]:
    state = row.parameter_bytes, row.copy_bytes, row.gradient_bytes, row.optimizer_bytes
    return row.total_bytes, *state, row.activation_bytes


# ---- Clusters: devices, hosts, and link rates

_WIDEST = 17  # members of a matrix that fits a terminal


def describe_cluster(cluster: Cluster) -> list[Block]:
    """Describe a cluster: devices, FLOP/s, process overheads, hosts and the matrix of link rates."""
    return [
        f"{cluster} ({cluster.backend})",
        _devices(cluster),
        _flops(cluster),
        *_overheads(cluster),
        _hosts(cluster),
        *_links(cluster),
    ]


def _devices(cluster: Cluster) -> Table:
    """Return a row for each run of equal devices."""
    rows = []
    for device, run in groupby(range(len(cluster.devices)), key=lambda number: cluster.devices[number]):
        numbers = list(run)
        kind = device.kind
        rows.append(
            (
                f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]),
                kind.name,
                format_bytes(device.memory_bytes),
                f"{kind.memory_bandwidth / 1e9:g} ({100 * kind.bandwidth_reached:.0f} %)",
                f"{kind.operation_seconds * 1e6:g} us",
                str(kind.multiprocessors or "-"),
                str(device.host),
            )
        )
    columns = ("devices", "kind", "memory", "GB/s", "an operation", "multiprocessors", "host")
    return Table(
        columns,
        tuple(rows),
        title="in brackets the fraction of the peak used for estimates",
    )


def _flops(cluster: Cluster) -> Table:
    """Return a row for each kind of device and dtype: FLOP/s, and the share that estimates assume."""
    kinds = {device.kind.key: device.kind for device in cluster.devices}
    rows = tuple(
        (kind.name, dtype, f"{figure / 1e12:g} ({100 * kind.part_of_flops(dtype):.0f} %)")
        for kind in kinds.values()
        for dtype, figure in kind.flops.items()
    )
    return Table(("kind", "dtype", "TFLOP/s"), rows)


def _overheads(cluster: Cluster) -> list[Block]:
    """Return a row for each kind of GPU: the non-tensor memory of a process."""
    kinds = {
        device.kind.name: device.kind.overheads for device in cluster.devices if cluster.backend == "cuda"
    }
    rows = tuple(
        (
            name,
            format_bytes(own.context_bytes),
            format_bytes(own.communicator_bytes),
            format_bytes(own.cublas_workspace_bytes),
        )
        for name, own in kinds.items()
    )
    columns = ("kind", "context", "a communicator", "cuBLAS, a thread")
    return [Table(columns, rows, title="non-tensor memory of a process")] if rows else []


def _hosts(cluster: Cluster) -> Table:
    rows = tuple(
        (
            str(number),
            format_bytes(host.memory_bytes),
            "-" if host.memory_bandwidth is None else f"{host.memory_bandwidth / 1e9:g}",
            format_bytes(host.disk_bytes) if host.disk_bytes else "-",
        )
        for number, host in enumerate(cluster.hosts)
    )
    return Table(("host", "memory", "GB/s", "disk"), rows)


def _links(cluster: Cluster) -> list[Block]:
    """Return the copy rate between every two members, in GB/s one way; a star marks routes through a host."""
    members = [
        *map(Member.device, range(len(cluster.devices))),
        *map(Member.host, range(len(cluster.hosts))),
        *(Member(MemberKind.DISK, number) for number, host in enumerate(cluster.hosts) if host.disk_bytes),
    ]
    shown = members[:_WIDEST]
    rows = tuple((str(source), *(_rate(cluster, source, target) for target in shown)) for source in shown)
    matrix = Table(("GB/s", *map(str, shown)), rows, title="what copies reach, one way (* through a host)")
    left_out = (
        [f"{len(members) - len(shown)} more members are not shown"] if len(members) > len(shown) else []
    )
    return [matrix, *left_out, *_both_ways(cluster), *_reducing(cluster)]


def _reducing(cluster: Cluster) -> Iterator[str]:
    """Yield the switches that reduce data, and the share of their rate that an all-reduce reaches."""
    for link in cluster.links:
        if link.reduces:
            names = shortened("-".join(map(str, link.members)))
            yield f"the switch reduces data (NVLink SHARP), at {link.reduces:.0%} of it: {names}"


def _both_ways(cluster: Cluster) -> Iterator[str]:
    """Yield the links whose directions slow each other, and by how much."""
    for duplex in sorted({link.duplex for link in cluster.links if link.duplex < 1}):
        names = ", ".join("-".join(map(str, link.members)) for link in cluster.links if link.duplex == duplex)
        yield f"when both directions are busy, each reaches {duplex:.0%} of it: {shortened(names)}"


def _rate(cluster: Cluster, source: Member, target: Member) -> str:
    if source == target:
        return "-"
    try:
        route = cluster.route(source, target)
    except UsageError:
        return "-"
    return f"{route.bytes_per_second / 1e9:.4g}" + "*" * (not route.direct)


# ---- Profiles: costs of blocks and layers, and saved tensors

_COLUMNS = ("name", "module", "parameters", "state", "saved", "output", "peak", "forward", "backward")


def describe_profile(profile: ModelProfile) -> list[Block]:
    """Describe a profile: the model, the assumptions, and tables for every measured microbatch size."""
    taken = profile.assumptions
    head = (
        f"{profile.model}: {profile.parts}, fingerprint {profile.fingerprint.digest}\n"
        f"{taken.precision} and {taken.optimizer}, kernels of {taken.target}, profiled on {taken.device} "
        f"with torch {taken.torch} and {counted(taken.threads, 'thread')}"
    )
    if taken.cpu:
        head += f"\nkernels measured on {taken.cpu} with {taken.capability}"
    blocks: list[Block] = [head]
    for measurement in profile.measurements:
        if measurement.shares is not None:
            blocks.append(str(measurement.shares))
        blocks.append(_blocks(profile, measurement))
        if copies := measurement.copy_bytes(0, len(measurement.layers)):
            blocks.append(f"half-precision copies of weights, among the parameters: {format_bytes(copies)}")
        if len(profile.block_names) < len(profile.layers):
            blocks.append(_layers(profile, measurement))
        blocks.append(_saved(profile, measurement))
    if undivided := tuple((block.name, block.undivided) for block in profile.blocks if block.undivided):
        blocks.append(Table(("block", "modules, and the reason"), undivided, title="not divided"))
    if profile.kernels.unknown:
        blocks.append(_unknown(profile.kernels))
    if profile.additive is not None:
        blocks.append(_additive(profile, profile.additive))
    return blocks


def describe_measurement(measurement: Measurement) -> list[Block]:
    """Describe a measurement: every kind of layer, with the numbers of its layers."""
    numbers = [
        numbered([layer for layer, kind in enumerate(measurement.layers) if kind == one])
        for one in range(len(measurement.kinds))
    ]
    rows = [_layer_row(layers, "", cost) for layers, cost in zip(numbers, measurement.kinds, strict=True)]
    table = Table(("layers", *_COLUMNS), (*rows, _layer_row("", "(loss)", measurement.loss)))
    return [f"a microbatch of {counted(measurement.microbatch_size, 'sample')}", table]


def _unknown(memory: KernelMemory) -> Table:
    """Return the operations that could not be measured; peaks lack the workspace of their kernels."""
    rows = tuple((kernel.operation, kernel.reason) for kernel in memory.unknown)
    return Table(
        ("operation", "why"), rows, title="not measured: peaks do not include the memory inside these kernels"
    )


def _additive(profile: ModelProfile, costs: AdditiveCosts) -> Table:
    """Return the two byte counts that training runs measured for every block."""
    named = enumerate(zip(profile.block_names, costs.mem_isolated, costs.mem_added, strict=True))
    rows = [
        (str(number), name, format_bytes(isolated), _signed(added))
        for number, (name, isolated, added) in named
    ]
    return Table(
        (profile.part, "name", "alone", "added"),
        tuple(rows),
        title=f"peaks of training runs: {', '.join(costs.training.phrases)}, recompute {costs.recompute}",
    )


def _signed(nbytes: int) -> str:
    return f"-{format_bytes(-nbytes)}" if nbytes < 0 else format_bytes(nbytes)


def _blocks(profile: ModelProfile, measurement: Measurement) -> Table:
    """Return the costs of every block as a stage; consecutive equal blocks share a row, which has the costs
    of each.
    """
    band = Ranges(measurement, profile.edges).band(1)
    rows = []
    for first, count in _runs(profile, measurement):
        costs = measurement.costs[profile.edges[first] : profile.edges[first + 1]]
        number, name = str(first), profile.block_names[first]
        if count > 1:
            number, name = (
                f"{first}-{first + count - 1}",
                f"{name} .. {profile.block_names[first + count - 1]}",
            )
        sizes = (
            sum(cost.static_bytes for cost in costs),
            sum(cost.state_bytes for cost in costs),
            int(band.retained[0, first]),
            sum(value.nbytes for value in costs[-1].outputs),
            int(band.forward_peak[0, first]),
        )
        module = costs[0].module if len(costs) == 1 else counted(len(costs), "layer")
        work = (_sum([cost.forward for cost in costs]), _sum([cost.backward for cost in costs]))
        rows.append((number, name, module, *map(format_bytes, sizes), *map(_work, work)))
    rows.append(_layer_row("", "(loss)", measurement.loss))
    size = samples(measurement.microbatch_size, profile.fingerprint.lengths)
    along = " with sequence parallelism" if measurement.sequences else ""
    of_rank = (
        f", on one of {measurement.tensor} tensor-parallel ranks{along}" if measurement.tensor > 1 else ""
    )
    return Table(
        (profile.part, *_COLUMNS), tuple(rows), title=f"a microbatch of {size}{of_rank}; each {profile.part}"
    )


def _layers(profile: ModelProfile, measurement: Measurement) -> Table:
    """Return the costs of every layer; of consecutive equal blocks, only the layers of the first."""
    rows = [
        _layer_row(str(number), profile.layers[number], measurement.costs[number])
        for first, _ in _runs(profile, measurement)
        for number in range(profile.edges[first], profile.edges[first + 1])
    ]
    return Table(("layer", *_COLUMNS), tuple(rows), title="layers; equal blocks are shown once")


def _runs(profile: ModelProfile, measurement: Measurement) -> Iterator[tuple[int, int]]:
    """Yield runs of equal blocks: the number of the first, and the length."""
    first = 0
    for _, equal in groupby(measurement.layers[start:stop] for start, stop in pairwise(profile.edges)):
        count = len(list(equal))
        yield first, count
        first += count


def _sum(works: Sequence[Work]) -> Work:
    seconds = [work.seconds for work in works if work.seconds is not None]
    return Work(
        flops=sum(work.flops for work in works),
        moved_bytes=sum(work.moved_bytes for work in works),
        seconds=sum(seconds) if len(seconds) == len(works) else None,
    )


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
    """Format measured seconds, or else floating-point operations."""
    return format_flops(work.flops) if work.seconds is None else format_seconds(work.seconds)


def _saved(profile: ModelProfile, measurement: Measurement) -> Table:
    """Return the saved tensors of each kind of layer, by operation, dtype and storage.

    Masks and score matrices are visible in this table.
    """
    rows = []
    for number, cost in enumerate((*measurement.kinds, measurement.loss)):
        example = (
            profile.layers[measurement.layers.index(number)] if number in measurement.layers else "(loss)"
        )
        groups: dict[tuple[str, str, str], list[SavedTensor]] = defaultdict(list)
        for tensor in cost.saved:
            groups[tensor.operation or "-", tensor.dtype, tensor.origin.kind].append(tensor)
        rows += [(example, cost.module, *group, *_figures(tensors)) for group, tensors in groups.items()]
    columns = ("for example", "module", "operation", "dtype", "storage", "tensors", "total", "largest")
    return Table(columns, tuple(rows), title="saved for backward", spare=("module", "largest", "tensors"))


def _figures(tensors: list[SavedTensor]) -> tuple[str, str, str]:
    """Return the number of tensors, their bytes, and those of the largest. Tensors in one storage count
    once.
    """
    sizes: dict[object, int] = {}
    for tensor in tensors:
        key = tensor.origin if tensor.origin.kind in ("own", "input") else tensor.index
        sizes[key] = max(sizes.get(key, 0), tensor.nbytes)
    return str(len(tensors)), format_bytes(sum(sizes.values())), format_bytes(max(sizes.values()))


# ---- Plans for loops


def describe_loop_plan(plan: LoopPlan) -> list[Block]:
    """Describe a plan for a loop: its peaks, its cost, and a row for each decision."""
    first, steady = map(format_bytes, plan.peak_bytes)
    share = plan.lost_seconds / plan.step_seconds if plan.step_seconds else 0.0
    peaks = (
        f"Peak {steady} within a budget of {format_bytes(plan.budget_bytes)}; first step {first}; "
        f"without the plan {format_bytes(max(plan.plain_bytes))}."
    )
    cost = f"A step takes about {share:.1%} longer."
    if not plan.decisions:
        cost = "Every submodule keeps its saved tensors."
    if plan.state_on_host:
        cost += "\nOptimizer state is on the host between steps: each step copies it there and back."
    blocks: list[Block] = [f"{peaks}\n{cost}"]
    if plan.decisions:
        rows = tuple(
            (d.name, d.technique, format_bytes(d.saved_bytes), format_seconds(d.seconds))
            for d in plan.decisions
        )
        blocks.append(Table(("submodule", "technique", "frees", "costs a step"), rows))
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in plan.refused:
        by_reason[why].append(name)
    notes = [
        f"{names[0]} is not recomputed: {why}."
        if len(names) == 1
        else f"{', '.join(names[:-1])} and {names[-1]} are not recomputed, each for this reason: {why}."
        for why, names in by_reason.items()
    ]
    if plan.gap:
        notes.append(plan.gap)
    return [*blocks, "\n".join(notes)] if notes else blocks


# ---- Any document

Shows = (
    Cluster | Comparison | PlanDifference | Fit | LoopPlan | Measurement | ModelProfile | Overview | Plan
    | PostMortem | Program | Trace | UncheckedProgram
)  # fmt: skip


def text(document: Shows) -> str:
    """Return the description of a document in lines of 80 columns, as `pipefit show` prints it.

    Raises:
        UsageError: not a document.
    """
    return tables.plain(describe(document), 80)


def html(document: Shows) -> str:
    """Return the description of a document as HTML, for notebooks.

    Raises:
        UsageError: not a document.
    """
    return tables.html(describe(document))


def describe(document: Shows) -> list[Block]:
    """Describe a document of any kind.

    Raises:
        UsageError: not a document.
    """
    for kind, describe_kind in _WORDS.items():
        if isinstance(document, kind):
            return describe_kind(document)
    raise UsageError(f"{kind_of(document)} is not a document that can be described")


def describe_program(program: UncheckedProgram) -> list[Block]:
    """Return the text form of a program, a paragraph for each non-empty line."""
    head = f"program of {counted(program.stages, 'stage')} and {counted(program.microbatches, 'microbatch')}"
    return [head, *(line for line in str(program).splitlines() if not line.endswith(": "))]


_WORDS: dict[type, Callable[[Any], list[Block]]] = {
    Cluster: describe_cluster,
    Comparison: describe_comparison,
    PlanDifference: describe_difference,
    Fit: describe_fit,
    LoopPlan: describe_loop_plan,
    Measurement: describe_measurement,
    ModelProfile: describe_profile,
    Overview: describe_overview,
    Plan: describe_plan,
    PostMortem: describe_post_mortem,
    Trace: describe_trace,
    UncheckedProgram: describe_program,
}
