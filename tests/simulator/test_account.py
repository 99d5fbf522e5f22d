"""The simulator against an independent storage-by-storage account of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import ENDLESS, distinct_steps, lower
from pipefit.schema.actions import Action, Kind, Subject
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, State, StateKind, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import Origin
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.schema.program import Program, parse_program, shifted
from pipefit.schema.trace import Category, MemorySample
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.asynchronous_programs import one_program
from support.gallery_samples import seeds
from support.microbatch_size_profiles import sized
from support.offload_choices import movable
from support.pipelines import chain_profile, equal_profile, make_layer, make_plan
from support.random_state_offloads import inside_recomputed
from support.storage_account import Account, Sample, peaks
from support.synthetic_models import (
    AMPLE,
    any_plan,
    any_round,
    any_runs,
    any_training,
    devices,
    hostile,
    layer,
    measurement,
    plan_of,
    small_first,
    training,
    value,
)

KEPT_BY_CATEGORY = tuple(
    Category(name)
    for name in (
        "parameters",
        "gradients",
        "optimizer state",
        "activations",
        "weight versions",
        "boundary buffers",
    )
)


def case(seed: int) -> Plan:
    """Draw any model, split and training; small for small seeds."""
    rng = Random(seed)
    return any_plan(rng, hostile(rng, small_first(seed, largest=8)), any_training(rng))


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", seeds(70, of=200))
def test_the_simulator_finds_the_peaks_of_the_account(seed: int) -> None:
    """Simulator and account agree on every device, over two steps, for layers and training of any kind."""
    plan = case(seed)
    assert Simulation(plan, steps=2).peak_bytes == peaks(plan)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(60, of=200))
def test_replicas_that_divide_state_cost_what_the_account_says(seed: int) -> None:
    """One stage of random layers on two to four replicas agrees sample by sample: divided optimizer state,
    gradients or parameters, any number of buckets, with or without a recomputed run.
    """
    rng = Random(seed)
    size, data = rng.choice(((4, 2), (6, 3), (4, 4)))
    made = hostile(rng, 2 + small_first(seed, largest=7))
    model = replace(
        made,  # no layer changes its inputs, and the loss makes no gradients
        kinds=tuple(replace(kind, fed_back=(), fed_back_bytes=0, unrepeatable="") for kind in made.kinds),
        loss=replace(made.loss, backward_later=made.loss.backward_first, inner_later=made.loss.inner_first),
    )
    grid = Grid(
        devices=tuple(range(data)),
        data=data,
        shard=rng.choice(("optimizer", "gradients", *["parameters"] * 3)),
        buckets=rng.randrange(1, 5),
    )
    plan = Plan(
        profile=sized(model, size, size // data),
        cluster=devices(*[AMPLE] * data),
        training=Training(
            batch_size=3 * size,
            microbatches=3,
            schedule=rng.choice(("gpipe", "1f1b")),
            clip_norm=rng.choice((None, 1.0)),
        ),
        stages=(Stage(start=0, stop=len(model.layers), grid=grid),),
    )
    plan = replace(plan, decisions=any_runs(rng, plan))
    assert Simulation(plan, steps=2).peak_bytes == peaks(plan)
    assert_samples_agree(plan, lower(plan))


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", seeds(40, of=150))
def test_runs_of_layers_that_go_forward_again_cost_what_the_account_says(seed: int) -> None:
    """Recomputed runs inside stages, for some microbatches, early or just in time, cost as in the account."""
    rng = Random(seed)
    model = hostile(rng, 1 + small_first(seed, largest=7))
    plan = any_plan(rng, model, any_training(rng), recompute="never")
    plan = replace(plan, decisions=any_runs(rng, plan))
    assert Simulation(plan, steps=2).peak_bytes == peaks(plan)
    assert_samples_agree(plan, lower(plan))


def test_values_in_one_storage_have_copies_apart() -> None:
    """A run that begins with a layer in place on two values of one storage copies each value before it passes
    it on.
    """
    two, own = (value(16), value(16)), Origin(kind="own", index=0)
    passes_on = (Origin(kind="input", index=0), Origin(kind="input", index=1))
    chain = (
        layer((value(16),), two, origins=(own, own), storages=(16,)),
        layer(two, two, origins=passes_on, storages=(), saved=(), mutates_inputs=True),
        layer(two, (value(8),), scratch_bytes=100),
    )
    plan = plan_of(measurement(chain, layer((value(8),), (value(4),))), training("gpipe", 2), [0, 3])
    run = Decision(stage=0, subject=Run(start=1, stop=3), what=What.RECOMPUTE)
    plan = replace(plan, decisions=(run,))
    assert Simulation(plan, steps=2).peak_bytes == peaks(plan)
    assert_samples_agree(plan, lower(plan))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(30, of=60))
def test_devices_of_several_stages_cost_what_the_account_says(seed: int) -> None:
    """Stages that alternate between two devices cost as in the account."""
    rng = Random(seed)
    model = hostile(rng, 2 + small_first(seed, largest=7))
    how = replace(any_training(rng), schedule=rng.choice(("gpipe", "torchgpipe")))
    plan = any_round(rng, model, how)
    assert Simulation(plan, steps=2).peak_bytes == peaks(plan)
    assert_samples_agree(plan, lower(plan))


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", seeds(35, of=100))
def test_every_sample_of_a_trace_is_the_accounts(seed: int) -> None:
    """Every action's highest bytes and their categories are the account's; an action without a sample changes
    nothing.
    """
    plan = case(seed)
    assert_samples_agree(plan, lower(plan))


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", seeds(35, of=120))
def test_pieces_and_moved_tensors_cost_what_the_account_says(seed: int) -> None:
    """Forwards and backwards in pieces, with saved tensors offloaded and reloaded at any legal moment, cost
    as in the account.
    """
    rng = Random(seed)
    model = hostile(rng, 1 + small_first(seed, largest=7))
    plan = any_plan(rng, model, any_training(rng), recompute="never")
    program = with_moves(rng, plan, in_pieces(rng, plan))
    assert Simulation(plan, program=program, steps=2).peak_bytes == peaks(plan, program=program)
    assert_samples_agree(plan, program)


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", seeds(30, of=60))
def test_cutting_stages_into_pieces_changes_no_peak(seed: int) -> None:
    """By the account, pieces peak with whole stages, whatever the layers share, unless a storage held until
    the end of a backward is freed earlier by its piece.
    """
    rng = Random(seed)
    plan = any_plan(rng, hostile(rng, 1 + small_first(seed, largest=7)), any_training(rng), recompute="never")
    in_parts, whole = peaks(plan, program=in_pieces(rng, plan)), peaks(plan)
    if any(cost.lasting_storages for cost in (*plan.measurement.kinds, plan.measurement.loss)):
        assert all(part <= entire for part, entire in zip(in_parts, whole, strict=True))
    else:
        assert in_parts == whole


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(30))
def test_a_step_leaves_what_it_found(seed: int) -> None:
    """By the account, after its first step, which allocates optimizer state, a device is as full as before a
    step.
    """
    plan = case(seed)
    for device in range(len(plan.cluster.devices)):
        samples = Account(plan, device, steps=3).samples
        ends = [[s.after for s in samples if s.step == step][-1:] for step in range(3)]
        assert ends[0] == ends[1] == ends[2]
        second, third = ([s._replace(step=0) for s in samples if s.step == step] for step in (1, 2))
        assert second == third


@pytest.mark.sample(5)
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("seed", seeds(35, of=60))
def test_endless_schedules_cost_what_the_account_says(schedule: str, seed: int) -> None:
    """Simulated asynchronous steps match the account up to the steady state and one step more; the account
    reads one program without knowing of steps.
    """
    rng = Random(seed)
    plan = endless_plan(rng, schedule, hostile(rng, small_first(seed, largest=8)))
    steps = distinct_steps(plan) + 1
    simulation, count = Simulation(plan, steps=steps), plan.training.microbatches
    whole = one_program(plan, (count,) * steps)
    accounts = [Account(plan, device, program=whole, steps=1) for device in range(len(plan.cluster.devices))]
    assert simulation.peak_bytes == tuple(account.peak_bytes for account in accounts)
    for device, account in zip(simulation.trace().devices, accounts, strict=True):
        samples = list(in_steps(plan, account, steps))
        assert_device_agrees(device.memory, samples)
        last, one_more = ([s._replace(step=0) for s in samples if s.step == steps - k] for k in (2, 1))
        assert last == one_more, "later steps differ after all"


@pytest.mark.sample(5)
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("seed", seeds(25, of=40))
def test_a_drain_needs_no_more_than_the_steps_before_it(schedule: str, seed: int) -> None:
    """By the account, a drain after any number of steps stays within a plan's peaks."""
    rng = Random(seed)
    plan = endless_plan(rng, schedule, hostile(rng, small_first(seed, largest=8)))
    count, peaks = plan.training.microbatches, Simulation(plan).peak_bytes
    for steps in (1, rng.randrange(1, distinct_steps(plan) + 1)):
        whole = one_program(plan, (count,) * steps, drained=True)
        for device, most in enumerate(peaks):
            assert Account(plan, device, program=whole, steps=1).peak_bytes <= most


