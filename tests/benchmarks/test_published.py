"""The converter of published measurements: rows become plans by their columns, or are refused with a reason."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from pipefit import Plan, Training, certify, load_cluster, profile, simulate, timing
from pipefit.fake_cuda.target import FakeTarget
from pipefit.memory import AllocatorSettings
from pipefit.models import build
from pipefit.schema.devices import Member, MemberKind
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import Alike, Work
from pipefit.schema.trace import CATEGORIES, Category

FOLDER = Path(__file__).parents[2] / "benchmarks" / "published"
MODULES = (
    "architectures", "calibration", "clusters", "detection", "encoder_decoder", "images", "models", "page",
    "predictions", "rows", "scores", "setups", "stream_pools", "tasks", "zero_buffers",
)  # fmt: skip


@pytest.fixture(scope="module")
def published() -> Iterator[Any]:
    """The modules of the benchmark, by name; other tests may have modules of the same names."""
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path.insert(0, str(FOLDER))
    found = ModuleType("published")
    for name in MODULES:
        setattr(found, name, __import__(name))
    yield found
    sys.path.remove(str(FOLDER))
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(scope="module")
def main(published: Any) -> Any:
    """The benchmark's `__main__`."""
    spec = spec_from_file_location("published_main", FOLDER / "__main__.py")
    assert spec and spec.loader
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def by_id(published: Any) -> dict[str, Any]:
    """Rows by their names."""
    return {row.id: row for row in published.rows.read()}


def test_every_row_is_read_and_halves_are_about_equal(by_id: dict[str, Any]) -> None:
    """847 rows; the hash of a name decides on its half."""
    assert len(by_id) == 847
    assert 0.4 < sum(row.half == "unseen" for row in by_id.values()) / 847 < 0.6


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("nanotron-019", {"cp": 2}, "context or expert"),
        ("nanotron-019", {"virtual_stages": 2}, "interleaved"),
        ("nanotron-019", {"kind": "D"}, "class D"),
        ("nanotron-019", {"micro_batch": "2560 tokens"}, "number of samples"),
        ("nanotron-019", {"gpu": ""}, "GPU is not said"),
        ("nanotron-019", {"precision": ""}, "precision is not said"),
        ("nanotron-019", {"optimizer": "Adafactor"}, "another optimizer"),
        ("nanotron-019", {"hidden": None}, "sizes of the model"),
    ],
)
def test_a_row_that_cannot_be_expressed_is_refused_with_its_reason(
    published: Any, by_id: dict[str, Any], name: str, changes: dict[str, Any], reason: str
) -> None:
    """The reason names the column, not the row."""
    with pytest.raises(published.rows.Inexpressible, match=reason):
        published.setups.setup_of(replace(by_id[name], **changes))


def test_stages_are_cut_as_nanotron_deals_blocks(published: Any, by_id: dict[str, Any]) -> None:
    """A stage ends with the block that reaches its share of the cost."""
    shape = published.architectures.shape_of(by_id["nanotron-014"])
    assert published.setups._by_cost(shape, 2, 27) == (0, 15, 27)
    assert published.setups._by_cost(shape, 8, 27)[1] == 5


@pytest.mark.parametrize(
    ("name", "layers", "blocks"),
    [
        ("bigscience-142", 81, [7] * 11 + [1]),
        ("bigscience-013", 27, [12, 12]),
        ("bigscience-165", 109, [9] * 12),
    ],
)
def test_deepspeed_fills_stages_up_to_the_largest(
    published: Any, by_id: dict[str, Any], name: str, layers: int, blocks: list[int]
) -> None:
    """78 blocks over 12 stages leave one for the last, as the source says; 106 with embedding and head make 9 each."""
    row = by_id[name]
    found = MagicMock(layers=range(layers))
    edges = published.setups.edges_of(row, found, published.architectures.shape_of(row), row.pp)
    if name != "bigscience-165":  # an embedding before, and a norm and a head after the blocks
        edges = [max(0, min(edge - 1, layers - 3)) for edge in edges]
    else:  # the norm counts with the head
        edges = [min(edge, layers - 1) for edge in edges]
    assert [b - a for a, b in pairwise(edges)] == blocks


