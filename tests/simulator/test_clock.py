"""Times of actions: closed forms, contention for wires, and a slow oracle."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.schema.actions import COPIES, MESSAGES, SENDS, Action, Kind, message_partner
from pipefit.schema.cluster import Cluster, Route
from pipefit.schema.devices import Link, Member
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, parse_program
from pipefit.schema.trace import Stream
from pipefit.simulator import Simulation, simulate
from support.pipelines import (
    chain_profile,
    equal_profile,
    make_cluster,
    make_layer,
    make_plan,
    offload_all,
    value,
)

COMPUTE_SECONDS = {Kind.FORWARD: 2, Kind.BACKWARD: 3, Kind.STEP: 1}  # for each layer


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 16])
def test_equal_stages_and_free_links_leave_the_closed_form_bubble(
    schedule: str, stages: int, microbatches: int
) -> None:
    """A step takes M+P-1 microbatch times, with a bubble of (P-1)/(M+P-1), on every device."""
    profile = equal_profile(stages, forward_seconds=1.0, backward_seconds=2.0)
    trace = simulate(make_plan(profile, [1] * stages, microbatches=microbatches, schedule=schedule), steps=1)
    assert trace.step_seconds == (3.0 * (microbatches + stages - 1),)
    bubble = (stages - 1) / (microbatches + stages - 1)
    assert trace.utilisation() == pytest.approx([1 - bubble] * stages)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("recompute", ["always", "stages"])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_recomputation_does_not_delay_messages(schedule: str, recompute: Recompute, stages: int) -> None:
    """A step with second forwards takes no longer than M+P-1 microbatches of them; those of the first backward
    may end before its gradients arrive.
    """
    microbatches, layers = 16, 3
    profile = equal_profile(layers * stages, forward_seconds=1.0, backward_seconds=2.0)
    plan = make_plan(
        profile, [layers] * stages, microbatches=microbatches, schedule=schedule, recompute=recompute
    )
    (seconds,) = simulate(plan, steps=1).step_seconds
    turns = microbatches + stages - 1
    assert (4.0 * turns - stages) * layers < seconds <= 4.0 * turns * layers


def test_steps_follow_one_another_without_a_barrier() -> None:
    """Stage 0 starts step two during the last stage's update in step one; step times add up to the end."""
    profile = equal_profile(2, update_seconds=5.0)
    trace = simulate(make_plan(profile, [1, 1], microbatches=2), steps=3)
    ends = [
        max(e.end_seconds for d in trace.devices for e in d.events if e.step == step) for step in range(3)
    ]
    assert [sum(trace.step_seconds[: step + 1]) for step in range(3)] == pytest.approx(ends)
    second = min(e.start_seconds for e in trace.devices[1].events if e.step == 1)
    assert second <= ends[0] + 1.0


def test_a_simulation_is_freed_with_the_last_reference_to_it() -> None:
    """Hundreds of simulations leave no objects that need a garbage collection."""
    plan = make_plan(equal_profile(4, kept_bytes=8), [2, 2], microbatches=2)
    simulation = Simulation(plan, program=offload_all(plan))
    simulation.trace()
    parts = [weakref.ref(simulation), weakref.ref(simulation._timed_program)]
    gc.disable()
    try:
        del simulation
        assert [part() for part in parts] == [None, None]
    finally:
        gc.enable()


def test_durations_follow_the_device_they_run_on() -> None:
    """A device of half the speed takes twice as long if the profile holds no seconds."""
    cluster = make_cluster(2)
    slow = replace(cluster.devices[0].kind, name="slow", flops={"float32": 5e11}, memory_bandwidth=5e10)
    cluster = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], kind=slow)))
    profile = equal_profile(2, forward_seconds=None)
    trace = simulate(make_plan(profile, [1, 1], microbatches=1, cluster=cluster), steps=1)
    fast, half = (d.events[0].end_seconds - d.events[0].start_seconds for d in trace.devices)
    assert half == pytest.approx(2 * fast)


# -------------------------------------------------------------------- contention

