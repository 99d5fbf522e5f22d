"""State offloaded and reloaded, and updates on the host, in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.errors import UsageError
from pipefit.schema.cluster import Cluster
from pipefit.schema.program import parse_program
from pipefit.schema.trace import Category, Trace
from pipefit.simulator import Simulation, simulate
from support.pipelines import equal_profile, make_cluster, make_plan

# One stage of two layers, each with 8 bytes of parameters, 8 of gradients and 16 of optimizer state.
PASS = "0LOAD0 0F0 0B0 "
HOST_UPDATE = (
    "0OFFLOAD[0.gradients]@host 0WAIT_OFFLOAD[0.gradients]@host 0STEP[0:1]@host 0WAIT_STEP[0:1]@host "
    "0RELOAD[0.parameters]@host 0WAIT_RELOAD[0.parameters]@host "
)


def into(state: str) -> str:
    """Reload a state of layer 0."""
    return f"0RELOAD[0.{state}]@host 0WAIT_RELOAD[0.{state}]@host "


def out(state: str) -> str:
    """Offload a state of layer 0."""
    return f"0OFFLOAD[0.{state}]@host 0WAIT_OFFLOAD[0.{state}]@host "


def run(text: str, cluster: Cluster | None = None, *, microbatches: int = 1, steps: int = 2) -> Trace:
    """Return the trace of a program of one stage of two layers on device 0, with updates of three seconds."""
    plan = make_plan(
        equal_profile(2, parameter_bytes=8, update_seconds=3.0),
        [2],
        microbatches=microbatches,
        cluster=cluster or make_cluster(1),
    )
    program = parse_program(f"device 0: {text}", placement=((0,),), microbatches=microbatches)
    return simulate(plan, program=program, steps=steps)


def with_bandwidth(cluster: Cluster, bytes_per_second: float) -> Cluster:
    """Return the cluster with a host memory of this update bandwidth."""
    (host,) = cluster.hosts
    return replace(cluster, hosts=(replace(host, memory_bandwidth=bytes_per_second / 0.8),))


def levels(trace: Trace, category: Category, step: int = 1) -> dict[str, int]:
    """Return the bytes of a category at the peak of every action of a step."""
    return {s.action: s.by_category.get(category, 0) for s in trace.devices[0].memory if s.step == step}


def test_optimizer_state_is_on_the_device_from_its_reload_to_the_join_of_its_offload() -> None:
    """Optimizer state counts from its reload to its offload's join. The first step has none to reload; layer
    1's 16 bytes stay from its first update on.
    """
    trace = run(PASS + into("optimizer") + "0STEP[0:1] " + out("optimizer") + "0STEP[1:2]")
    first, second = (levels(trace, Category.OPTIMIZER, step) for step in range(2))
    assert (first["0F0"], first["0STEP[0:1]"], first["0STEP[1:2]"]) == (0, 16, 16)
    assert (second["0F0"], second["0RELOAD[0.optimizer]@host"]) == (16, 32)
    assert (second["0WAIT_OFFLOAD[0.optimizer]@host"], second["0STEP[1:2]"]) == (32, 16)


STREAMED = (
    f"0LOAD0 {into('parameters')}0F0[0:1] {out('parameters')}0F0[1:2] 0B0[1:2] {into('parameters')}0B0[0:1] 0STEP "
    f"{out('parameters')}"
)


def test_parameters_are_on_the_device_where_they_are_brought_in() -> None:
    """Layer 0's parameters, 8 of 16 bytes, are on the device between reload and offload."""
    found = levels(run(STREAMED), Category.PARAMETERS)
    assert [found[word] for word in ("0F0[0:1]", "0F0[1:2]", "0B0[1:2]", "0B0[0:1]", "0STEP")] == [
        16,
        8,
        8,
        16,
        16,
    ]


def test_gradients_are_away_between_backwards() -> None:
    """Layer 0's gradients, 8 of 16 bytes, are offloaded between backwards; the next backward adds to them and
    needs them back.
    """
    text = f"0LOAD0 0F0 0B0 {out('gradients')}0LOAD1 0F1 {into('gradients')}0B1 0STEP"
    with pytest.raises(UsageError, match="0B1 needs the gradients of layer 0, which is away"):
        run(text.replace(into("gradients"), ""), microbatches=2)
    found = levels(run(text, microbatches=2), Category.GRADIENTS)
    assert [found[word] for word in ("0B0", "0F1", "0B1", "0STEP")] == [16, 8, 16, 16]


