"""Plans for other tools, by the tools' documented grammar; test_read_back.py uses the tools themselves."""

from __future__ import annotations

import ast
import json
import pickle
import re
import shlex
import subprocess
import sys
import types
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

import pipefit
from pipefit.cli import main
from pipefit.errors import UsageError
from pipefit.export import (
    automodel_recipe,
    deepspeed_config,
    kubernetes_job,
    megatron_arguments,
    memory_snapshot,
    slurm_script,
    torchtitan_config,
)
from pipefit.export.traces import snapshot
from pipefit.models import build
from pipefit.models.hugging_face import hf
from pipefit.schema import training
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, SavedTensors, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.json_io import save
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from pipefit.simulator import simulate
from support.known_profiles import profile
from support.pipelines import make_plan, random_profile

LAYERS = 6


@cache
def planned(stages: int = 3, recompute: str = "never", schedule: str = "1f1b", **more: Any) -> Plan:
    """Return a small GPT of six blocks on a preset."""
    task = build(
        "gpt", layers=LAYERS, hidden=16, heads=2, vocabulary=32, sequence=8, tied=more.pop("tied", False)
    )
    return pipefit.plan(
        profile(task, microbatch_size=2, target="cuda"), Cluster.preset("dgx1-v100"), planner="exact",
        microbatches=4, batch_size=8, stages=stages, recompute=recompute, schedule=schedule, data=1, tensor=1, **more,
    )  # fmt: skip


@cache
@cache
def on_grids(data: int, tensor: int = 1, shard: Any = "none") -> Plan:
    """Return the same GPT in two stages with this number of replicas and shards."""
    if shard != "none":
        plan = on_grids(data, tensor)
        stages = tuple(replace(stage, grid=replace(stage.grid, shard=shard)) for stage in plan.stages)
        return replace(plan, stages=stages, prediction=None)
    task = build("gpt", layers=LAYERS, hidden=16, heads=2, vocabulary=32, sequence=8, tied=False)
    return pipefit.plan(
        task, "dgx1-v100", microbatches=4, batch_size=4 * data, schedule="1f1b", stages=2, planner="exact", data=data,
        tensor=tensor, shard="none", certify=False,
    )  # fmt: skip


def arguments(text: str) -> dict[str, str]:
    """Parse a file of arguments as a shell does."""
    lines = [shlex.split(line) for line in text.splitlines()]
    return {name: " ".join(values) for name, *values in lines}


def stages_of(layout: str, size: int) -> list[str]:
    """Return the stages of a layout, by the grammar of Megatron's documentation."""
    rows = layout.split("|")
    assert len(rows) == size and set("".join(rows)) <= set("EtL")
    return rows