def test_ranks_of_deepspeed_send_their_parts(published: Any, by_id: dict[str, Any]) -> None:
    """Two ranks send half of a tensor between stages each, and the loss still reads all logits."""
    small = {"layers": "2", "pp": 2, "dp": 1, "gpus": 4, "nodes": 1, "accumulation": 2, "global_batch": 2}
    setup = published.setups.setup_of(replace(by_id["bigscience-016"], **small))
    whole, sent = (plan.measured(0).costs for plan in (setup.plan, setup.timed))
    assert [layer.outputs[0].nbytes for layer in sent[:-1]] == [2048 * 2048] * 4
    assert [layer.outputs[0].nbytes for layer in whole[:-1]] == [2 * 2048 * 2048] * 4
    assert sent[-1].outputs == whole[-1].outputs


@pytest.mark.parametrize(
    ("name", "gpus", "waits"),
    [("megatron-ci-108", 8, False), ("bigscience-181", 384, True), ("bigscience-181", 80, None)],
)
def test_a_host_adds_its_seconds_if_it_waits_for_kernels(
    published: Any, by_id: dict[str, Any], name: str, gpus: int, waits: bool | None
) -> None:
    """1,000 operations a pass take 110 ms of the host and 2 ms each of an A100's bandwidth, 2 s."""
    row = replace(by_id[name], gpus=gpus)
    cluster, nbytes = load_cluster("dgx-a100"), 1 << 30
    found = profile(build("gpt", layers=1, hidden=64, heads=4), microbatch_size=1)
    measurement = found.measurements[0]
    work = Work.of([Alike(1000, 0, nbytes, "float16")])
    kinds = tuple(replace(kind, forward=work) for kind in measurement.kinds)
    found = replace(found, measurements=(replace(measurement, kinds=kinds),))
    device = timing.seconds(work, cluster.devices[0].kind, "float16")
    got = published.setups.hosted(row, found, cluster, "master-float16").measurements[0].kinds[0].forward
    expected = {False: max(device, 0.11), True: device + 0.11, None: device}[waits]
    assert timing.seconds(got, cluster.devices[0].kind, "float16") == pytest.approx(expected)


def test_jobs_differ_by_heads_and_by_a_change_of_the_machine(by_id: dict[str, Any], main: Any) -> None:
    """The source says not to compare times of its nodes from 25 February on with earlier ones."""
    jobs = {name: main.job_of(by_id[f"bigscience-{name}"]) for name in ("083", "104", "103", "117", "150")}
    assert jobs["083"] == jobs["104"] != jobs["103"]
    assert jobs["117"] == jobs["150"] != jobs["104"]


def test_stages_of_torchgpipe_end_with_the_nearest_block(published: Any) -> None:
    """A source that counts 20 modules, and a chain of 10 layers in blocks of 3, 1, 4 and 2."""
    balanced = published.setups._balanced
    assert balanced((5, 5, 10), (0, 3, 4, 8, 10)) == (0, 3, 4, 10)
    assert balanced((4, 8, 8), (0, *range(1, 11))) == (0, 2, 6, 10)


def test_allocated_bytes_of_a_small_row(published: Any, by_id: dict[str, Any]) -> None:
    """Llama 3.2 1 B with adapters: parameters by hand, and gradients in float32 where the framework has them."""
    setup = published.setups.setup_of(replace(by_id["litgpt-069"], layers="1"))
    hidden, vocab, ffn = 2048, 128256, 8192
    block = hidden * (2048 + 1024) + 2048 * hidden + 3 * hidden * ffn + 2 * hidden
    adapters = 32 * 2 * hidden + 32 * (2048 + 512)
    parameters = 2 * (2 * vocab * hidden + hidden + block + adapters)
    memory = published.predictions.memory(setup, reserved=False)
    state = parameters + 2 * 3 * adapters  # gradients and two moments of the adapters
    logits = 512 * vocab * 4
    assert state + 2 * logits < memory.allocated_bytes < state + 2 * logits + 200 * 2**20