def test_a_home_is_its_own_and_what_a_host_needs_for_an_update_is_set_aside() -> None:
    """Optimizer state of 16 bytes and a saved tensor of 16 have a slot each, though they are never offloaded
    together. An update on the host keeps 8 bytes of gradients, 8 of parameters, and 16 of state with 4 of
    scratch.
    """
    saved = "0OFFLOAD0[0.0]@host 0WAIT_OFFLOAD0[0.0]@host 0RELOAD0[0.0]@host 0WAIT_RELOAD0[0.0]@host "
    state = into("optimizer") + "0STEP " + out("optimizer")
    for text, wanted in (
        (f"0LOAD0 0F0 {saved}0B0 {state}", {16: 2}),
        (f"{PASS}{HOST_UPDATE}0STEP[1:2]", {8: 2, 20: 1}),
    ):
        plan = make_plan(equal_profile(2, parameter_bytes=8), [2], microbatches=1)
        program = parse_program(f"device 0: {text}", placement=((0,),), microbatches=1)
        assert {a.slot_bytes: a.slots for a in Simulation(plan, program=program).arenas} == wanted


def test_copies_of_state_take_the_time_of_the_link_and_of_what_has_not_changed_none() -> None:
    """8 bytes move at 4 a second; parameters are copied out only after an update."""
    trace = run(STREAMED, make_cluster(1, bytes_per_second=4.0), steps=1)
    way_in, way_out = "0RELOAD[0.parameters]@host", "0OFFLOAD[0.parameters]@host"
    times = [(e.action, e.start_seconds, e.end_seconds) for e in trace.devices[0].events]
    assert [time for time in times if time[0] in (way_in, way_out)] == [
        (way_in, 0.0, 2.0), (way_in, 6.0, 8.0), (way_out, 16.0, 18.0)
    ]  # fmt: skip


def test_an_update_on_the_host_runs_beside_the_device() -> None:
    """The host moves 2 * (8 + 16) + 8 bytes for a layer: 4 seconds at 14 a second. Gradients and parameters
    take two, while the device updates the other layer.
    """
    cluster = with_bandwidth(make_cluster(1, bytes_per_second=4.0), 14.0)
    start, join = HOST_UPDATE.split("0WAIT_STEP")
    trace = run(f"{PASS}{start}0STEP[1:2] 0WAIT_STEP{join}", cluster, steps=1)
    times = {e.action: (e.start_seconds, e.end_seconds) for e in trace.devices[0].events}
    assert times["0OFFLOAD[0.gradients]@host"] == (6.0, 8.0)
    assert times["0STEP[0:1]@host"] == (8.0, 12.0)
    assert times["0STEP[1:2]"] == (8.0, 11.0)
    assert times["0RELOAD[0.parameters]@host"] == (12.0, 14.0)
    assert set(levels(trace, Category.OPTIMIZER, 0).values()) == {0, 16}  # layer 1's state


def test_a_host_updates_for_one_device_after_the_other() -> None:
    """Two devices that update at the same time share one wire: the host's memory."""
    cluster = with_bandwidth(make_cluster(2), 14.0)
    plan = make_plan(equal_profile(2, parameter_bytes=8), [1, 1], microbatches=1, cluster=cluster)
    update = (
        "{0}OFFLOAD[{0}.gradients]@host {0}WAIT_OFFLOAD[{0}.gradients]@host {0}STEP@host {0}WAIT_STEP@host "
    )
    update += "{0}RELOAD[{0}.parameters]@host {0}WAIT_RELOAD[{0}.parameters]@host"
    text = (
        f"device 0: 0LOAD0 0F0 0SEND_F0 0RECV_B0 0WAIT_SEND_F0 0WAIT_RECV_B0 0B0 {update.format(0)}\n"
        f"device 1: 1RECV_F0 1WAIT_RECV_F0 1LOAD0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0 {update.format(1)}"
    )
    trace = simulate(plan, program=parse_program(text, placement=((0,), (1,)), microbatches=1), steps=1)
    times = [
        (e.start_seconds, e.end_seconds)
        for d in trace.devices
        for e in d.events
        if e.action.endswith("STEP@host")
    ]
    assert times == [(8.0, 12.0), (4.0, 8.0)]


