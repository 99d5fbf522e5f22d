"""A cluster as text: its devices, its hosts, and who talks to whom at what rate."""

from __future__ import annotations

from itertools import groupby

from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.report.tables import Block, Table
from pipefit.units import format_bytes

_WIDEST = 17  # members of a matrix that still fits a terminal


def describe_cluster(cluster: Cluster) -> list[Block]:
    """Name, devices, hosts and the matrix of link rates."""
    return [f"{cluster} ({cluster.backend})", _devices(cluster), _hosts(cluster), *_links(cluster)]


def _devices(cluster: Cluster) -> Table:
    """A row for each run of equal devices."""
    rows = []
    for device, run in groupby(range(len(cluster.devices)), key=lambda number: cluster.devices[number]):
        numbers = list(run)
        flops = ", ".join(f"{dtype} {figure / 1e12:g}" for dtype, figure in device.kind.flops.items())
        rows.append(
            (
                f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]),
                device.kind.name,
                format_bytes(device.memory_bytes),
                f"{device.kind.memory_bandwidth / 1e9:g}",
                flops,
                str(device.host),
            )
        )
    return Table(("devices", "kind", "memory", "GB/s", "TFLOP/s", "host"), tuple(rows))


def _hosts(cluster: Cluster) -> Table:
    rows = tuple(
        (str(number), format_bytes(host.memory_bytes), format_bytes(host.disk_bytes) if host.disk_bytes else "-")
        for number, host in enumerate(cluster.hosts)
    )
    return Table(("host", "memory", "disk"), rows)


def _links(cluster: Cluster) -> list[Block]:
    """GB/s one way between every two members; a star where bytes go by way of a host."""
    names = [f"device{number}" for number in range(len(cluster.devices))]
    names += [f"host{number}" for number in range(len(cluster.hosts))]
    shown = names[:_WIDEST]
    rows = tuple((source, *(_rate(cluster, source, target) for target in shown)) for source in shown)
    matrix = Table(("GB/s", *shown), rows, title="links, one way (* by way of a host)")
    left_out = [f"{len(names) - len(shown)} more members are not shown"] if len(names) > len(shown) else []
    return [matrix, *left_out]


def _rate(cluster: Cluster, source: str, target: str) -> str:
    if source == target:
        return "-"
    try:
        rate = cluster.route(source, target).bytes_per_second / 1e9
    except UsageError:
        return "-"
    direct = any(source in link.members and target in link.members for link in cluster.links)
    return f"{rate:.4g}" if direct else f"{rate:.4g}*"