def test_a_fused_loss_makes_one_copy_of_the_logits_less(published: Any, by_id: dict[str, Any]) -> None:
    """llm-foundry's loss keeps logits and their gradient in half precision; torch's has a third copy."""
    row = replace(by_id["llm-foundry-116"], layers="1", dp=1, zero=0, global_batch=3, gpus=1, nodes=1)
    setup = published.setups.setup_of(row)
    memory = published.predictions.memory(setup, reserved=False)
    copy = 2 * 3 * 16384 * 50368
    assert memory.default_bytes - memory.allocated_bytes == copy
    assert memory.allocated_bytes > 2 * copy


def test_gradients_in_another_dtype_replace_those_of_the_plan(published: Any, by_id: dict[str, Any]) -> None:
    """nanotron's gradients take 4 bytes a parameter, whenever they are computed."""
    row = replace(by_id["nanotron-020"], layers="1", dp=1, zero=0, global_batch=4, accumulation=2)
    setup = replace(published.setups.setup_of(row), loss_bytes=(0, 0))
    memory = published.predictions.memory(setup, reserved=False)
    assert setup.gradient_bytes == 4
    parameters = 50257 * 2048 + 4 * 2048**2 + 3 * 2048 * 4096 + 3 * 2048
    added = memory.allocated_bytes - memory.default_bytes
    assert 2 * parameters * 0.99 < added <= 4 * parameters


@pytest.mark.parametrize(("samples", "copies"), [(1, 18), (2, 19)])
def test_a_block_of_nanotron_keeps_copies_of_its_attention(
    published: Any, by_id: dict[str, Any], samples: int, copies: int
) -> None:
    """In units of tokens x hidden x 2 bytes: two norms with input and result (4), joint projection (3), keys and
    values again (2), result (1, for more samples 2), four MLP widths of twice the hidden size (8); and statistics.
    """
    row, activations = replace(by_id["nanotron-020"], dp=1, zero=0), CATEGORIES.index(Category.ACTIVATIONS)

    def kept(layers: int) -> int:
        setup = published.setups.setup_of(replace(row, layers=str(layers)), samples)
        return max(sample.bytes[activations] for sample in simulate(setup.plan).devices[0].memory)

    unit = samples * 4096 * 2048 * 2
    assert copies * unit < kept(2) - kept(1) < (copies + 0.05) * unit


def test_classifiers_have_the_parameters_of_timms_table(published: Any) -> None:
    """The source lists millions of parameters; rows whose source lists none have models of the same names."""
    timm(published)
    with published.rows.ROWS.open(newline="", encoding="utf-8") as file:
        listed = {row["model"]: row["params"] for row in csv.DictReader(file) if row["source"] == "timm"}
    assert len(listed) > 100
    different = {}
    for model, millions in listed.items():
        with FakeTarget("cuda") as fake, fake.assuming_nothing():
            parameters = published.images.build(model, torch.channels_last).parameters()
            count = round(sum(each.numel() for each in parameters) / 1e6, 2)
        if count != float(millions.removesuffix(" M")):
            different[model] = count, millions
    assert not different


def timm(published: Any) -> Any:
    """Return timm; skip the test if it is not installed."""
    try:
        return published.images.timm()
    except published.rows.Inexpressible as missing:
        pytest.skip(str(missing))


def test_a_model_that_timm_lacks_is_refused(published: Any, by_id: dict[str, Any]) -> None:
    """torchvision, which timm imports, is as absent afterwards as before."""
    timm(published)
    assert not isinstance(sys.modules.get("torchvision"), MagicMock)
    with pytest.raises(published.rows.Inexpressible, match="not among those of timm"):
        published.setups.setup_of(replace(by_id["timm-001"], model="resnet18000"))


