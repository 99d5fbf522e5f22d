"""Which devices the stages of a plan get: neighbours near each other, and the shards of a replica on one host."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.grids import Grid
from pipefit.planner.degrees import Degree


def grids_of(
    stages: Sequence[tuple[Degree, int]], free: Sequence[Sequence[int]], hosts: Sequence[int]
) -> tuple[Grid, ...]:
    """The grids of stages that take devices of a class or of larger ones, of which each has these `free`.

    Stages that need the largest devices choose first, and of those the ones of the most shards, so that their groups
    find hosts with room; others take devices in order. The first device of a grid is of its smallest class.
    """
    left = [sorted(devices, key=lambda device: (hosts[device], device)) for devices in free]
    found: dict[int, Grid] = {}
    for number in sorted(range(len(stages)), key=lambda number: (-stages[number][1], -stages[number][0].tensor)):
        degree, lowest = stages[number]
        devices = list[int]()
        for own in left[lowest:]:
            devices += _taken(own, min(degree.devices - len(devices), len(own)), degree.tensor, hosts)
        found[number] = Grid(devices=tuple(devices), **degree.pins)
    return tuple(found[number] for number in range(len(stages)))


def _taken(free: list[int], count: int, together: int, hosts: Sequence[int]) -> list[int]:
    """Take so many devices, each group of so many `together` on one host if there is one with room."""
    taken = list[int]()
    while len(taken) < count:
        size = min(together, count - len(taken))
        groups = (free[at : at + size] for at in range(len(free) - size + 1))
        group = next((one for one in groups if hosts[one[0]] == hosts[one[-1]]), free[:size])
        taken += group
        free[:] = [device for device in free if device not in group]
    return taken