def endless_plan(rng: Random, schedule: str, model: Measurement) -> Plan:
    """Draw a split over up to four devices without parameters shared between stages; runs are recomputed,
    saved tensors and weights offloaded, for a share of the microbatches; versions hold the weights or
    everything.
    """
    stages = rng.randrange(1, min(4, len(model.layers)) + 1)
    how = training(schedule, rng.randrange(stages if schedule == "pipedream-2bw" else 1, 8))
    how = replace(how, versions=rng.choice(("weights", "weights", "everything")))
    plan = any_plan(rng, model, how, stages=stages, recompute=rng.choice(("never", "never", "always")))
    if plan.summed:
        plan = any_plan(rng, replace(model, shared=()), how, stages=stages, recompute="never")
    runs = plan.decisions or tuple(
        replace(run, microbatches=any_share(rng, plan)) for run in any_runs(rng, plan)
    )
    plan = replace(plan, decisions=runs)
    plan = moved(plan, tuple(any_moves(rng, plan))) if rng.random() < 0.6 else plan
    weights = [one for kind in ("versions", "parameters") for one in any_weights(rng, plan, kind)]
    return replace(plan, decisions=(*plan.decisions, *weights))


def any_weights(rng: Random, plan: Plan, kind: StateKind) -> Iterator[Decision]:
    """Draw stages with older weights or the newest ones of some layers at the host, or those
    of all layers.
    """
    last_has_none = kind == "versions" and plan.training.schedule == "pipedream"
    stages = plan.stages[:-1] if last_has_none else plan.stages
    for number, stage in enumerate(stages if rng.random() < 0.5 else ()):
        layers = (stage.start, stage.stop)
        if not any(shared.gradient_bytes for shared in plan.measurement.shared):
            apart = set(range(stage.start, stage.stop + 1)) - inside_recomputed(plan, number)
            layers = tuple(sorted(rng.sample(sorted(apart), 2)))
        costs = plan.measurement.costs[slice(*layers)]
        frozen = any(cost.trained_bytes < cost.parameter_bytes for cost in costs) or plan.measurement.shared
        if any(cost.trained_bytes for cost in costs) and not (kind == "parameters" and frozen):
            yield Decision(
                stage=number,
                subject=State(start=layers[0], stop=layers[1], kind=kind),
                what=What.OFFLOAD,
                place=parse_place("host"),
                behind=rng.choice((0, 1, 1, 2, 4)),
                ahead=rng.choice((0, 0, 1, 2, 3)),
            )