def held(plan: Plan) -> list[tuple[bool, int, bool]]:
    """Return for every stage whether it has the embedding, its number of blocks, and whether it has the
    head.
    """
    names = plan.profile.layers
    return [
        (
            any(name.startswith("embedding") for name in names[stage.start : stage.stop]),
            len({name.split(".")[0] for name in names[stage.start : stage.stop] if name.startswith("block")}),
            any(name.startswith("head") for name in names[stage.start : stage.stop]),
        )
        for stage in plan.stages
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_megatrons_layout_has_every_stage_of_the_plan(stages: int) -> None:
    """Embedding, decoder blocks and head are on the same stage as in the plan."""
    plan = planned(stages)
    found = arguments(megatron_arguments(plan))
    rows = stages_of(found["--pipeline-model-parallel-layout"], stages)
    assert [("E" in row, row.count("t"), "L" in row) for row in rows] == held(plan)
    assert found["--num-layers"] == str(LAYERS)
    assert (found["--micro-batch-size"], found["--global-batch-size"], found["--seq-length"]) == (
        "2",
        "8",
        "8",
    )
    assert not [name for name in found if name.startswith("--recompute")]
    assert "--untie-embeddings-and-output-weights" in found
    assert "--untie-embeddings-and-output-weights" not in arguments(megatron_arguments(planned(tied=True)))


def test_megatron_recomputes_what_the_plan_recomputes() -> None:
    """All blocks are recomputed uniformly, or the same number on every stage, that of the stage with the
    most.
    """
    found = arguments(megatron_arguments(planned(3, "always")))
    assert (found["--recompute-method"], found["--recompute-num-layers"]) == ("uniform", "1")
    plan = planned(3, "always")
    some = replace(plan, decisions=tuple(one for one in plan.decisions if one.stage == 1))
    found = arguments(megatron_arguments(some))
    most = held(plan)[1][1]
    assert (found["--recompute-method"], found["--recompute-num-layers"]) == ("block", str(most))


@cache
def of_llama(stages: int = 2) -> Plan:
    """Return a plan of a Llama of four blocks, whose blocks are of many layers with Hugging Face's names."""
    task = hf("llama", num_hidden_layers=4, hidden_size=16, num_attention_heads=2, intermediate_size=32,
                 vocab_size=32, sequence=8)  # fmt: skip
    return pipefit.plan(
        profile(task, microbatch_size=2, target="cuda"), Cluster.preset("dgx1-v100"), planner="exact",
        microbatches=4, batch_size=8, stages=stages, schedule="1f1b", data=1, tensor=1,
    )  # fmt: skip


def deciding(plan: Plan, *parts: str, offload: bool = False, blocks: int = 4) -> Plan:
    """Return the plan with decisions about the layers of the first blocks whose names end so."""
    decisions = []
    for number, call in enumerate(plan.profile.layers):
        name = call.partition("@")[0]
        if name.startswith("model.layers.") and int(name.split(".")[2]) < blocks and name.endswith(parts):
            stage = next(n for n, one in enumerate(plan.stages) if one.start <= number < one.stop)
            subject = SavedTensors(tensors=((number, 0),)) if offload else Run(start=number, stop=number + 1)
            what, place = (What.OFFLOAD, parse_place("host")) if offload else (What.RECOMPUTE, None)
            decisions.append(Decision(stage=stage, subject=subject, what=what, place=place))
    return replace(plan, decisions=tuple(decisions), prediction=None)


MLP = ("mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp", "mlp.down_proj")


@pytest.mark.parametrize(
    ("parts", "modules"),
    [
        (MLP, "mlp"),
        ((*MLP, "layernorm"), "layernorm mlp"),
        (("self_attn",), "core_attn"),
        (("mlp.act_fn",), "mlp"),
    ],
)
def test_megatron_recomputes_modules_of_blocks(parts: tuple[str, ...], modules: str) -> None:
    """Norms, attention and MLPs of all blocks by name; whole blocks if anything else is recomputed, or some blocks."""
    found = arguments(megatron_arguments(deciding(of_llama(), *parts)))
    assert (found["--recompute-granularity"], found["--recompute-modules"]) == ("selective", modules)
    assert "--recompute-method" not in found
    for plan in (deciding(of_llama(), *parts, blocks=3), deciding(of_llama(), *parts, "q_proj")):
        assert arguments(megatron_arguments(plan))["--recompute-granularity"] == "full"


@pytest.mark.parametrize(
    ("parts", "modules"),
    [
        (("input_layernorm",), "attn_norm"),
        (("layernorm",), "attn_norm mlp_norm"),
        (("k_proj", "self_attn"), "core_attn qkv_linear"),
        (("o_proj",), "attn_proj core_attn"),
    ],
)
def test_megatron_offloads_the_inputs_of_modules(parts: tuple[str, ...], modules: str) -> None:
    """The inputs of norms, projections and attention; it has no name for those of dense MLPs."""
    found = arguments(megatron_arguments(deciding(of_llama(), *parts, offload=True)))
    assert found["--offload-modules"] == modules and "--fine-grained-activation-offloading" in found
    with pytest.raises(
        UsageError, match=r"does not offload tensors that model\.layers\.0\.mlp\.down_proj saves"
    ):
        megatron_arguments(deciding(of_llama(), *parts, "down_proj", offload=True))


def test_megatron_updates_on_the_host() -> None:
    """Its offloaded optimizer needs two more arguments, and divides optimizer state."""
    updated = replace(MOVED, what=What.UPDATE)
    found = arguments(megatron_arguments(replace(planned(3), decisions=(updated,), prediction=None)))
    flags = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--use-distributed-optimizer")
    assert all(flag in found for flag in flags)
    with pytest.raises(UsageError, match="only of replicas that divide it: plan with --shard optimizer"):
        megatron_arguments(replace(on_grids(2), decisions=(updated,), prediction=None))


OF_PARALLELISM = ("pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
                  "module_fqns_per_model_part", "data_parallel_replicate_degree", "data_parallel_shard_degree",
                  "fsdp_reshard_after_forward")  # fmt: skip
OF_TRAINING = ("max_norm", "dtype", "mixed_precision_param", "enable_cpu_offload", "disable_cuda_graphs")


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install torchtitan's documented configuration; test_read_back.py has the tool itself."""
    install_titan(
        monkeypatch,
        fields(*OF_PARALLELISM, "pipeline_parallel_microbatch_size"),
        fields(*OF_TRAINING, "local_batch_size", "global_batch_size", "seq_len"),
    )


def install_titan(monkeypatch: pytest.MonkeyPatch, parallelism: Any, training: Any) -> None:
    """Install modules with torchtitan's names and these two classes."""
    names = ("torchtitan", "torchtitan.config", "torchtitan.distributed")
    modules = {
        name: types.ModuleType(name) for name in (*names, "torchtitan.distributed.activation_checkpoint")
    }
    config: Any = modules["torchtitan.config"]
    config.ParallelismConfig, config.TrainingConfig = parallelism, training
    checkpoint: Any = modules["torchtitan.distributed.activation_checkpoint"]
    checkpoint.FullAC = types.SimpleNamespace(Config=fields())
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def fields(*known: str) -> Any:
    """Build a class that takes only these keywords."""

    def make(**given: Any) -> types.SimpleNamespace:
        assert set(given) <= set(known)
        return types.SimpleNamespace(**given)

    return make


@pytest.mark.sample(2)
@pytest.mark.parametrize("stages", [1, 3, 5])
@pytest.mark.usefixtures("titan")
def test_torchtitans_configuration_names_every_module_once(stages: int) -> None:
    """Modules are in order, on the stages of the plan, with its schedule and its batch."""
    plan, found = planned(stages, schedule="gpipe"), dict[str, Any]()
    exec(torchtitan_config(plan), found)
    parts = found["parallelism"].module_fqns_per_model_part
    assert [name for part in parts for name in part] == [
        "tok_embeddings", *(f"layers.{n}" for n in range(LAYERS)), "norm", "lm_head"
    ]  # fmt: skip
    told = [
        ("tok_embeddings" in part, sum("layers." in name for name in part), "lm_head" in part)
        for part in parts
    ]
    assert told == held(plan)
    assert found["parallelism"].pipeline_parallel_schedule == "GPipe"
    asked = found["training"]
    assert (asked.local_batch_size, asked.global_batch_size) == (2 if stages == 1 else 8, 8)
    assert (asked.seq_len, asked.dtype, asked.disable_cuda_graphs) == (8, "float32", True)
    assert found["activation_checkpoint"] is None
    exec(torchtitan_config(planned(3, "always", clip_norm=0.5)), found)
    assert found["activation_checkpoint"] is not None and found["training"].max_norm == 0.5


@pytest.mark.parametrize("stages", [1, 3])
def test_torchtitans_newer_names_count_tokens(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After release 0.3, a microbatch and a step are numbers of tokens, and a pipeline has a number of microbatches."""
    newer = fields(*OF_PARALLELISM, "num_pp_microbatches")
    newer.num_pp_microbatches = 1
    counts = ("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length")
    install_titan(monkeypatch, newer, fields(*OF_TRAINING, *counts))
    found = dict[str, Any]()
    exec(torchtitan_config(planned(stages)), found)
    assert found["parallelism"].num_pp_microbatches == 4
    assert [getattr(found["training"], name) for name in counts] == [2 * 8, 8 * 8, 8]


def in_turn(schedule: str = "gpipe") -> Plan:
    """Return a plan of four stages that are on two devices in turn."""
    plan = planned(4, schedule=schedule)
    stages = tuple(replace(stage, grid=Grid.of(n % 2)) for n, stage in enumerate(plan.stages))
    return replace(plan, stages=stages, prediction=None)


@pytest.mark.usefixtures("titan")
@pytest.mark.parametrize(("make", "name"), [
    (lambda: planned(3, schedule="eager-1f1b"), "1F1B"), (in_turn, "Interleaved1F1B"),
])  # fmt: skip
def test_an_order_that_torch_has_no_name_for_is_a_file(make: Any, name: str) -> None:
    """torchtitan and Automodel read it beside the configuration; the first lines say how to write it."""
    plan, found = make(), dict[str, Any](__file__="/plans/titan_plan.py")
    text = torchtitan_config(plan)
    assert "pipefit export PLAN --to pipelining -o schedule.csv" in text
    exec(text, found)
    asked = found["parallelism"]
    assert asked.pipeline_parallel_schedule_csv == "/plans/schedule.csv"
    assert (asked.pipeline_parallel_schedule, asked.pipeline_parallel_degree) == (name, len(plan.ranks))
    recipe = automodel_recipe(plan)
    assert 'pp_schedule_csv: "schedule.csv"' in recipe and f"pp_size: {len(plan.ranks)}\n" in recipe
    assert "schedule.csv" not in torchtitan_config(planned(3))


def test_stages_that_are_not_in_turn_have_no_place() -> None:
    """torch's engine puts stage s on rank s modulo the number of ranks."""
    plan = in_turn()
    stages = tuple(replace(stage, grid=Grid.of(n // 2)) for n, stage in enumerate(plan.stages))
    with pytest.raises(
        UsageError, match="several stages on a device, not in turn: plan with --stages N, one"
    ):
        torchtitan_config(replace(plan, stages=stages))


@pytest.mark.parametrize("stages", [1, 3])
def test_automodels_recipe_has_hugging_faces_modules(stages: int) -> None:
    """Every module is on one stage, in order, with the plan's batch; infinity disables clipping, which is on."""
    yaml = pytest.importorskip("yaml")
    plan = planned(stages, "always")
    found = yaml.safe_load(automodel_recipe(plan))
    asked = found["distributed"]
    assert (asked["pp_size"], asked["dp_size"], asked["activation_checkpointing"]) == (stages, 1, True)
    assert found["clip_grad_norm"]["max_norm"] == float("inf")
    steps = found["step_scheduler"]
    assert (steps["global_batch_size"], steps["local_batch_size"]) == (8, 8 if stages > 1 else 2)
    if stages > 1:
        parts = asked["pipeline"]["module_fqns_per_model_part"]
        names = [name for part in parts for name in part if name != "model.rotary_emb"]
        assert names == [
            "model.embed_tokens",
            *(f"model.layers.{n}" for n in range(LAYERS)),
            "model.norm",
            "lm_head",
        ]
        told = [
            ("model.embed_tokens" in part, sum("layers." in name for name in part), "lm_head" in part)
            for part in parts
        ]
        assert told == held(plan)
        assert (asked["pipeline"]["pp_microbatch_size"], asked["pipeline"]["pp_schedule"]) == (2, "1f1b")


def test_automodel_needs_a_microbatch_for_each_device() -> None:
    """It checks that, and refuses replicas that divide nothing, and ties across stages."""
    few = replace(planned(5), training=replace(planned(5).training, microbatches=4), prediction=None)
    with pytest.raises(
        UsageError,
        match="needs 5 microbatches for as many devices of a pipeline, not 4: plan with --microbatches 5",
    ):
        automodel_recipe(few)
    with pytest.raises(UsageError, match="replicas that shard none: plan with --shard parameters"):
        automodel_recipe(on_grids(2))
    with pytest.raises(UsageError, match="shared weights of embedding and head: plan with --stages 1"):
        automodel_recipe(planned(3, tied=True))


def test_deepspeeds_configuration_divides_batch_and_blocks() -> None:
    """As DeepSpeed requires, the batch is microbatches of that size; and its partition has all blocks."""
    plan = planned(3, "always", clip_norm=1.0)
    found = json.loads(deepspeed_config(plan))
    batch = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
    assert found["train_batch_size"] == batch == plan.training.batch_size
    bounds = found["pipeline"]["partition"]
    assert bounds == sorted(bounds) and bounds[0] == 0
    assert json.loads(deepspeed_config(planned(3)))["gradient_clipping"] == 0.0  # its default is 1
    assert [plan.profile.edges[bound] for bound in bounds[:-1]] == [stage.start for stage in plan.stages]
    assert plan.profile.edges[bounds[-1]] == len(plan.profile.layers)
    assert (found["pipeline"]["activation_checkpoint_interval"], found["gradient_clipping"]) == (1, 1.0)


@pytest.mark.usefixtures("titan")
def test_replicas_and_shards_are_those_of_the_plan() -> None:
    """Each tool gets the microbatch of one replica, the number of replicas, and their sharded state."""
    plan = on_grids(2, 2)
    found = arguments(megatron_arguments(plan))
    assert (found["--micro-batch-size"], found["--global-batch-size"]) == ("1", "8")
    assert (found["--tensor-model-parallel-size"], found["--pipeline-model-parallel-size"]) == ("2", "2")
    assert "--use-distributed-optimizer" not in found
    divided = on_grids(2, shard="optimizer")
    assert "--use-distributed-optimizer" in arguments(megatron_arguments(divided))
    deepspeed = json.loads(deepspeed_config(divided))
    assert deepspeed["zero_optimization"] == {"stage": 1}
    each = deepspeed["train_micro_batch_size_per_gpu"] * deepspeed["gradient_accumulation_steps"]
    assert (2 * each, each) == (deepspeed["train_batch_size"], 4)
    assert "zero_optimization" not in json.loads(deepspeed_config(on_grids(2)))
    for shard, replicate, divide in (("none", 2, 1), ("parameters", None, 2)):
        titan = dict[str, Any]()
        exec(torchtitan_config(on_grids(2, shard=shard)), titan)
        told = titan["parallelism"]
        assert getattr(told, "data_parallel_replicate_degree", None) == replicate
        assert (told.data_parallel_shard_degree, told.pipeline_parallel_microbatch_size) == (divide, 1)
        assert getattr(told, "fsdp_reshard_after_forward", None) == ("always" if replicate is None else None)
        assert (titan["training"].local_batch_size, titan["training"].global_batch_size) == (4, 8)


def test_all_that_a_tool_cannot_do_is_told_at_once() -> None:
    """One message lists everything, with the options of a plan that the tool supports, to avoid repeated
    planning.
    """
    plan = on_grids(2, 2, "parameters")
    mixed = replace(
        plan,
        decisions=(MOVED,),
        training=replace(plan.training, schedule="eager-1f1b"),
        stages=(plan.stages[0], replace(plan.stages[1], grid=Grid.of(4))),
        prediction=None,
    )
    with pytest.raises(UsageError) as told:
        deepspeed_config(mixed)
    assert str(told.value).startswith(
        "DeepSpeed's pipeline engine does not support schedule eager-1f1b, or replicas or shards that differ from "
        "stage to stage, or replicas that shard parameters, or offloaded tensors ("
    )
    assert str(told.value).endswith(
        "): plan with --schedule 1f1b --data 2 --tensor 1 --shard none or optimizer --planner exact (and --recompute "
        "always if that does not fit)"
    )
    with pytest.raises(
        UsageError,
        match="torchtitan does not support tensor shards: plan with --data 2 --tensor 1",
    ):
        torchtitan_config(plan)


MOVED = Decision(
    stage=0, subject=State(start=0, stop=1, kind="optimizer"), what=What.OFFLOAD, place=parse_place("host0")
)


PARAMETERS = replace(MOVED, subject=State(start=0, stop=1, kind="parameters"))


def in_precision(precision: training.Precision) -> Plan:
    """Return a plan whose training claims another precision."""
    plan = planned(3)
    assumed = replace(plan.profile.assumptions, precision=precision)
    return replace(
        plan,
        profile=replace(plan.profile, assumptions=assumed),
        training=replace(plan.training, precision=precision),
    )


def test_half_precision_is_the_one_that_the_tool_has() -> None:
    """Megatron's and DeepSpeed's half precision keep master weights; torchtitan's pipelines do not."""
    assert "--bf16" in arguments(megatron_arguments(in_precision("master-bfloat16")))
    assert "--fp16" in arguments(megatron_arguments(in_precision("master-float16")))
    assert json.loads(deepspeed_config(in_precision("master-bfloat16")))["bf16"] == {"enabled": True}
    assert "dtype='bfloat16'" in torchtitan_config(in_precision("bfloat16"))
    for write, wrong in ((megatron_arguments, "bfloat16"), (deepspeed_config, "bfloat16"),
                         (torchtitan_config, "master-bfloat16"), (automodel_recipe, "mixed-float16")):  # fmt: skip
        with pytest.raises(UsageError, match=f"does not support precision {wrong}"):
            write(in_precision(wrong))  # type: ignore[arg-type]


def test_torchtitan_ties_no_weights_across_stages() -> None:
    """torchtitan refuses such a model in a pipeline, and so does the export; on one device it is allowed."""
    with pytest.raises(UsageError, match="shared weights of embedding and head: plan with --stages 1"):
        torchtitan_config(planned(3, tied=True))
    assert "tok_embeddings" in torchtitan_config(planned(1, tied=True))


def test_layers_that_share_otherwise_are_refused() -> None:
    """The tools cannot share a parameter of a block with other layers."""
    plan = planned(3)
    shared = SharedParameter(name="block1.norm", users=(0, plan.profile.edges[2]), nbytes=4, gradient_bytes=4,
                             state_bytes=0)  # fmt: skip
    profile = replace(
        plan.profile,
        measurements=tuple(replace(one, shared=(shared,)) for one in plan.profile.measurements),
    )
    with pytest.raises(UsageError, match=r"layers share block1\.norm, but Megatron can only share"):
        megatron_arguments(replace(plan, profile=profile, prediction=None))


@pytest.mark.parametrize("cut", [-1, -2])
@pytest.mark.usefixtures("titan")
def test_torchtitan_has_the_norm_where_the_plan_has_it(cut: int) -> None:
    """The norm is with the head, or with the last block, as the plan cuts."""
    plan, found = planned(3), dict[str, Any]()
    edge = plan.profile.edges[cut - 1]
    stages = (*plan.stages[:-2], replace(plan.stages[-2], stop=edge), replace(plan.stages[-1], start=edge))
    exec(torchtitan_config(replace(plan, stages=stages, prediction=None)), found)
    *_, before, last = found["parallelism"].module_fqns_per_model_part
    assert last == (["lm_head"] if cut == -1 else ["norm", "lm_head"])
    assert ("norm" in before) == (cut == -1)


@pytest.mark.parametrize("write", [megatron_arguments, torchtitan_config, deepspeed_config])
def test_what_a_tool_cannot_do_is_refused(write: Any) -> None:
    """Unsupported schedules, offloaded tensors, stages on several devices, and non-decoder models are refused
    by name.
    """
    plan = planned(3)
    for wrong, words in (
        (planned(3, schedule="pipedream"), "support schedule pipedream: plan with --schedule 1f1b"),
        (in_precision("mixed-bfloat16"), "support precision mixed-bfloat16: plan with --precision float32 or"),
        (replace(plan, decisions=(PARAMETERS,)), "does not support offloaded tensors"),
        (make_plan(random_profile(6), (2, 4), microbatches=2), "is not a decoder"),
        (replace(plan, stages=(replace(plan.stages[0], grid=Grid.of(1)), replace(plan.stages[1], grid=Grid.of(0)),
                               Stage(start=plan.stages[2].start, stop=plan.stages[2].stop, grid=Grid.of(0)))),
         "several stages on a device"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            write(wrong)


@pytest.mark.parametrize("write", [megatron_arguments, torchtitan_config])
def test_models_that_read_no_tokens_are_refused(write: Any) -> None:
    """Equal blocks between two layers are not a language model if images go in; DeepSpeed takes any
    layers.
    """
    plan = planned(3)
    made = replace(plan.profile.fingerprint, lengths=(), inputs=("float32 (n, 256, 64)",))
    pictures = replace(plan, profile=replace(plan.profile, fingerprint=made))
    with pytest.raises(
        UsageError, match=r"reads float32 \(n, 256, 64\), but .* only models of token sequences"
    ):
        write(pictures)
    assert deepspeed_config(pictures) == deepspeed_config(plan)


def test_slurms_script_is_one_that_bash_reads() -> None:
    """Every directive exists in sbatch, with a task for each host and a GPU for each of the plan's
    devices.
    """
    text = slurm_script(planned(3), "a plan.json")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive"}
    assert {option.split("=")[0] for option in re.findall(r"^#SBATCH --(\S+)", text, re.MULTILINE)} == known
    assert "--nodes=1\n" in text and "--gpus-per-node=3\n" in text
    assert "--nproc-per-node=3 " in text and text.rstrip().endswith("'a plan.json'")


def test_kubernetes_gets_a_service_and_a_job() -> None:
    """The result is two YAML documents; the job is indexed, with a pod for each host and a GPU for each
    device.
    """
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(kubernetes_job(planned(3), "it's.json"))
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (1, 1, "Indexed")
    pod = spec["template"]["spec"]
    (worker,) = pod["containers"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "3"}
    assert "--nproc-per-node=3" in worker["command"][2]
    assert shlex.split(worker["command"][2])[-1] == "it's.json"
    assert service["metadata"]["name"] == pod["subdomain"] == job["metadata"]["name"]
    assert {mount["name"] for mount in worker["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


@pytest.mark.parametrize("name", ["it's $HOME.json", "$(date).json", "a$$b.json", "-x y.json"])
def test_a_launch_file_names_the_plan_whatever_it_is_called(name: str) -> None:
    """The name is quoted for the shell, and for Kubernetes, which turns two dollars into one before the shell
    sees it.
    """
    yaml = pytest.importorskip("yaml")
    assert shlex.split(slurm_script(planned(3), name))[-1] == name
    _, job = yaml.safe_load_all(kubernetes_job(planned(3), name))
    (worker,) = job["spec"]["template"]["spec"]["containers"]
    assert shlex.split(worker["command"][2].replace("$$", "$"))[-1] == name


@pytest.mark.parametrize("write", [slurm_script, kubernetes_job])
@pytest.mark.parametrize("name", ["a\nb.json", "a\udcff.json", "a\tb.json"])
def test_a_name_that_is_no_line_of_text_is_refused(name: str, write: Any) -> None:
    """A launch file would name another file, or could not be written."""
    with pytest.raises(UsageError, match="has a name that cannot be written in a launch file"):
        write(planned(3), name)


def levels(events: list[dict[str, Any]]) -> list[int]:
    """Return the live bytes after every event; blocks do not overlap, and only live blocks are freed."""
    there, found = dict[int, int](), list[int]()
    for event in events:
        if event["action"] == "alloc":
            begin, end = event["addr"], event["addr"] + event["size"]
            assert all(end <= other or other + size <= begin for other, size in there.items())
            there[begin] = event["size"]
        else:
            assert there.pop(event["addr"]) == event["size"]
        found.append(sum(there.values()))
    return found


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_snapshot_of_memory_is_as_high_as_the_trace(recompute: str) -> None:
    """The snapshot matches at the peak of every device, and at the end of each action its sample."""
    trace = simulate(planned(3, recompute))
    found = snapshot(trace)
    for device, events in zip(trace.devices, found["device_traces"], strict=True):
        assert max(levels(events), default=0) == device.peak_bytes


def test_torch_draws_the_snapshot() -> None:
    """torch's own tools read the file: the page of a timeline, the list of events and the sums of
    segments.
    """
    read = pickle.loads(memory_snapshot(simulate(planned(3))))
    page = _memory_viz.trace_plot(read)
    assert "<html" in page.lower() or "<script" in page.lower()
    assert "TOTAL MEM" in _memory_viz.trace(read)
    assert _memory_viz.segsum(read)


def test_the_command_writes_every_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Output to a file or to stdout is equal, but bytes go only to a file; a trace is not a plan."""
    monkeypatch.chdir(tmp_path)
    save(planned(3), "plan.json")
    save(simulate(planned(3)), "trace.json")
    for name in ("megatron", "torchtitan", "deepspeed", "slurm", "kubernetes", "memory-viz"):
        assert main(["export", "plan.json", "--to", name, "-o", "made"]) == 0
        capsysbinary.readouterr()
        assert main(["export", "plan.json", "--to", name]) == (2 if name == "memory-viz" else 0)
        assert capsysbinary.readouterr().out == (b"" if name == "memory-viz" else Path("made").read_bytes())
    assert main(["export", "trace.json", "--to", "megatron"]) == 2
    assert b"Megatron's arguments are made of plans" in capsysbinary.readouterr().err
    ast.parse(torchtitan_config(planned(3)))