FORWARD_CHAIN = """
device 0: 0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0 0LOAD1 0F1 0SEND_F1 0WAIT_SEND_F1
device 1: 1RECV_F0 1WAIT_RECV_F0 1F0 1SEND_F0 1RECV_F1 1WAIT_SEND_F0 1WAIT_RECV_F1
device 2: 2RECV_F0 2WAIT_RECV_F0
"""
LATE_REQUEST = """
device 0: 0LOAD0 0F0 0SEND_F0 0LOAD1 0F1 0LOAD2 0F2 0LOAD3 0F3 0SEND_F1 0WAIT_SEND_F0 0WAIT_SEND_F1
device 1: 1RECV_F0 1RECV_F1 1WAIT_RECV_F0 1F0 1SEND_F0 1WAIT_SEND_F0 1WAIT_RECV_F1
device 2: 2RECV_F0 2WAIT_RECV_F0
"""


def chain(*wires: str, speed: float = 8.0) -> Cluster:
    """Build devices in a row, one link per wire name; a message of 8 bytes takes 8 / speed seconds."""
    links = (
        Link.between(f"device{n}", f"device{n + 1}", bytes_per_second=speed, wire=wire)
        for n, wire in enumerate(wires)
    )
    return make_cluster(len(wires) + 1, *links)


def run(text: str, cluster: Cluster, microbatches: int) -> dict[str, tuple[float, float]]:
    """Return start and end of every event of a program of three stages of one layer, with forwards of a
    second.
    """
    plan = make_plan(equal_profile(3), [1, 1, 1], microbatches=microbatches, cluster=cluster)
    trace = simulate(
        plan,
        program=parse_program(
            text,
            placement=((0,), (1,), (2,)),
            microbatches=microbatches,
        ),
        steps=1,
    )
    return {e.action: (e.start_seconds, e.end_seconds) for d in trace.devices for e in d.events}


def test_two_transfers_over_one_wire_take_twice_as_long() -> None:
    """Messages that are ready together queue on a shared wire."""
    found = run(FORWARD_CHAIN, chain("wire", "wire"), 2)
    assert sorted([found["0SEND_F1"], found["1SEND_F0"]]) == [(3.0, 4.0), (4.0, 5.0)]


def test_two_transfers_over_two_wires_do_not_wait() -> None:
    """The same messages run at once over separate wires."""
    found = run(FORWARD_CHAIN, chain("one", "other"), 2)
    assert found["0SEND_F1"] == found["1SEND_F0"] == (3.0, 4.0)


def test_a_wire_goes_to_the_transfer_that_was_ready_first() -> None:
    """Device 0 runs ahead to a send at second 4; device 1's send, ready at second 3, takes the wire first."""
    found = run(LATE_REQUEST, chain("wire", "wire", speed=8.0), 4)
    assert found["1SEND_F0"] == (3.0, 4.0)
    found = run(LATE_REQUEST, chain("wire", "wire", speed=4.0), 4)
    assert found["0SEND_F0"] == (1.0, 3.0)
    assert sorted([found["1SEND_F0"], found["0SEND_F1"]]) == [(4.0, 6.0), (6.0, 8.0)]


def test_both_ends_of_a_message_are_busy_for_as_long() -> None:
    """A message lasts latency plus bytes over bandwidth, on the comm streams of sender and receiver."""
    cluster = make_cluster(2, bytes_per_second=4.0, latency_seconds=0.5)
    trace = simulate(make_plan(equal_profile(2), [1, 1], microbatches=1, cluster=cluster), steps=1)
    sent, received = ([e for e in d.events if e.stream is Stream.COMMUNICATION] for d in trace.devices)
    assert [e.action for e in sent] == ["0SEND_F0", "0RECV_B0"]
    assert [(e.start_seconds, e.end_seconds) for e in sent] == [(1.0, 3.5), (6.5, 9.0)]
    assert [(e.start_seconds, e.end_seconds) for e in received] == [(1.0, 3.5), (6.5, 9.0)]


def test_gradients_that_nobody_needs_take_no_bytes() -> None:
    """If the boundary's value requires no gradient, the message back lasts the latency alone."""
    integers = value(8, requires_grad=False)
    layers = [replace(make_layer(), outputs=(integers,)), replace(make_layer(), inputs=(integers,))]
    cluster = make_cluster(2, bytes_per_second=4.0, latency_seconds=0.5)
    trace = simulate(make_plan(chain_profile(layers), [1, 1], microbatches=1, cluster=cluster), steps=1)
    messages = [e for e in trace.devices[0].events if e.stream is Stream.COMMUNICATION]
    assert [e.end_seconds - e.start_seconds for e in messages] == [2.5, 0.5]