def moved(plan: Plan, moves: tuple[Decision, ...]) -> Plan:
    """Return the plan with these moves, unless a move names the copy given to a recomputed layer in place."""
    moving = replace(plan, decisions=(*plan.decisions, *moves))
    try:
        assert Simulation(moving, steps=1).effects
    except UsageError as error:
        if "offloads a missing tensor" not in str(error):
            raise
        return plan
    return moving


def any_share(rng: Random, plan: Plan) -> Microbatches:
    """Draw a share of the microbatches that is the same in every step."""
    count = plan.training.microbatches
    every = rng.choice([number for number in range(1, count + 1) if count % number == 0])
    return Microbatches(rng.randint(1, every), every, rng.randrange(every))


def any_moves(rng: Random, plan: Plan) -> Iterator[Decision]:
    """Draw saved tensors that go to the host in every stage, alone or together."""
    for number in range(len(plan.stages)):
        names = movable(plan, number)
        rng.shuffle(names)
        for tensors in filter(None, (names[:1], names[1:3])):
            yield Decision(
                stage=number,
                subject=SavedTensors(tensors=tuple(tensors)),
                what=What.OFFLOAD,
                place=parse_place("host"),
                microbatches=any_share(rng, plan),
                behind=rng.choice((0, 1, 1, 2, 4)),
                ahead=rng.choice((0, 0, 1, 2, 3)),
            )


