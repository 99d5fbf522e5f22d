"""What the links between devices and their hosts carry when several devices use them at once."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.cluster import Cluster, Route
from pipefit.errors import UsageError
from pipefit.places import Member


def host_rates(cluster: Cluster, devices: Sequence[int | None]) -> list[float]:
    """Bytes per second, each way, that each of these devices has to its host if all of them use it; 0 for None.

    Devices behind one wire have equal parts of it. Zero too where no link joins a device with its host.
    """
    routes = [None if device is None else host_route(cluster, device) for device in devices]
    users = [wire for route in routes if route is not None for wire in route.wires]
    return [
        0.0 if route is None else route.both_ways_per_second / max(1, *map(users.count, route.wires))
        for route in routes
    ]


def host_route(cluster: Cluster, device: int) -> Route | None:
    """The way of a device to its host; None where nothing joins them."""
    try:
        return cluster.route(Member.device(device), Member.host(cluster.devices[device].host))
    except UsageError:
        return None
