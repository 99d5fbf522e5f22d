"""`pipefit clusters`: named clusters, and the syntax of others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pipefit.cli.options import Json
from pipefit.tables import Table, write
from pipefit.texts import counted
from pipefit.units import format_bytes

if TYPE_CHECKING:
    from pipefit.schema.cluster import Cluster

EXAMPLE = "pipefit clusters"
_CARDS = "Cards in one box, 1 to 16 of a kind: 4x-rtx-3090 is four. TFLOP/s by type"
_DTYPES = ("float32", "float16", "bfloat16")  # TFLOP/s
_OTHERS = (
    "emulated:4x256MiB is four worker processes of this machine with 256 MiB each; "
    "emulated:2x256MiB+2x128MiB mixes two sizes. Describe your own cluster in a .toml file. "
    "16xdgx-a100@25GB/s is sixteen machines, between which every device sends and receives 25 GB/s. "
    "pipefit show NAME prints devices, hosts and links."
)


def command(as_json: Json = False) -> None:
    """List the clusters that have a name.

    Memory is what the driver offers to programs. A reserve of it is kept free for non-tensor memory of the
    process.
    """
    from pipefit.schema.cluster import Cluster
    from pipefit.schema.presets import card_names, machine_names

    machines = [Cluster.preset(name) for name in machine_names()]
    cards = [Cluster.preset(f"1x-{name}") for name in card_names()]
    if as_json:
        print(json.dumps({cluster.name: _figures(cluster) for cluster in (*machines, *cards)}))
        return
    write([_table(machines), _card_table(cards), _OTHERS], width=80)


def _figures(cluster: Cluster) -> dict[str, object]:
    """Return a cluster as JSON: sizes in bytes, for each device."""
    return {
        "devices": [device.kind.name for device in cluster.devices],
        "memory_bytes": [device.memory_bytes for device in cluster.devices],
        "reserve_bytes": list(cluster.reserves),
        "host_bytes": [host.memory_bytes for host in cluster.hosts],
    }


def _card_table(cards: list[Cluster]) -> Table:
    """Return a row for each card, from clusters of one card."""
    kinds = [(cluster.devices[0].kind, cluster) for cluster in cards]
    rows = tuple(
        (
            f"Nx-{kind.name}",
            format_bytes(cluster.devices[0].memory_bytes),
            f"{kind.memory_bandwidth / 1e9:g} GB/s",
            *(f"{kind.flops[dtype] / 1e12:g}" if dtype in kind.flops else "-" for dtype in _DTYPES),
            f"{cluster.links[0].bytes_per_second / 1e9:g} GB/s",
        )
        for kind, cluster in kinds
    )
    return Table(("cards", "memory", "bandwidth", *_DTYPES, "to the host"), rows, title=_CARDS)


def _table(clusters: list[Cluster]) -> Table:
    """Return a row for each cluster; its devices are equal."""
    rows = tuple(
        (
            cluster.name,
            str(len(cluster.devices)),
            cluster.devices[0].kind.name,
            format_bytes(cluster.devices[0].memory_bytes),
            format_bytes(cluster.reserves[0]),
            f"{counted(len(cluster.hosts), 'host')} of {format_bytes(cluster.hosts[0].memory_bytes)}",
        )
        for cluster in clusters
    )
    return Table(
        ("cluster", "devices", "of kind", "memory of each", "reserve", "hosts"), rows, spare=("reserve",)
    )