def in_steps(plan: Plan, account: Account, steps: int) -> Iterator[Sample]:
    """Return the samples of an account of several steps, with actions counted per step."""
    left, entered = iter(account.samples), 0
    for step in range(steps):
        for action in lower(plan, entered=entered).actions[account.number]:
            sample = next(left)
            assert sample.action == shifted(action, entered)
            yield sample._replace(step=step, action=action)
        entered += plan.training.microbatches


# -------------------------------------------------------------------- programs


def in_pieces(rng: Random, plan: Plan) -> Program:
    """Return the plan's program, forwards and backwards of a stage cut at the same places.

    Users of a shared parameter stay together: separate pieces would add their gradients up one by one.
    """
    cuts = [_cuts(rng, plan, number) for number in range(len(plan.stages))]
    return _rewritten(plan, lower(plan), lambda action: _cut(plan, action, cuts[action.stage]))


def _cuts(rng: Random, plan: Plan, number: int) -> list[int]:
    stage = plan.stages[number]
    spans = [[u for u in s.users if stage.start <= u < stage.stop] for s in plan.measurement.shared]
    together = {k for users in spans if users for k in range(users[0] + 1, users[-1] + 1)}
    free = [k for k in range(stage.start + 1, stage.stop) if k not in together]
    return [k for k in free if rng.random() < 0.5]


def _cut(plan: Plan, action: Action, cuts: Sequence[int]) -> list[Action]:
    stage = plan.stages[action.stage]
    if action.kind not in (Kind.FORWARD, Kind.BACKWARD):
        return [action]
    edges = [stage.start, *cuts, stage.stop]
    pieces = [action._replace(layers=ends) for ends in pairwise(edges)]
    return pieces if action.kind is Kind.FORWARD else pieces[::-1]


def with_moves(rng: Random, plan: Plan, program: Program) -> Program:
    """Return the program with some saved tensors moved to the host and back at legal moments."""
    for _ in range(6):
        stage = rng.randrange(len(plan.stages))
        layer = rng.randrange(plan.stages[stage].start, plan.stages[stage].stop)
        saved = plan.measurement.costs[layer].saved
        movable = [tensor.index for tensor in saved if tensor.origin.kind in ("own", "input")]
        if not movable:
            continue
        move = Action(
            Kind.OFFLOAD, stage, rng.randrange(plan.training.microbatches),
            subject=Subject(layer, rng.choice(movable)), place=parse_place("host"),
        )  # fmt: skip
        try:
            tried = _moved(rng, plan, program, move, layer)
            assert Simulation(plan, program=tried).effects
        except UsageError:
            continue
        program = tried
    return program


