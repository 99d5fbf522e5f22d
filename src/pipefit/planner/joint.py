"""The joint planner, the default: the fastest plan that fits, with split, devices and what is done with tensors chosen
together.

It minimises the simulated seconds of a step, among plans of which the exact ledger says that every device and every
host has the memory at every instant.

    1. several splits are filled (`planner.filling`): those of the other planners, and even ones in which early stages
       have fewer blocks because they recompute more (`planner.splits`)
    2. the best of them is improved by small changes (`planner.improvement`)
    3. memory that devices have left is lent, if that is faster (`planner.peers`)
    4. what is done with single blocks is polished (`planner.polishing`)
    5. the plan of `mpress` is a candidate too

So it is never slower than any split that fits as it is, nor than `mpress`, and never over a budget. It reports the gap
to a bound that holds for all plans (`planner.bounds`); it is a heuristic, and the gap is what can be proven.

Costs: dozens of simulations, a few hundred at most, of some ten microseconds an action: a few seconds for GPT-25.5B on
8 devices with 32 microbatches. Longer programs get fewer simulations. (After AdaPipe, Mist and Aceso; MPress, HPCA
2023.)
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.planner.bisection import bisection
from pipefit.planner.bounds import step_bound
from pipefit.planner.evaluation import Evaluation, Evaluator
from pipefit.planner.exact import exact
from pipefit.planner.filling import Filled, Filler, Setting, States
from pipefit.planner.first_last import first_last
from pipefit.planner.improvement import improved
from pipefit.planner.mpress import MpressOptions, compacted
from pipefit.planner.parameters import parameters
from pipefit.planner.peers import with_peers
from pipefit.planner.polishing import polished
from pipefit.planner.question import Found, Question, Split
from pipefit.planner.splits import Balance
from pipefit.planner.time import time
from pipefit.planner.uniform import uniform
from pipefit.provenance import Objective

_OTHERS = time, exact, bisection, uniform, parameters, first_last
_HOST_PARTS = 0.0, 0.5, 1.0  # of what the host's link carries, for which even splits are made
_EVALUATIONS, _POLISHES = 40, 300  # for improving a plan, and for polishing it
_ACTIONS = 100_000  # in all programs that are simulated for either
_OTHER_SPLITS = 2  # that are polished beside the best
_WORTH = 1e-3  # the part of a step that lending has to gain


def joint(question: Question) -> Found:
    """The fastest plan found, with its bound."""
    bound, filler = step_bound(question), Filler(Evaluator(question))
    best, remarks = _filled(filler, bound)
    evaluator = filler.evaluator
    found = best.found
    if not evaluator.pinned:
        tried = [best, *filler.others(best, _OTHER_SPLITS)]
        found = min((_polished(evaluator, one.found, bound) for one in tried), key=lambda one: one.order)
    found = min(found, compacted(filler, MpressOptions()), key=lambda one: one.order)
    return Found(
        found.candidate.split,
        Objective.STEP,
        found.seconds,
        evaluated=evaluator.count,
        proven=False,
        bound=min(bound, found.seconds),
        decisions=None if evaluator.pinned else evaluator.decisions(found.candidate),
        remarks=remarks,
    )


def _filled(filler: Filler, bound: float) -> tuple[Filled, tuple[str, ...]]:
    """The best split, filled and improved, with what devices lend; and remarks about the latter."""
    start = _best_start(filler)
    best = improved(filler, start, evaluations=_evaluations(start.found, _EVALUATIONS), at_least=bound)
    return _lent(filler, best)


def _polished(evaluator: Evaluator, found: Evaluation, bound: float) -> Evaluation:
    """A plan polished, if there is anything to polish: it does something with tensors."""
    if all(choice.idle for choice in found.candidate.choices):
        return found
    evaluations = _evaluations(found, _POLISHES) // (1 + _OTHER_SPLITS)
    return polished(evaluator, found, evaluations=evaluations, at_least=bound)


def _best_start(filler: Filler) -> Filled:
    """The best of all splits, each as it is or filled, without and with the host.

    Even splits are only of use where something must be recomputed or moved. So is optimizer state on the host, for
    which a step waits at its end: of all blocks if that is faster, or of as many as are needed.
    """
    question = filler.question
    best = _best_of(filler, [planner(question).split for planner in _OTHERS], None)
    if best is None or not best.found.fits or not _keeps(best):
        balance = Balance(question)
        best = _best_of(filler, [balance.split(host) for host in _HOST_PARTS], best)
        splits = [balance.split(1.0), *(planner(question).split for planner in (time, exact))]
        ways: tuple[States, ...] = ("all", "needed")
        for states in ways:
            if states == "all" or best is None or not best.found.fits:
                best = _best_of(filler, splits, best, states=states)
    assert best is not None, "a split that keeps everything can be carried out"
    return best


def _best_of(filler: Filler, splits: Sequence[Split], best: Filled | None, *, states: States = "stay") -> Filled | None:
    """The best of `best` and these splits; those whose stages take longer than a plan that fits are left out."""
    for split in dict.fromkeys(splits):
        for host in (0.0,) if filler.evaluator.pinned else (0.0, 1.0):
            if best is None or not best.found.fits or filler.fewest_seconds(split) < best.found.seconds:
                filled = filler.fill(Setting.of(split, host, states=states))
                if filled is not None and (best is None or filled.found.order < best.found.order):
                    best = filled
    return best


def _keeps(filled: Filled) -> bool:
    """Whether nothing is recomputed or moved."""
    return all(choice.idle for choice in filled.found.candidate.choices)


def _evaluations(found: Evaluation, most: int) -> int:
    """How many more simulations of such a program there may be, up to `most`."""
    actions = sum(map(len, found.simulation.program.actions))
    return min(most, max(4, _ACTIONS // actions))


def _lent(filler: Filler, best: Filled) -> tuple[Filled, tuple[str, ...]]:
    """The plan with memory of peers, if that is faster; and what came of it, in a sentence."""
    if filler.evaluator.pinned or _keeps(best):
        return best, ()
    lending = with_peers(filler, best)
    if lending is None:
        return best, ("No plan in which devices lend each other memory was found to fit.",)
    share = 100 * lending.gained_seconds / best.found.seconds
    if lending.gained_seconds <= _WORTH * best.found.seconds:
        return best, (f"Lending memory between devices is declined: steps would take {-share:.1f} % longer.",)
    return lending.found, (f"Lending memory between devices makes steps {share:.1f} % shorter.",)
