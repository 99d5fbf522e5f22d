"""A cluster as text: its devices, its hosts, and who talks to whom at what rate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.places import Member, MemberKind
from pipefit.tables import Block, Table
from pipefit.texts import shortened
from pipefit.units import format_bytes

_WIDEST = 17  # members of a matrix that still fits a terminal


def describe_cluster(cluster: Cluster) -> list[Block]:
    """Name, devices, FLOP/s, what processes take besides tensors, hosts and the matrix of link rates."""
    return [
        f"{cluster} ({cluster.backend})",
        _devices(cluster),
        _flops(cluster),
        *_overheads(cluster),
        _hosts(cluster),
        *_links(cluster),
    ]


def _devices(cluster: Cluster) -> Table:
    """A row for each run of equal devices."""
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
                str(device.host),
            )
        )
    columns = ("devices", "kind", "memory", "GB/s", "an operation", "host")
    return Table(
        columns, tuple(rows), title="in brackets the part that estimates reckon with where no time was measured"
    )


def _flops(cluster: Cluster) -> Table:
    """A row for each kind of device and dtype: FLOP/s, and the part of them that estimates reckon with."""
    kinds = {device.kind.key: device.kind for device in cluster.devices}
    rows = tuple(
        (kind.name, dtype, f"{figure / 1e12:g} ({100 * kind.part_of_flops(dtype):.0f} %)")
        for kind in kinds.values()
        for dtype, figure in kind.flops.items()
    )
    return Table(("kind", "dtype", "TFLOP/s"), rows)


def _overheads(cluster: Cluster) -> list[Block]:
    """A row for each kind of GPU: what a process takes of its memory besides tensors."""
    kinds = {device.kind.name: device.kind.overheads for device in cluster.devices if cluster.backend == "cuda"}
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
    return [Table(columns, rows, title="what a process takes besides tensors")] if rows else []


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
    """GB/s one way that copies reach between every two members; a star where bytes go through a host."""
    members = [
        *map(Member.device, range(len(cluster.devices))),
        *map(Member.host, range(len(cluster.hosts))),
        *(Member(MemberKind.DISK, number) for number, host in enumerate(cluster.hosts) if host.disk_bytes),
    ]
    shown = members[:_WIDEST]
    rows = tuple((str(source), *(_rate(cluster, source, target) for target in shown)) for source in shown)
    matrix = Table(("GB/s", *map(str, shown)), rows, title="what copies reach, one way (* through a host)")
    left_out = [f"{len(members) - len(shown)} more members are not shown"] if len(members) > len(shown) else []
    return [matrix, *left_out, *_both_ways(cluster)]


def _both_ways(cluster: Cluster) -> Iterator[str]:
    """The links whose directions hinder each other, by how much."""
    for duplex in sorted({link.duplex for link in cluster.links if link.duplex < 1}):
        names = ", ".join("-".join(map(str, link.members)) for link in cluster.links if link.duplex == duplex)
        yield f"while both directions are busy, each reaches {duplex:.0%} of it: {shortened(names)}"


def _rate(cluster: Cluster, source: Member, target: Member) -> str:
    if source == target:
        return "-"
    try:
        rate = cluster.route(source, target).bytes_per_second / 1e9
    except UsageError:
        return "-"
    direct = any(source in link.members and target in link.members for link in cluster.links)
    return f"{rate:.4g}" if direct else f"{rate:.4g}*"
