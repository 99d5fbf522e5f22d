"""Classes of equal devices, as few as a search can tell apart.

A search that chooses devices tells apart how many of each class are used, which are too many states where every device
of many has a budget of its own. Then classes become one that has what the smallest of them has: those first by which
the least memory is lost, and those of different kinds last. So what is found fits, and others may be better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipefit.planner.question import DeviceClass, Question

SLIGHT = 0.05  # of a budget: classes that differ by no more are alike
Sizes = Sequence[int]  # devices of every class, the smallest devices first


class FewClasses(NamedTuple):
    """The classes, and the part that budgets keep at least: 1 where all are told apart."""

    classes: tuple[DeviceClass, ...]
    kept: float


def few_classes(
    question: Question, is_cheap: Callable[[Sizes], bool], is_possible: Callable[[Sizes], bool]
) -> FewClasses:
    """The classes of a question, in the order of their lowest device numbers.

    Classes that differ slightly become one until a search is cheap, and any two until it is possible at all; `is_cheap`
    and `is_possible` say so of the sizes of classes.
    """
    left = sorted(question.classes, key=lambda one: one.memory_bytes)
    while len(left) > 1:
        lost = [_lost(question, *pair) for pair in pairwise(left)]
        kinds, _, share = least = min(lost)
        sizes = [len(one.devices) for one in left]
        if (is_possible if kinds or share > SLIGHT else is_cheap)(sizes):
            break
        at = lost.index(least)
        small, large = left[at : at + 2]
        left[at : at + 2] = [DeviceClass(small.memory_bytes, tuple(sorted(small.devices + large.devices)))]
    largest = [max(question.cluster.budgets[device] for device in one.devices) for one in left]
    kept = min(one.memory_bytes / most for one, most in zip(left, largest, strict=True))
    return FewClasses(tuple(sorted(left, key=lambda one: one.devices)), kept)


def _lost(question: Question, small: DeviceClass, large: DeviceClass) -> tuple[bool, float, float]:
    """What one class of both loses: whether kinds differ, budgets of the larger devices, and a part of one of them."""
    kinds = {question.cluster.devices[device].kind.key for device in small.devices + large.devices}
    share = 1 - small.memory_bytes / large.memory_bytes
    return len(kinds) > 1, share * len(large.devices), share
