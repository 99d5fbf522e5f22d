"""Lends the memory that some devices have left to stages that recompute, where that makes the step shorter.

The bytes that a stage recomputes are what it needs elsewhere; what devices have left is what they may lend. Device
mapping brings both together and says how much each lends to whom, and a stage's tensors are striped over its lenders in
these shares. Two ways are tried: all stages that recompute borrow, or the busiest of them alone; and half of either.
Both again where lenders may lend what their own tensors take too, which filling then recomputes or moves to the host: a
stage with time to spare computes again so that the busiest need not. What comes of it is simulated, and is only taken
if it is faster: often the spare memory of peers is too little, or what it saves in computing is lost in the links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from pipefit.places import Member, Place, Share
from pipefit.planner.evaluation import Budget
from pipefit.planner.filling import Filled, Filler, Setting
from pipefit.planner.mapping import Mapping, mapped_stages
from pipefit.planner.question import Split

_BUSIEST = 0.98  # of the busiest stage's share of a step: stages above that are as busy
_USED = 0.95  # of what a device has left is lent
_PARTS = 64  # a stripe is in shares of this many parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """What lending came to: the best filled candidate, and how much faster or slower it is than without, in seconds."""

    found: Filled
    gained_seconds: float


def with_peers(filler: Filler, best: Filled, *, budget: Budget) -> Lending | None:
    """The best candidate that lends memory; None if nothing can be lent, or no such candidate fits."""
    if not best.found.fits:
        return None
    found = list[Filled]()
    for setting in dict.fromkeys(_settings(filler, best)):
        if budget.ends():
            break
        if (one := filler.fill(setting, best.margins)) is not None:
            found.append(one)
    fitting = [one for one in found if one.found.fits and any(blocks for blocks, _ in one.setting.lent)]
    if not fitting:
        return None
    lending = min(fitting, key=lambda one: one.found.order)
    return Lending(found=lending, gained_seconds=best.found.seconds - lending.found.seconds)


def _settings(filler: Filler, best: Filled) -> Iterator[Setting]:
    """The settings to try: who borrows, and how much of what could be lent is."""
    found, split = best.found, best.setting.split
    busy = [found.simulation.utilisation[device] for device in split.devices]
    recomputed = [_bytes_of(filler, best, stage, recomputed=True) for stage in range(len(busy))]
    spares = [round(-over * _USED) if over < 0 else 0 for over in found.over]
    kept = [_bytes_of(filler, best, stage, recomputed=False) for stage in range(len(busy))]
    more = [spare + own for spare, own in zip(spares, kept, strict=True)]
    for least, left in product((0.0, _BUSIEST * max(busy)), (spares, more)):
        needs = [need if share >= least else 0 for need, share in zip(recomputed, busy, strict=True)]
        room = [nbytes if not need else 0 for nbytes, need in zip(left, needs, strict=True)]
        if not any(needs) or not any(room):
            continue
        chosen = mapped_stages(filler.question, split, needs, room)
        for part in (1.0, 0.5):
            setting = _lent(filler, best, chosen, part)
            if any(blocks for blocks, _ in setting.lent):
                yield setting


def _bytes_of(filler: Filler, best: Filled, stage: int, *, recomputed: bool) -> int:
    """The bytes of all microbatches that a stage would keep if it did not recompute, or those that it keeps."""
    choice = best.found.candidate.choices[stage]
    menus = filler.evaluator.stage_menus(best.setting.split)[stage]
    away = filler.in_flight(best.setting.split, stage) - 1
    return away * sum(
        menu.movable_bytes for menu, n in zip(menus, choice.recipes, strict=True) if bool(n) == recomputed
    )


def _lent(filler: Filler, best: Filled, mapping: Mapping, part: float) -> Setting:
    """The setting in which every borrower moves as many blocks as a part of what it is lent has room for."""
    setting = best.setting
    menus = filler.evaluator.stage_menus(setting.split)
    lent: list[tuple[int, Place | None]] = []
    for stage in range(len(setting.host)):
        shares = mapping.lenders_of(stage)
        room = part * sum(shares.values())
        each = max((menu.movable_bytes for menu in menus[stage]), default=0)
        away = filler.in_flight(setting.split, stage) - 1
        blocks = int(room // (away * each)) if away and each else 0
        lent.append((blocks, shared_out(shares, mapping.devices)) if blocks else (0, None))
    return setting._replace(split=Split(setting.split.edges, mapping.devices), lent=tuple(lent))


def shared_out(shares: dict[int, int], devices: Sequence[int]) -> Place:
    """The place of tensors that go to lenders in proportion to these bytes."""
    whole = sum(shares.values())
    parts = {stage: round(_PARTS * nbytes / whole) for stage, nbytes in shares.items()}
    return Place(Share(Member.device(devices[stage]), n) for stage, n in sorted(parts.items()) if n)