def test_a_message_waits_for_the_receiver_to_post() -> None:
    """In a rendezvous a message sent at second 1 starts when the receiver posts, after its forward of another
    microbatch.
    """
    text = """
    device 0: 0LOAD0 0F0 0SEND_F0 0LOAD1 0F1 0SEND_F1 0WAIT_SEND_F0 0WAIT_SEND_F1
    device 1: 1RECV_F0 1WAIT_RECV_F0 1F0 1RECV_F1 1WAIT_RECV_F1
    device 2:
    """
    found = run(text, chain("one", "other"), 2)
    assert found["0SEND_F0"] == (1.0, 2.0)
    assert found["0SEND_F1"] == (3.0, 4.0)


def test_stages_on_one_device_hand_over_in_no_time() -> None:
    """A message between two stages of one device is immediate, without a wire."""
    plan = make_plan(equal_profile(2), [1, 1], microbatches=1, cluster=make_cluster(2, bytes_per_second=1.0))
    text = (
        "0LOAD0 0F0 0SEND_F0 1RECV_F0 1WAIT_RECV_F0 0WAIT_SEND_F0 1LOAD0 1F0 0RECV_B0 1B0 1SEND_B0 1WAIT_SEND_B0 "
        "0WAIT_RECV_B0 0B0 0STEP 1STEP"
    )
    trace = simulate(
        plan,
        program=parse_program(
            f"device 0: {text}\ndevice 1:",
            placement=((0,), (0,)),
            microbatches=1,
        ),
        steps=1,
    )
    assert trace.step_seconds == (6.0,)
    assert {e.stream for e in trace.devices[0].events} == {Stream.COMPUTE}
    assert trace.peak_bytes[1] == 0


def test_both_directions_of_a_link_slow_each_other() -> None:
    """Of two messages of 4 seconds, one leaves at second 5 alone, the other at 7; both then go at half speed.
    The first ends at 11, the other finishes alone.
    """
    text = """
    device 0: 0LOAD0 0F0 0SEND_F0 0LOAD1 0F1 0WAIT_SEND_F0 0SEND_F1 0RECV_B0 0WAIT_SEND_F1 0WAIT_RECV_B0 0B0
    device 1: 1RECV_F0 1WAIT_RECV_F0 1RECV_F1 1LOAD0 1F0 1B0 1SEND_B0 1WAIT_RECV_F1 1WAIT_SEND_B0
    """
    link = Link.between("device0", "device1", bytes_per_second=2.0, duplex=0.5)
    profile = equal_profile(2, forward_seconds=1.0, backward_seconds=1.0)
    plan = make_plan(profile, [1, 1], microbatches=2, cluster=make_cluster(2, link))
    trace = simulate(plan, program=parse_program(text, placement=((0,), (1,)), microbatches=2), steps=1)
    found = {e.action: (e.start_seconds, e.end_seconds) for d in trace.devices for e in d.events}
    assert found["0SEND_F0"] == (1.0, 5.0)
    assert found["0SEND_F1"] == (5.0, 11.0)
    assert found["1SEND_B0"] == (7.0, 13.0)


def test_a_way_that_goes_up_and_down_one_link_is_as_fast_as_both_directions_at_once() -> None:
    """Two devices on one wire to the host use both its directions all the time."""
    ends = (
        Link.between(f"device{n}", "host0", bytes_per_second=8.0, wire="uplink", duplex=0.75)
        for n in range(2)
    )
    route = make_cluster(2, *ends).route(Member.device(0), Member.device(1))
    assert route.bytes_per_second == route.both_ways_per_second == 6.0


# -------------------------------------------------------------------- the oracle


class Moving:
    """A ready transfer: its remaining seconds at full speed, and its wires."""

    def __init__(self, wires: tuple[str, ...], seconds: Fraction) -> None:
        self.wires, self.left, self.begun = wires, seconds, False