def _moved(rng: Random, plan: Plan, program: Program, move: Action, layer: int) -> Program:
    """Return OFFLOAD and RELOAD with their joins, in this order, between the layer's forward and backward."""
    device = plan.stages[move.stage].device
    actions = list(program.actions[device])
    own = [k for k, a in enumerate(actions) if (a.stage, a.microbatch) == (move.stage, move.microbatch)]
    after = next(k for k in own if actions[k].kind is Kind.FORWARD and _holds(plan, actions[k], layer))
    before = next(k for k in own if actions[k].kind is Kind.BACKWARD and _holds(plan, actions[k], layer))
    places = sorted(rng.randrange(after + 1, before + 1) for _ in range(4))
    back = move._replace(kind=Kind.RELOAD)
    for place, action in reversed(list(zip(places, (move, move.join, back, back.join), strict=True))):
        actions.insert(place, action)
    devices = (*program.actions[:device], tuple(actions), *program.actions[device + 1 :])
    return Program(placement=program.placement, microbatches=program.microbatches, actions=devices)


def _holds(plan: Plan, action: Action, layer: int) -> bool:
    first, end = action.layers or (plan.stages[action.stage].start, plan.stages[action.stage].stop)
    return first <= layer < end


def _rewritten(plan: Plan, program: Program, rewrite) -> Program:
    devices = tuple(
        tuple(new for action in actions for new in rewrite(action)) for actions in program.actions
    )
    return Program(placement=program.placement, microbatches=plan.training.microbatches, actions=devices)


# -------------------------------------------------------------------- comparing samples


def assert_samples_agree(plan: Plan, program: Program) -> None:
    """Check the samples of a trace against those of the account."""
    trace = Simulation(plan, program=program, steps=2).trace()
    for number, device in enumerate(trace.devices):
        assert_device_agrees(device.memory, Account(plan, number, program=program).samples)


def assert_device_agrees(memory: Sequence[MemorySample], samples: Sequence[Sample]) -> None:
    """Check the samples of a device against those of its account."""
    told = {(sample.step, sample.action, k) for k, sample in _numbered(memory)}
    silent = [s for k, s in _numbered(samples) if (s.step, str(s.action), k) not in told]
    assert all(s.before == s.after and s.peak_bytes == sum(s.before.values()) for s in silent)
    known = {(s.step, str(s.action), k): s for k, s in _numbered(samples)}
    for k, sample in _numbered(memory):
        assert_sample_agrees(sample, known[sample.step, sample.action, k])


def _numbered(samples):
    """Number samples by the earlier occurrences of their action in the step."""
    seen: dict[tuple[int, str], int] = {}
    for sample in samples:
        key = sample.step, str(sample.action)
        seen[key] = seen.get(key, -1) + 1
        yield seen[key], sample


def assert_sample_agrees(sample: MemorySample, expected: Sample) -> None:
    """Check the total; growing categories count with the bytes after the action, shrinking ones with those
    before.

    If the peak is below that sum, shrinking categories have given way, in any proportion. Bytes above the sum
    belong to the kernel, up to its workspace; the rest is temporary.
    """
    assert sample.total_bytes == expected.peak_bytes, sample.action
    found = sample.by_category
    most = {c: max(expected.before.get(c, 0), expected.after.get(c, 0)) for c in KEPT_BY_CATEGORY}
    resting = sum(most.values())
    above = max(0, expected.peak_bytes - resting)
    inside = min(expected.workspace_bytes, above)
    assert (found.get(Category.WORKSPACE, 0), found.get(Category.TEMPORARY, 0)) == (inside, above - inside)
    if expected.peak_bytes >= resting:
        assert {c: found.get(c, 0) for c in KEPT_BY_CATEGORY} == most
    for category in KEPT_BY_CATEGORY:
        least = min(expected.before.get(category, 0), expected.after.get(category, 0))
        assert least <= found.get(category, 0) <= most[category]


