"""What is done with the saved tensors of one stage, block by block, and the decisions of a plan that say so.

A block keeps its tensors, recomputes by one of its menu's recipes, moves what the recipe leaves, or does both. What
moves to one place goes in at most two bundles, as a copy is an action to the device: one that may run beside a single
forward or backward of the device, and one that has the time of two, for which there is one microbatch more on the
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipefit.decisions import Decision, Run, SavedTensors, State, StateKind, What
from pipefit.places import Place
from pipefit.planner.menus import Menu, Movable, Recipe

KEPT, TO_HOST, TO_PEERS = range(3)


class StageChoice(NamedTuple):
    """What is done on a stage: for every block the number of its recipe, and where the rest of its tensors go.

    Of the blocks whose tensors move to the host, the first `near` are in the bundle with the time of one forward or
    backward. This bundle comes back `lead` forwards and backwards ahead, the other one more. Of those that are
    recomputed the last `early`, whose backwards come first, go forward again one action ahead, so that they may fill
    the time in which the device waits for gradients. If `joined`, runs that touch are one: it keeps only its first
    inputs, but has all of its tensors on the device before its backward. The optimizer state of the first `states`
    blocks is on the host, and the first `updates` of them are updated there. Of the others, the gradients of the first
    `gradients` blocks are on the host between backwards, and the parameters of the first `parameters` between passes.
    """

    recipes: tuple[int, ...]
    places: tuple[int, ...]
    near: int = 0
    lead: int = 1
    early: int = 0
    joined: bool = False
    states: int = 0
    updates: int = 0
    gradients: int = 0
    parameters: int = 0
    peers: Place | None = None

    @staticmethod
    def keep(blocks: int) -> StageChoice:
        """Nothing is done."""
        return StageChoice((0,) * blocks, (KEPT,) * blocks)

    @property
    def idle(self) -> bool:
        """Whether nothing is done."""
        moves = self.states or self.gradients or self.parameters
        return not any(self.recipes) and not any(self.places) and not moves

    def recipe(self, menus: Sequence[Menu], block: int) -> Recipe:
        """The recipe of a block."""
        return menus[block].recipes[self.recipes[block]]

    def moved(self, menus: Sequence[Menu], block: int) -> tuple[Movable, ...]:
        """The tensors of a block that move."""
        return menus[block].moved(self.recipe(menus, block)) if self.places[block] else ()

    def blocks_to(self, place: int) -> list[int]:
        """The blocks whose tensors move to a place."""
        return [block for block, there in enumerate(self.places) if there == place]


def decisions_of(stage: int, choice: StageChoice, menus: Sequence[Menu], host: Place) -> Iterator[Decision]:
    """The decisions of a stage; `host` is where its device's host is."""
    again = [block for block, number in enumerate(choice.recipes) if number]
    early = again[len(again) - choice.early :] if choice.early else []
    runs = [(run, int(block in early)) for block in again for run in choice.recipe(menus, block).runs]
    for (start, stop), ahead in _joined(runs) if choice.joined else runs:
        yield Decision(stage=stage, subject=Run(start=start, stop=stop), what=What.RECOMPUTE, ahead=ahead)
    to_host = choice.blocks_to(TO_HOST)
    yield from _bundle(stage, choice, menus, to_host[: choice.near], host, 1, choice.lead)
    yield from _bundle(stage, choice, menus, to_host[choice.near :], host, 2, choice.lead + 1)
    yield from _states(stage, choice, menus, host)
    if choice.peers is not None:
        yield from _bundle(stage, choice, menus, choice.blocks_to(TO_PEERS), choice.peers, 1, 1)


def _states(stage: int, choice: StageChoice, menus: Sequence[Menu], host: Place) -> Iterator[Decision]:
    """The decisions about what belongs to no microbatch."""
    others, alone = menus[choice.updates :], [menu for menu in menus[: choice.updates] if menu.stays]
    moved: tuple[tuple[StateKind, Sequence[Menu]], ...] = (
        ("optimizer", [*alone, *menus[choice.updates : choice.states]]),
        ("gradients", others[: choice.gradients]),
        ("parameters", [menu for menu in others[: choice.parameters] if not menu.stays]),
    )
    for menu in menus[: choice.updates]:
        state = State(start=menu.start, stop=menu.stop, kind="optimizer")
        if not menu.stays:
            yield Decision(stage=stage, subject=state, what=What.UPDATE, place=host)
    for kind, blocks in moved:
        for menu in blocks:
            state = State(start=menu.start, stop=menu.stop, kind=kind)
            yield Decision(stage=stage, subject=state, what=What.OFFLOAD, place=host, ahead=1)


def _joined(runs: Sequence[tuple[tuple[int, int], int]]) -> list[tuple[tuple[int, int], int]]:
    """The runs, those that touch and come equally early as one."""
    found: list[tuple[tuple[int, int], int]] = []
    for run, ahead in runs:
        touches = found and found[-1][0][1] == run[0] and found[-1][1] == ahead
        start = found.pop()[0][0] if touches else run[0]
        found.append(((start, run[1]), ahead))
    return found


def _bundle(
    stage: int, choice: StageChoice, menus: Sequence[Menu], blocks: Sequence[int], place: Place, behind: int, ahead: int
) -> Iterator[Decision]:
    """The decision that moves the tensors of some blocks together; none where they have no tensors."""
    tensors = tuple((t.layer, t.number) for block in blocks for t in choice.moved(menus, block))
    if tensors:
        yield Decision(
            stage=stage,
            subject=SavedTensors(tensors=tensors),
            what=What.OFFLOAD,
            place=place,
            behind=behind,
            ahead=ahead,
        )