class Fluid:
    """A slow simulator: time advances to the next end, and every transfer is checked each time."""

    def __init__(self, plan: Plan, program: Program, duplex: Fraction) -> None:
        self.plan, self.program, self.duplex, self.time = plan, program, duplex, Fraction(0)
        self.at = [0] * len(program.actions)
        self.busy = [Fraction(0)] * len(program.actions)  # end time
        self.posted: dict[Action, Fraction] = {}
        self.moving: dict[Action, Moving] = {}  # in the order in which they became ready
        self.ended: set[Action] = set()
        starts = [a for actions in program.actions for a in actions if a.kind in MOVES and not a.wait]
        self.order = {key: n for n, key in enumerate(dict.fromkeys(self.key(a) for a in starts))}

    def run(self) -> Fraction:
        while any(at < len(actions) for at, actions in zip(self.at, self.program.actions, strict=True)):
            while any(self.act(device) for device in range(len(self.at))) or self.settle():
                pass
            speeds = {key: self.speed(one) for key, one in self.moving.items() if one.begun}
            ends = [self.moving[key].left / speed for key, speed in speeds.items()]
            span = min(
                [*ends, *(busy - self.time for busy in self.busy if busy > self.time)], default=Fraction(0)
            )
            for key, speed in speeds.items():
                self.moving[key].left -= span * speed
            self.time += span
        return max(self.busy)

    def settle(self) -> bool:
        """End finished transfers, start ready ones with free wires, and return whether anything changed."""
        over = [key for key, one in self.moving.items() if one.begun and not one.left]
        for key in over:
            del self.moving[key]
            self.ended.add(key)
        if over:
            return True
        for action in sorted(filter(self.ready, self.posted), key=lambda a: self.order[self.key(a)]):
            if self.key(action) not in {*self.moving, *self.ended}:
                route, nbytes = self.route(action)
                self.moving[self.key(action)] = Moving(route.wires, Fraction(route.seconds(nbytes)))
        taken, changed = set[str](), False
        for one in self.moving.values():
            if not one.begun and taken.isdisjoint(one.wires):
                one.begun = changed = True
            taken.update(one.wires)
        return changed

    def speed(self, one: Moving) -> Fraction:
        """Return the speed, lower if an opposite transfer runs."""
        others = {wire for other in self.moving.values() if other.begun for wire in other.wires}
        turned = {"up": "down", "down": "up"}
        back = {f"{name}:{turned[way]}" for name, _, way in (wire.rpartition(":") for wire in one.wires)}
        return self.duplex if others & back else Fraction(1)

    def key(self, action: Action) -> Action:
        return message_partner(action) if action.kind in SENDS else action

    def act(self, device: int) -> bool:
        actions = self.program.actions[device]
        if self.at[device] == len(actions) or self.busy[device] > self.time:
            return False
        action = actions[self.at[device]]
        if action.wait and self.key(action.start) not in self.ended:
            return False
        if action.kind in MOVES and not action.wait:
            self.posted[action] = self.time
        stage = self.plan.stages[action.stage]
        layers = action.layers or (stage.start, stage.stop)
        self.busy[device] = self.time + COMPUTE_SECONDS.get(action.kind, 0) * (layers[1] - layers[0])
        self.at[device] += 1
        return True

    def ready(self, action: Action) -> bool:
        if action.kind in MESSAGES:
            return message_partner(action) in self.posted
        stream = [a for a in self.posted if a.kind is action.kind and a.stage == action.stage]
        return all(a in self.ended for a in stream[: stream.index(action)])

    def route(self, action: Action) -> tuple[Route, int]:
        place, key = self.program.placement, self.key(action)
        here, costs = Member.device(place[key.stage][0]), self.plan.measurement.costs
        if key.subject:
            host = Member.host(0)
            ends = (here, host) if key.kind is Kind.OFFLOAD else (host, here)
            return self.plan.cluster.route(*ends), costs[0].storages[1]
        sender = Member.device(place[message_partner(key).stage][0])
        return self.plan.cluster.route(sender, here), costs[0].inputs[0].nbytes


MOVES = MESSAGES | COPIES