def test_a_row_says_what_to_install(
    published: Any, by_id: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows do not need timm."""
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(published.images, "timm", published.images.timm.__wrapped__)
    with pytest.raises(published.rows.Inexpressible, match=r"pip install --no-deps timm==0\.6\.7"):
        published.setups.setup_of(by_id["timm-001"])


def test_the_loss_of_ssd_counts_three_empty_boxes_for_each_full_one(published: Any) -> None:
    """By a loop over samples and boxes; the detector's maps have as many boxes as the targets."""
    torch.manual_seed(0)
    places, logits = torch.randn(3, 4, 40), torch.randn(3, 81, 40)
    boxes, classes = torch.randn(3, 4, 40), torch.zeros(3, 40, dtype=torch.long)
    classes[0, :2], classes[1, 5:12] = 7, 80
    expected = []
    for n in range(3):
        entropies = [
            float(torch.logsumexp(logits[n, :, b], 0) - logits[n, classes[n, b], b]) for b in range(40)
        ]
        full = [b for b in range(40) if classes[n, b]]
        empty = sorted((entropies[b] for b in range(40) if b not in full), reverse=True)[: 3 * len(full)]
        apart = [(places[n, :, b] - boxes[n, :, b]).abs() for b in full]
        distances = [float(torch.where(each < 1, each**2 / 2, each - 0.5).sum()) for each in apart]
        expected.append(sum(distances + empty + [entropies[b] for b in full]) / max(1, len(full)))
    found = published.detection.loss((places, logits), (boxes, classes))
    assert float(found) == pytest.approx(sum(expected) / 3, rel=1e-5)
    timm(published)
    with FakeTarget("cuda"):
        maps = published.detection.Detector()(torch.empty(2, 3, 300, 300))
    assert [tuple(each.shape) for each in maps] == [(2, 4, 8732), (2, 81, 8732)]


def test_t5_has_the_parameters_of_its_layers(published: Any, by_id: dict[str, Any]) -> None:
    """One layer each: products, biases and norms by hand; the head has the embedding's weights and a bias."""
    shape = published.encoder_decoder.task_of(by_id["megatron-ci-134"], None)[2]
    hidden, vocab = 768, 29184
    assert (shape.vocab, shape.seq) == (vocab, 128)
    with torch.device("meta"):
        style = published.models.Style(attention="scores", dropout=0.1)
        model = published.encoder_decoder.model(replace(shape, layers=1, seq=512), style)
    attention, mlp, norm = 4 * hidden * (hidden + 1), hidden * (8 * hidden + 5), 2 * hidden
    expected = (vocab + 512) * hidden + 2 * mlp + 3 * attention + 7 * norm + vocab
    assert sum(each.numel() for each in model.parameters()) == expected


def test_a_placeholder_stays_for_every_shape_of_weights(published: Any, by_id: dict[str, Any]) -> None:
    """On one rank as many bytes as distinct weights of T5's linear layers in half precision; two ranks split each."""
    row = by_id["megatron-ci-134"]
    shape, bytes_of = published.encoder_decoder.task_of(row, None)[2], published.setups.placeholder_bytes
    with torch.device("meta"):
        style = published.models.Style(attention="scores", dropout=0.1)
        model = published.encoder_decoder.model(replace(shape, layers=1, seq=512), style)
    shapes = {each.weight.shape for each in model.modules() if isinstance(each, torch.nn.Linear)}
    assert bytes_of(row, shape) == 2 * sum(shape.numel() for shape in shapes)
    square = 2 * 768 * 768  # of queries and outputs, alike on one rank only
    assert bytes_of(replace(row, tp=2), shape) == (bytes_of(row, shape) + square) // 2
    assert bytes_of(replace(row, remarks="--no-gradient-accumulation-fusion"), shape) == 0
    assert bytes_of(by_id["megatron-ci-135"], shape) == 0  # recorded before


def test_allocated_bytes_of_ranks_are_of_blocks(published: Any, by_id: dict[str, Any], main: Any) -> None:
    """`max_memory_allocated` counts the allocator's blocks, which only a dry run knows, and tensors do not fill."""
    row = replace(by_id["megatron-ci-108"], layers="2", dp=2, global_batch=8)
    setup = published.setups.setup_of(row)
    dry = certify(setup.task, setup.plan, target="cuda", allocator=AllocatorSettings())
    blocks = next(each.allocator for each in dry.devices if each.device == setup.rank)
    assert main.predicted(row, setup, {"allocated": 1})["default"] == blocks.allocated_bytes
    workspaces = 2 * (32 << 20)
    assert blocks.allocated_bytes > blocks.requested_bytes + workspaces + 10**6


def test_nodes_have_the_gpus_of_the_row(published: Any, by_id: dict[str, Any]) -> None:
    """Two nodes of four V100, each of which sends the 150 GB/s of its data sheet to the others of its node."""
    cluster = published.clusters.cluster_of(by_id["bigscience-016"], 8)
    assert [device.host for device in cluster.devices] == [0] * 4 + [1] * 4
    for device in range(8):
        member = Member.device(device)
        own = [each for each in cluster.links if member in each.members and len(each.members) == 2]
        between = [each for each in own if all(end.kind is MemberKind.DEVICE for end in each.members)]
        assert sum(each.lanes * each.bytes_per_second for each in between) == 150e9


def test_seconds_of_many_microbatches_follow_from_few(
    published: Any, by_id: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline's step is as long, and needs as much memory, as with all microbatches simulated.

    Each microbatch has an equal part of the seconds that sums of gradients take, so in the bubble there are a few more.
    """
    row = replace(by_id["nanotron-010"], layers="3", tp=1, accumulation=40)
    few = published.setups.setup_of(row)
    assert few.plan.training.microbatches == 6 < few.longer.training.microbatches
    monkeypatch.setattr(published.setups, "MOST_REPEATED", 100)
    every = published.setups.setup_of(row)
    assert every.longer is None
    seconds, memory = published.predictions.seconds, published.predictions.memory
    assert seconds(few) == pytest.approx(seconds(every), rel=1e-4)
    assert memory(few, reserved=False).allocated_bytes == memory(every, reserved=False).allocated_bytes


def test_flat_buffers_reuse_each_other(published: Any) -> None:
    """The bucket, then a part of the norm's copy beyond the test's, then parts in their place, and what is gathered."""
    bucket, largest = 1_000_000_000, 10**9  # bytes and elements, more than 1 MB apart
    reserved = published.zero_buffers.flat_bytes(2 * 10**9, largest, 8, wide=False)
    assert reserved == pytest.approx(bucket + 4 * largest + 8 * largest, rel=1e-3)
    assert published.zero_buffers.flat_bytes(2 * 10**9, largest, 1, wide=True) == pytest.approx(
        4 * largest, rel=1e-3
    )


def test_gradients_of_autocast_are_float32(published: Any, by_id: dict[str, Any]) -> None:
    """`zero_grad` of torch 1.12 keeps gradients, of which there is one a parameter: 4 bytes under autocast."""
    timm(published)
    row = replace(by_id["timm-001"], micro_batch="2")
    memory = published.predictions.memory(published.setups.setup_of(row), reserved=False)
    parameters = 11_689_512  # of ResNet-18
    assert 0 <= memory.allocated_bytes - memory.default_bytes <= 4 * parameters * 1.001


def test_the_table_is_calibrated_on_one_half_alone(published: Any) -> None:
    """Factors are medians of the calibration half, and change no other kind of device."""

    def record(half: str, measured: float) -> dict[str, Any]:
        figures = {"measured": {"seconds": measured}, "predicted": {"seconds": 1.0}}
        return {"half": half, "rates": "H100, half", **figures}

    records = [record("calibration", seconds) for seconds in (1.0, 1.2, 1.4)] + [record("unseen", 9.0)] * 5
    table = published.calibration.factors(records)
    assert table == {"H100, half": pytest.approx(1.2)}
    assert published.calibration.calibrated(records[-1], table)["predicted"]["seconds"] == pytest.approx(1.2)


def test_kendalls_tau_counts_pairs_of_one_job(published: Any) -> None:
    """Three plans of a job, one pair in the wrong order."""

    def record(measured: float, predicted: float, job: str = "a", plan: str = "") -> dict[str, Any]:
        seconds = {"measured": {"seconds": measured}, "predicted": {"seconds": predicted}}
        return {"job": [job], "plan": plan or str(measured), **seconds}

    records = [record(1, 1), record(2, 4), record(3, 3), record(1, 9, "b")]
    assert published.scores.tau(records) == (pytest.approx(1 / 3), 3)
    twice = record(3.5, 3, plan="3")  # as the third, which is no comparison
    assert published.scores.tau([*records, twice]) == (pytest.approx(1 / 5), 5)
    assert published.scores.tau([record(100, 2), record(102, 1), record(104, 3)], apart=0.03) == (1, 1)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("received", "returned", "microbatches", "expected"),
    [
        ((), (), 40, 0),
        ((3 * MIB,), (), 32, 32 * 20 * MIB),  # a segment of 20 MiB on every stream
        ((3 * MIB, 3 * MIB), (), 128, 32 * 40 * MIB),  # six of eight blocks in the first segment
        (
            (3 * MIB,),
            (3 * MIB,),
            32 * 6,
            32 * 40 * MIB,
        ),  # one gradient at a time, beside six received tensors
        ((18 * MIB,), (), 3, 3 * 18 * MIB),  # large tensors have segments of their size
        ((1000,), (1000,), 5, 5 * 2 * MIB),
    ],
)
def test_copies_between_stages_fill_segments_of_their_streams(
    published: Any, received: tuple[int, ...], returned: tuple[int, ...], microbatches: int, expected: int
) -> None:
    """Streams share no segments, and microbatches share 32 streams."""
    assert published.stream_pools.reserved_bytes(received, returned, microbatches) == expected


def test_skips_go_directly_to_the_stage_that_reads_them(published: Any) -> None:
    """Four stages of a U-Net of depth 2: the inner ones receive one tensor, the last also both skips of the first."""
    task = build("unet", depth=2, convolutions=2, width=8, image_size=16, num_classes=2)
    found = profile(task, microbatch_size=1, target="cuda")
    edges = {layer: number for number, layer in enumerate(found.layers)}
    cuts = (0, edges["bottom_1"], edges["bottom_2"], edges["up2"], len(found.layers))
    stages = tuple(
        Stage(start=a, stop=b, grid=Grid(devices=(number,))) for number, (a, b) in enumerate(pairwise(cuts))
    )
    plan = Plan(
        profile=found,
        cluster=load_cluster("4x-v100-16gb"),
        training=Training(batch_size=4, microbatches=4),
        stages=stages,
        decisions=(),
    )
    received, returned = published.stream_pools.copies(plan)
    wide, inner = 4 * 8 * 16 * 16, 4 * 16 * 8 * 8  # of the skips, in bytes
    inmost = [found.at(1).costs[cut].inputs[0].nbytes for cut in cuts[1:-1]]
    assert {number: sorted(sizes) for number, sizes in received.items()} == {
        1: [inmost[0]],
        2: [inmost[1]],
        3: sorted([inmost[2], wide, inner]),
    }
    assert {number: sorted(sizes) for number, sizes in returned.items()} == {
        0: sorted([inmost[0], wide, inner]),
        1: [inmost[1]],
        2: [inmost[2]],
    }


def test_replicas_own_equal_parts_of_state(published: Any) -> None:
    """The optimizer state of two replicas, whose layers pipefit deals, is divided evenly; the sum stays."""
    task = build("gpt", layers=1, hidden=64, heads=2, sequence=32, vocabulary=512)
    found = profile(task, microbatch_size=(4, 2), target="cuda")
    plan = Plan(
        profile=found,
        cluster=load_cluster("2x-v100-16gb"),
        training=Training(batch_size=4, microbatches=1),
        stages=(
            Stage(start=0, stop=len(found.layers), grid=Grid(devices=(0, 1), data=2, shard="optimizer")),
        ),
        decisions=(),
    )
    own = {device.device: device for device in simulate(plan).devices}
    place = CATEGORIES.index(Category.OPTIMIZER)

    def state(device: Any) -> int:
        return max(sample.bytes[place] for sample in device.memory)

    even = [state(device) for device in published.predictions.evenly_divided(plan, own)]
    assert even[0] == even[1]
    assert sum(even) == pytest.approx(sum(map(state, own.values())), abs=1)
    assert len(set(map(state, own.values()))) == 2


def test_ranks_that_divide_dropout_move_half_of_its_bytes(published: Any) -> None:
    """Two ranks move little more than half of one's bytes, where pipefit's, which draw whole masks, move more."""
    shape = published.models.Shape(
        layers=1, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512, seq=256, head_size=16
    )
    parts = {}
    for draws in (True, False):
        style = published.models.Style(attention="scores", dropout=0.1, draws=draws)
        task = published.models.decoder_task(shape, style, None, torch.optim.SGD)
        found = profile(task, microbatch_size=2, target="cuda", tensor=(2,))
        of = {each.tensor: each.costs[1].forward.moved_bytes for each in found.measurements}
        parts[draws] = of[2] / of[1]
    assert parts[False] < 0.65 < 0.8 < parts[True]