# -------------------------------------------------------------------- the account by hand

# A layer of `make_layer`: parameters 32, input 8 (saved), output 8 (not saved), saved tensors 16, scratch 4.
# The loss saves 4 and makes 4 of scratch; its target has 4. The last stage holds 4 a microbatch and a seed
# of 4.


def levels(text: str, *, layers: int = 3, split: Sequence[int] = (3,)) -> dict[str, int]:
    """Return device 0's bytes after each action of a program, minus its bytes at rest."""
    plan = make_plan(equal_profile(layers), split, microbatches=1)
    others = "".join(f"\ndevice {number}:" for number in range(1, len(split)))
    program = parse_program(
        f"device 0: {text}{others}", placement=tuple((n,) for n in range(len(split))), microbatches=1
    )
    account = Account(plan, 0, program=program, steps=1)
    return {str(s.action): sum(s.after.values()) - account.rest_bytes for s in account.samples}


def test_pieces_of_a_stage_hold_their_boundary_values() -> None:
    """A forward piece adds its saved tensors and its value, which is freed after the next piece unless saved
    there.
    """
    found = levels("0LOAD0 0F0[0:2] 0F0[2:3] 0B0[2:3] 0B0[0:2]")
    assert list(found.values()) == [8 + 4, 2 * 24 + 8 + 4, 3 * 24 + 4, 2 * 24 + 8 + 32, 3 * 32]


def test_a_run_is_recomputed_inside_a_stage() -> None:
    """N keeps its input and adds its value; R adds its layers' saved tensors; each backward frees those of
    its layers.
    """
    found = levels("0LOAD0 0F0[0:1] 0N0[1:2] 0F0[2:3] 0R0[1:2] 0B0[2:3] 0B0[1:2] 0B0[0:1]")
    target, saved, passed = 4, 24, 8
    assert list(found.values()) == [
        8 + target,
        saved + passed + target,  # layer 1 would save layer 0's value
        saved + 2 * passed + target,  # it is kept, next to layer 1's value
        saved + passed + saved + 4,  # layer 2 saved the latter, and the loss 4
        saved + saved + saved + 4,  # layer 1 has saved its input and 16 more
        saved + saved + passed + 32,  # a gradient travels, another stays
        saved + passed + 2 * 32,
        3 * 32,
    ]


def test_a_value_that_its_layer_saves_lives_twice_while_its_forward_runs_again() -> None:
    """The next layer holds the first instance of the value until that layer's backward, which
    then frees it.
    """
    cost = make_layer()
    output = replace(cost.saved[0], nbytes=8, origin=Origin(kind="own"))
    plan = make_plan(chain_profile([replace(cost, saved=(output, cost.saved[1]))] * 2), [2], microbatches=1)
    text = "device 0: 0LOAD0 0N0[0:1] 0F0[1:2] 0R0[0:1] 0B0[1:2] 0B0[0:1]"
    account = Account(plan, 0, program=parse_program(text, placement=((0,),), microbatches=1), steps=1)
    found = [sum(s.after.values()) - account.rest_bytes for s in account.samples]
    assert found == [8 + 4, 8 + 8 + 4, 8 + 8 + 8 + 4, 8 + 8 + 8 + 8 + 4, 8 + 8 + 8 + 32, 2 * 32]


def test_a_tensor_that_is_away_does_not_count() -> None:
    """WAIT_OFFLOAD frees the storage and RELOAD allocates it; the other two change nothing."""
    move = "0OFFLOAD0[0.0]@host 0WAIT_OFFLOAD0[0.0]@host 0RELOAD0[0.0]@host 0WAIT_RELOAD0[0.0]@host"
    found = list(levels(f"0LOAD0 0F0 {move} 0B0").values())
    assert [b - a for a, b in pairwise(found[1:])] == [0, -16, 16, 0, 3 * 32 - (3 * 24 + 4)]