@settings(max_examples=60)
@given(
    schedule=st.sampled_from(["gpipe", "torchgpipe", "1f1b"]),
    stages=st.integers(1, 4),
    layers=st.integers(1, 3),
    microbatches=st.integers(1, 4),
    message=st.integers(1, 4),
    tensor=st.integers(1, 6),
    wires=st.lists(st.sampled_from(["a", "b", None]), min_size=8, max_size=8),
    moving=st.booleans(),
    duplex=st.sampled_from([1.0, 0.75, 0.5]),
)
def test_the_clock_agrees_with_a_slow_oracle(
    schedule: str,
    stages: int,
    layers: int,
    microbatches: int,
    message: int,
    tensor: int,
    wires: list[str | None],
    moving: bool,
    duplex: float,
) -> None:
    """For any shared wires and any slowdown between directions, a step ends as in an exact simulation that
    checks everything each time, with and without offload.
    """

    def link(one: str, other: str, wire: str | None) -> Link:
        return Link.between(one, other, bytes_per_second=1.0, wire=wire, duplex=duplex)

    row = [link(f"device{n}", f"device{n + 1}", wires[n]) for n in range(stages - 1)]
    up = [link(f"device{n}", "host0", wires[4 + n]) for n in range(stages)]
    profile = equal_profile(
        stages * layers,
        input_bytes=message,
        output_bytes=message,
        kept_bytes=tensor,
        forward_seconds=2.0,
        backward_seconds=3.0,
        update_seconds=1.0,
    )
    plan = make_plan(
        profile,
        [layers] * stages,
        microbatches=microbatches,
        schedule=schedule,
        cluster=make_cluster(stages, *row, *up),
    )
    program = offload_all(plan) if moving else lower(plan)
    (seconds,) = Simulation(plan, program=program, steps=1).step_seconds
    assert seconds == pytest.approx(float(Fluid(plan, program, Fraction(duplex)).run()), rel=1e-12)


# -------------------------------------------------------------------- refusals


def test_agreements_that_come_twice_are_two() -> None:
    """Every stage joins its first agreement before its second: two agreements take twice the time of one."""
    plan = make_plan(equal_profile(2), [1, 1], microbatches=1, cluster=make_cluster(2, latency_seconds=1.0))
    lines = [" ".join(map(str, actions)) for actions in lower(plan).actions]

    def seconds(times: int) -> float:
        agrees = [" ".join([f"{stage}AGREE {stage}WAIT_AGREE"] * times) for stage in range(2)]
        text = "\n".join(line.replace(f"{n}STEP", f"{agrees[n]} {n}STEP") for n, line in enumerate(lines))
        program = parse_program(text, placement=((0,), (1,)), microbatches=1)
        return simulate(plan, program=program).step_seconds[0]

    assert seconds(2) - seconds(1) == pytest.approx(seconds(1) - seconds(0))
    assert seconds(1) > seconds(0)


def test_a_deadlock_in_a_sum_names_the_sum() -> None:
    """A deadlocked sum names the waiting device and its action, which lacks a single partner."""
    text = """
    device 0: 0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0 0RECV_B0 0WAIT_RECV_B0 0B0 {} 0LOAD1 0F1 0SEND_F1 0WAIT_SEND_F1
    device 1: 1RECV_F0 1WAIT_RECV_F0 1LOAD0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0 1RECV_F1 1WAIT_RECV_F1 1AGREE 1WAIT_AGREE
    """
    with pytest.raises(
        UsageError, match="device 0 waits at 0WAIT_AGREE until device 1 starts 1AGREE; device 1 waits"
    ):
        parse_program(text.format("0AGREE 0WAIT_AGREE"), placement=((0,), (1,)), microbatches=2)


def test_the_same_question_has_the_same_answer() -> None:
    """Two simulations of one plan give equal traces."""
    plan = make_plan(equal_profile(6), [2, 2, 2], cluster=make_cluster(3, bytes_per_second=5.0))
    program = offload_all(plan)
    assert simulate(plan, program=program, steps=2) == simulate(plan, program=program, steps=2)


@pytest.mark.parametrize(
    ("steps", "microbatches", "stages", "message"),
    [
        (0, 4, 2, "steps must be a whole number from 1 to 1000"),
        (1, 3, 2, "3 microbatches, but the plan has 4"),
        (1, 4, 1, "1 stage, but the plan has 2"),
    ],
)
def test_a_program_of_another_plan_is_refused(
    steps: int, microbatches: int, stages: int, message: str
) -> None:
    """A program with stages or microbatches of another plan is refused, and so are zero steps."""
    plan = make_plan(equal_profile(2), [1, 1], microbatches=4)
    other = lower(make_plan(equal_profile(2), [2 // stages] * stages, microbatches=microbatches))
    with pytest.raises(UsageError, match=message):
        simulate(plan, program=other, steps=steps)