def test_a_host_whose_memory_is_of_unknown_speed_is_refused() -> None:
    """The update's seconds are unknown without the speed of the host's memory."""
    with pytest.raises(UsageError, match="give the host a memory_bandwidth"):
        run(PASS + HOST_UPDATE + "0STEP[1:2]")


AGAIN = HOST_UPDATE.replace("0WAIT_STEP[0:1]@host ", "") + "0WAIT_STEP[0:1]@host"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            PASS + "0STEP " + out("optimizer"),
            r"0STEP needs the optimizer state of layer 0, which is away \(@host\): 0WAIT_RELOAD\[0.optimizer\]@host",
        ),
        (
            PASS + "0RELOAD[0.optimizer]@host 0STEP 0WAIT_RELOAD[0.optimizer]@host",
            "0STEP needs the optimizer state of layer 0, which is on its way back",
        ),
        (
            PASS + out("optimizer"),
            r"0OFFLOAD\[0.optimizer\]@host copies the optimizer state of layer 0, which is away",
        ),
        (out("gradients"), "lacks gradients: the backward of every layer must come before it"),
        (
            PASS + into("gradients"),
            r"0RELOAD\[0.gradients\]@host copies the gradients of layer 0, which is on the device",
        ),
        (PASS + out("gradients") + "0STEP", "0STEP needs the gradients of layer 0, which is away"),
        ("0LOAD0 0F0 " + into("parameters"), "0F0 needs the parameters of layer 0, which is away"),
        (
            into("parameters") + "0LOAD0 0F0 " + out("parameters") + "0B0",
            "0B0 needs the parameters of layer 0, which is away",
        ),
        (PASS + "0STEP[0:1] 0STEP[0:1]", "lacks gradients"),
        (
            PASS + HOST_UPDATE + "0STEP",
            "0STEP updates layers that are also updated at another place in this program",
        ),
        (
            PASS + "0STEP[0:1]@host 0WAIT_STEP[0:1]@host",
            r"0STEP\[0:1\]@host needs an OFFLOAD of their gradients with host, of exactly these layers, in its program",
        ),
        (
            PASS + AGAIN,
            r"0RELOAD\[0.parameters\]@host copies the parameters of layer 0, which is being updated",
        ),
        (
            PASS
            + HOST_UPDATE.replace("0WAIT_OFFLOAD[0.gradients]@host ", "")
            + "0WAIT_OFFLOAD[0.gradients]@host",
            r"0STEP\[0:1\]@host needs missing gradients: 0WAIT_OFFLOAD\[0.gradients\]@host must",
        ),
        ("0LOAD0 0F0 0OFFLOAD[0.versions]@host 0WAIT_OFFLOAD[0.versions]@host", "offloads weight versions"),
        ("0LOAD0 0F0 0OFFLOAD[7.optimizer]@host 0WAIT_OFFLOAD[7.optimizer]@host", "is outside its stage"),
        (
            "0LOAD0 0F0 0OFFLOAD[0.0]@host 0WAIT_OFFLOAD[0.0]@host",
            "offloads state that does not belong to a microbatch",
        ),
        (
            PASS + into("optimizer") + "0OFFLOAD[0.optimizer]@device1 0WAIT_OFFLOAD[0.optimizer]@device1",
            "offloads 0.optimizer, which another action offloads too",
        ),
        (PASS + "0RELOAD[0.optimizer] 0WAIT_RELOAD[0.optimizer]", "lacks a place: write @host"),
    ],
)
def test_what_is_not_there_cannot_be_used(text: str, message: str) -> None:
    """The error names the action, its missing input, the input's place, and the action that
    must come before.
    """
    with pytest.raises(UsageError, match=message):
        run(text, steps=1)


def test_parameters_that_have_not_come_back_from_the_host_cannot_be_used() -> None:
    """Parameters are stale from the end of their update to the join of their reload."""
    reload = "0RELOAD[0.parameters]@host 0WAIT_RELOAD[0.parameters]@host "
    text = "0LOAD1 " + PASS + HOST_UPDATE.replace(reload, "") + "0F1 " + reload
    with pytest.raises(UsageError, match="0F1 needs the parameters of layer 0, which is out of date"):
        run(text, microbatches=2)
