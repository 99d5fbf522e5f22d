"""The exhaustive planner: tries every split of L layers over P stages, and every order of unlike devices.

Optimal for its predictor, in C(L-1, P-1) splits: 3,654 for 30 layers on 4 devices, hopeless for 100 on 16. There, use
`exact`, which it checks: the two share the question and nothing of the search. (mCAP, section 3.4.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, permutations
from math import comb, factorial, prod

from pipefit.cluster import Cluster
from pipefit.cost.memory import StageMemory
from pipefit.errors import UsageError
from pipefit.planner.answer import Found, answer
from pipefit.planner.question import Options, Question, Split
from pipefit.plans import Plan
from pipefit.profiles import ModelProfile
from pipefit.program import Kind
from pipefit.schedule import Situation
from pipefit.training import Training

LIMIT = 2_000_000  # splits; about a minute


def exhaustive(profile: ModelProfile, cluster: Cluster, training: Training, options: Options = Options()) -> Plan:
    """The plan whose fullest device is least full, then the next, and so on; found by looking at all of them.

    Raises:
        UsageError: more than `LIMIT` splits.
        InfeasibleError: even the best does not fit.
    """
    began = time.perf_counter()
    question = Question(profile=profile, cluster=cluster, training=training, options=options)
    count = _count(question)
    if count > LIMIT:
        raise UsageError(
            f"{question.layers} layers on {question.stages} stages split in {count:,} ways, more than the {LIMIT:,} "
            "that the exhaustive planner tries: use the exact planner, which finds the same plan"
        )
    value, split = _best(question)
    seconds = time.perf_counter() - began
    return answer(question, Found("exhaustive", split, question.objective, value, count, seconds))


def _count(question: Question) -> int:
    """Splits, times orders of device classes; the orders are counted as if all devices were unlike once that is past
    the limit.
    """
    splits = comb(question.layers - 1, question.stages - 1)
    sizes = [len(c.devices) for c in question.classes]
    devices = sum(sizes)
    if len(sizes) == 1:
        return splits
    if devices == question.stages:
        return splits * (factorial(devices) // prod(map(factorial, sizes)))
    orders = factorial(devices) // factorial(devices - question.stages)
    return splits * (sum(1 for _ in _orders(question)) if orders <= LIMIT else orders)


def _orders(question: Question) -> Iterator[tuple[int, ...]]:
    """Every distinct sequence of device classes along the stages."""
    if len(question.classes) == 1:
        return iter([(0,) * question.stages])
    kinds = [kind for kind, members in enumerate(question.classes) for _ in members.devices]
    return iter(sorted(set(permutations(kinds, question.stages))))


def _best(question: Question) -> tuple[float, Split]:
    """Value and split of the lowest of all, by costs in descending order; among equals, by the stages from last to
    first.
    """
    peak = _peaks(question)
    units = [1 if question.equal_budgets else c.memory_bytes for c in question.classes]
    orders = list(_orders(question))

    def ranked() -> Iterator[tuple[list[float], list[tuple[int, int]]]]:
        for cuts in combinations(range(1, question.layers), question.stages - 1):
            edges = (0, *cuts, question.layers)
            peaks = [peak(stage, edges[stage], edges[stage + 1]) for stage in range(question.stages)]
            for kinds in orders:
                costs = [nbytes / units[kind] for nbytes, kind in zip(peaks, kinds, strict=True)]
                yield sorted(costs, reverse=True), list(zip(edges[-2::-1], kinds[::-1], strict=True))

    costs, path = min(ranked())
    free = [iter(c.devices) for c in question.classes]
    starts = [start for start, _ in reversed(path)]
    return costs[0], Split((*starts, question.layers), tuple(next(free[kind]) for _, kind in reversed(path)))


def _peaks(question: Question) -> Callable[[int, int, int], int]:
    """The peak of a stage by its position and layers, each worked out once by walking its layers."""
    microbatches = question.training.microbatches

    @cache
    def peak(stage: int, start: int, stop: int) -> int:
        memory = StageMemory(question.measurement, start, stop, microbatches=microbatches)
        return max(_step_peak(memory), *(_action_peak(memory, s) for s in question.situations(stage)))

    return peak


def _step_peak(memory: StageMemory) -> int:
    step = memory.step
    rest = memory.parameter_bytes + memory.loss_bytes + memory.gradient_bytes
    return rest + max(memory.early_state_bytes + step.first_peak_bytes, step.state_bytes + step.peak_bytes)


def _action_peak(memory: StageMemory, situation: Situation) -> int:
    """Highest bytes during one compute action of a steady step."""
    forward = memory.forward()
    arriving = memory.input_bytes + memory.target_bytes
    retained = arriving + forward.after_bytes - memory.sent_bytes
    rest = memory.parameter_bytes + memory.loss_bytes + memory.step.state_bytes
    rest += memory.gradient_bytes if situation.gradients else 0
    copies = memory.buffer_bytes if situation.recomputed else 0
    match situation.kind:
        case Kind.FORWARD:
            own = arriving + forward.peak_bytes
        case Kind.FORWARD_ONLY:
            own = arriving + memory.checkpoint().peak_bytes
        case Kind.RECOMPUTE:
            own = arriving + memory.recompute().peak_bytes
        case _:
            backward = memory.backward(first_microbatch=not situation.gradients)
            own = retained + memory.output_gradient_bytes + backward.peak_bytes + copies
    received = memory.input_bytes if memory.start else 0
    posted: dict[Kind | None, int] = {
        Kind.FORWARD: received,
        Kind.FORWARD_ONLY: received,
        Kind.BACKWARD: memory.output_gradient_bytes,
    }
    leaving: dict[Kind | None, int] = {
        Kind.FORWARD: memory.sent_bytes,
        Kind.FORWARD_ONLY: memory.checkpoint_sent_bytes,
        Kind.BACKWARD: memory.input_gradient_bytes,
    }
    around = posted.get(situation.receiving, 0) + leaving.get(situation.sending, 0)
    return rest + situation.in_flight * retained + situation.checkpoints * arriving + own + around
