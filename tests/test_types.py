"""Type checks of documents: a value of another type than its field's is refused at construction."""

from __future__ import annotations

import timeit
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest

from pipefit.errors import UsageError
from pipefit.planner import PlanOptions, plan
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, SavedTensors, State, What
from pipefit.schema.devices import Device, DeviceKind, Host, Link, Member
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.schema.validation import check_types, number, whole
from support.pipelines import KIND, equal_profile, make_cluster, make_plan

TRAINING = {"batch_size": 8, "microbatches": 4}
CLUSTER = {"name": "c", "backend": "emulated", "devices": (Device(kind=KIND, memory_bytes=9),), "hosts": ()}
LINK = {"members": (Member.device(0), Member.host(0)), "bytes_per_second": 1.0}
STAGE = {"start": 0, "stop": 1, "grid": Grid.of(0)}
DECISION = {"stage": 0, "subject": Run(start=0, stop=1), "what": What.RECOMPUTE}


@pytest.mark.parametrize(
    ("kind", "good", "wrong"),
    [
        (Training, TRAINING, {"microbatches": 42.0}),
        (Training, TRAINING, {"batch_size": True}),
        (Training, TRAINING, {"batch_size": "8"}),
        (Training, TRAINING, {"schedule": 3}),
        (Training, TRAINING, {"precision": "float8"}),
        (Training, TRAINING, {"clip_norm": "1.0"}),
        (Training, TRAINING, {"clip_norm": True}),
        (Device, {"kind": KIND, "memory_bytes": 9}, {"memory_bytes": 1e9}),
        (Device, {"kind": KIND, "memory_bytes": 9}, {"kind": "H100"}),
        (Device, {"kind": KIND, "memory_bytes": 9}, {"host": None}),
        (Host, {"memory_bytes": 9}, {"disk_bytes": "1TB"}),
        (
            DeviceKind,
            {"name": "k", "flops": {"float32": 1.0}, "memory_bandwidth": 1.0},
            {"flops": {"float32": "1"}},
        ),
        (DeviceKind, {"name": "k", "flops": {"float32": 1.0}, "memory_bandwidth": 1.0}, {"flops": 1e12}),
        (
            DeviceKind,
            {"name": "k", "flops": {"float32": 1.0}, "memory_bandwidth": 1.0},
            {"flops": {32: 1e12}},
        ),
        (Link, LINK, {"lanes": 2.0}),
        (Link, LINK, {"members": ("device0", "host0")}),
        (Link, LINK, {"wire": 3}),
        (Cluster, CLUSTER, {"devices": [CLUSTER["devices"][0]]}),
        (Cluster, CLUSTER, {"devices": (9,)}),
        (Cluster, CLUSTER, {"backend": "tpu"}),
        (Stage, STAGE, {"stop": 1.0}),
        (Stage, STAGE, {"grid": 0}),
        (Grid, {"devices": (0,)}, {"devices": 0}),
        (Grid, {"devices": (0,)}, {"devices": (False,)}),
        (Grid, {"devices": (0,)}, {"shard": "all"}),
        (Run, {"start": 0, "stop": 1}, {"stop": 1.0}),
        (SavedTensors, {"tensors": ((0, 1),)}, {"tensors": ((0, 1, 2),)}),
        (State, {"start": 0, "stop": 1, "kind": "gradients"}, {"kind": "weights"}),
        (Decision, DECISION, {"stage": 0.0}),
        (Decision, DECISION, {"subject": (0, 1)}),
        (Decision, DECISION, {"what": "recompute"}),
        (PlanOptions, {}, {"stages": 2.0}),
        (PlanOptions, {}, {"recompute": "INVALID"}),
        (PlanOptions, {}, {"recompute": True}),
        (PlanOptions, {}, {"allow_infeasible": 1}),
    ],
)
def test_a_wrong_type_is_refused_by_the_name_of_its_field(
    kind: Any, good: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """The message of every public constructor names the field and the given value, in one sentence."""
    name, value = next(iter(wrong.items()))
    with pytest.raises(UsageError) as refused:
        kind(**{**good, **wrong})
    assert str(refused.value).startswith(f"{kind.__name__}.{name} must be ") and "\n" not in str(
        refused.value
    )
    if not isinstance(value, (tuple, list, dict)):
        assert repr(value) in str(refused.value)


def test_a_plan_refuses_stages_that_are_none() -> None:
    """A manual plan with a list of stages, or with pairs instead of stages, is refused with the expected
    type.
    """
    made = make_plan(equal_profile(2), [1, 1])
    for stages in (list(made.stages), ((0, 1), (1, 2)), None):
        with pytest.raises(UsageError, match=r"Plan\.stages must be a tuple of Stage"):
            replace(made, stages=stages)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Plan\.cluster must be a Cluster, not 'dgx1-v100'"):
        Plan(profile=made.profile, cluster="dgx1-v100", training=made.training, stages=made.stages)  # type: ignore[arg-type]


def test_every_number_in_parts_is_checked() -> None:
    """Separate numbers given to `plan` are refused like those of a `Training`."""
    for parts in (
        {"batch_size": True},
        {"batch_size": "8"},
        {"batch_size": 8, "microbatches": 4.0},
        {"stages": 2.0},
    ):
        with pytest.raises(UsageError, match=f"{list(parts)[-1]} must be an? "):
            plan(equal_profile(4), make_cluster(2), **parts)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    """A class with a field of every form."""

    count: int = 1
    share: float = 0.5
    name: str = ""
    flag: bool = False
    mode: Literal["a", "b"] | None = None
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    rates: dict[str, int | float] | None = None
    nested: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        check_types(self)


@pytest.mark.parametrize(
    "given",
    [
        {"share": 3},
        {"share": np.float64(0.5)},
        {"mode": "b"},
        {"sizes": (1, 2)},
        {"pair": (2, "b")},
        {"rates": {"x": 1, "y": 2.0}},
        {"nested": ((1,), ())},
        {"pairs": ((1, 2), (3, 4))},
    ],
)
def test_what_a_field_means_is_taken(given: dict[str, Any]) -> None:
    """An int is valid for a float, None if allowed, and a tuple without a length takes any number of
    parts.
    """
    assert getattr(Everything(**given), next(iter(given))) is next(iter(given.values()))


@pytest.mark.parametrize(
    "given",
    [
        {"count": 1.0},
        {"count": True},
        {"count": None},
        {"count": Fraction(1)},
        {"share": True},
        {"share": 1j},
        {"name": b"x"},
        {"flag": 1},
        {"mode": "c"},
        {"sizes": (1, 2.0)},
        {"sizes": (True,)},
        {"sizes": [1]},
        {"pair": (1, "a", "b")},
        {"pairs": ((1, 2), (3, 4, 5))},
        {"pairs": ((1, 2), (3, True))},
        {"pairs": ((1, 2), [3, 4])},
        {"pairs": (1, 2)},
        {"pair": ("a", 1)},
        {"rates": {"x": "1"}},
        {"nested": ((1,), (1.0,))},
    ],
)
def test_what_a_field_does_not_mean_is_refused(given: dict[str, Any]) -> None:
    """Neither a flag nor a float is a whole number, at any depth; a text is not a number."""
    with pytest.raises(UsageError, match=rf"Everything\.{next(iter(given))} must be "):
        Everything(**given)


def test_checking_costs_about_a_microsecond() -> None:
    """Checking a stage takes about half a microsecond, and less than ten on any machine, because planners
    create thousands.
    """
    stage = Stage(start=0, stop=3, grid=Grid.of(0))
    seconds = min(timeit.repeat(lambda: check_types(stage), number=2000, repeat=5)) / 2000
    assert seconds < 1e-5


@pytest.mark.parametrize("value", [2.0, True, "2", None, 0, 11])
def test_an_argument_that_is_no_such_number_is_refused(value: Any) -> None:
    """The message names the argument, the valid values, and the given one."""
    with pytest.raises(UsageError, match=r"^steps must be a whole number from 1 to 10, not " + repr(value)):
        whole("steps", value, 1, 10)
    assert whole("steps", 10, 1, 10) == 10


@pytest.mark.parametrize("value", [True, "2", None, 0.0, -1, float("nan"), float("inf"), 1e9])
def test_an_argument_that_is_no_positive_number_is_refused(value: Any) -> None:
    """The same holds for seconds, which may be fractions but neither infinite nor none."""
    with pytest.raises(UsageError, match=r"^patience must be a number above 0 and below 1e\+09, not "):
        number("patience", value, below=1e9)
    assert number("patience", 0.5, below=1e9) == 0.5
