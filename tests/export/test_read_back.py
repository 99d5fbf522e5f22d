"""Plans in other tools' files, read by the installed tools themselves: `make tools` installs them."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from export.test_other_tools import LAYERS, arguments, held, in_precision, in_turn, on_grids, planned
from export.test_trainers import SAVED, UPDATED, WEIGHTS, whole
from pipefit.export import (
    automodel_recipe,
    deepspeed_config,
    kubernetes_job,
    megatron_arguments,
    pipelining_csv,
    slurm_script,
    torchtitan_config,
)
from pipefit.planner import plan
from pipefit.schema.decisions import Decision
from pipefit.schema.grids import Sharding
from pipefit.schema.json_io import load_cluster
from pipefit.schema.plan import Plan
from support.pipelines import random_profile


def installed(name: str) -> Any:
    """Return a module of another tool; skip the test if it is missing."""
    return pytest.importorskip(name, exc_type=ImportError)


def some_recomputed() -> Plan:
    """Return a plan that recomputes only the blocks of its second stage."""
    plan = planned(3, "always")
    return replace(plan, decisions=tuple(one for one in plan.decisions if one.stage == 1))


PLANS: dict[str, Callable[[], Plan]] = {
    "one stage": lambda: planned(1),
    "recomputed and clipped": lambda: planned(3, "always", clip_norm=0.5),
    "tied": lambda: planned(5, tied=True),
    "recomputed in part": some_recomputed,
    "gpipe": lambda: planned(5, schedule="gpipe"),
    "master weights": lambda: in_precision("master-bfloat16"),
    "half": lambda: in_precision("bfloat16"),
    "replicas": lambda: on_grids(2),
    "replicas of shards": lambda: on_grids(2, 2),
    "divided state": lambda: on_grids(2, shard="optimizer"),
    "divided parameters": lambda: on_grids(2, shard="parameters"),
    "in turn": in_turn,
    "eager": lambda: planned(3, schedule="eager-1f1b"),
}
MEGATRON = ("one stage", "recomputed and clipped", "tied", "recomputed in part", "master weights",
            "replicas of shards", "divided state")  # fmt: skip
TITAN = (
    "one stage",
    "recomputed and clipped",
    "gpipe",
    "half",
    "replicas",
    "divided parameters",
    "in turn",
    "eager",
)
AUTOMODEL = ("one stage", "recomputed and clipped", "half", "divided parameters", "in turn", "eager")


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_core_reads_layout_batch_and_recomputation(name: str) -> None:
    """Megatron's classes accept the arguments, and have the plan's stages and number of microbatches."""
    layout = installed("megatron.core.transformer.pipeline_parallel_layer_layout")
    counting = installed("megatron.core.num_microbatches_calculator")
    config = installed("megatron.core.transformer.transformer_config")
    plan = PLANS[name]()
    found, size = arguments(megatron_arguments(plan)), len(plan.stages)
    read = layout.PipelineParallelLayerLayout(found["--pipeline-model-parallel-layout"], size)
    read.validate_layer_layout(int(found["--num-layers"]), None)
    assert [
        (any(kind.name == "embedding" for kind in stage), sum(kind.name == "decoder" for kind in stage),
         any(kind.name == "loss" for kind in stage))
        for (stage,) in read.layout
    ] == held(plan)  # fmt: skip
    data = plan.stages[0].grid.data
    counts = counting.ConstantNumMicroBatchesCalculator(
        int(found["--global-batch-size"]), int(found["--micro-batch-size"]), data, False, 0
    )
    assert counts.get() == plan.training.microbatches
    number = found.get("--recompute-num-layers")
    config.TransformerConfig(
        num_layers=LAYERS, hidden_size=16, num_attention_heads=2, pipeline_model_parallel_size=size,
        pipeline_model_parallel_layout=read, pipeline_dtype=torch.float32,
        recompute_granularity=found.get("--recompute-granularity"), recompute_method=found.get("--recompute-method"),
        recompute_num_layers=None if number is None else int(number),
    )  # fmt: skip


@pytest.mark.parametrize("name", MEGATRON)
def test_megatrons_parser_accepts_the_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed and validated like in `pretrain_gpt.py`, with the shape of a model, the arguments keep their
    meaning.
    """
    own = installed("megatron.training.arguments")
    plan = PLANS[name]()
    shape = "--hidden-size 16 --num-attention-heads 2 --max-position-embeddings 8 --transformer-impl local"
    words = shlex.split(megatron_arguments(plan))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words, *shape.split()])
    grid = plan.stages[0].grid
    for key, value in {"WORLD_SIZE": len(plan.workers), "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setattr(
        own, "get_device_arch_version", lambda: 10, raising=False
    )  # it queries a GPU if ranks shard
    read = own.parse_args()
    own.validate_args(read)
    assert (read.pipeline_model_parallel_size, read.data_parallel_size) == (len(plan.stages), grid.data)
    assert (read.tensor_model_parallel_size, read.use_distributed_optimizer) == (
        grid.tensor,
        grid.shard == "optimizer",
    )
    assert read.global_batch_size == plan.training.batch_size
    assert grid.data * read.micro_batch_size == plan.training.microbatch_size
    assert read.clip_grad == (plan.training.clip_norm or 0.0)
    assert read.bf16 == (plan.training.precision == "master-bfloat16")
    assert read.untie_embeddings_and_output_weights == (not plan.measurement.shared)
    assert (read.recompute_granularity == "full") == bool(plan.decisions)


@pytest.mark.parametrize("name", TITAN)
def test_torchtitan_reads_the_file_and_splits_a_model_by_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtitan's ConfigManager accepts the file's names in a configuration of its Llama with the same
    number of blocks, its trainer's checks pass, and every stage keeps the plan's modules.
    """
    manager = installed("torchtitan.config.manager")
    splitting = installed("torchtitan.distributed.pipeline_parallel")
    plan = PLANS[name]()
    (tmp_path / "titan_plan.py").write_text(torchtitan_config(plan))
    (tmp_path / "schedule.csv").write_text(pipelining_csv(plan))
    (tmp_path / "titan_models.py").write_text(
        "from dataclasses import replace\n"
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        "from titan_plan import activation_checkpoint, parallelism, training\n"
        "def planned():\n"
        "    return replace(llama3_debugmodel(), parallelism=parallelism, training=training,\n"
        "                   activation_checkpoint=activation_checkpoint)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("titan_plan", "titan_models"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    read = manager.ConfigManager().parse_args(["--module", "titan_models", "--config", "planned"])
    assert read.parallelism.pipeline_parallel_degree == len(plan.ranks)
    asked, grid = read.parallelism, plan.stages[0].grid
    divided = grid.shard == "parameters"
    assert asked.data_parallel_replicate_degree * asked.data_parallel_shard_degree == grid.data
    assert asked.data_parallel_shard_degree == (grid.data if divided else 1)
    steps = read.training.global_batch_size // read.training.local_batch_size // grid.data
    pieces = read.training.local_batch_size // read.parallelism.pipeline_parallel_microbatch_size
    assert steps * (pieces if len(plan.stages) > 1 else 1) == plan.training.microbatches
    assert (read.activation_checkpoint is not None) == bool(plan.decisions)
    with torch.device("meta"):
        whole = read.model_spec.model.build()
    parts = [splitting._split_module(whole, names) for names in read.parallelism.module_fqns_per_model_part]
    assert [
        (part.tok_embeddings is not None, len(part.layers), part.lm_head is not None) for part in parts
    ] == held(plan)
    kept = sum(len(list(part.parameters())) for part in parts)
    assert kept == len(list(whole.parameters()))
    assert schedules.get_schedule_class(asked.pipeline_parallel_schedule)
    assert bool(asked.pipeline_parallel_schedule_csv) == (name in ("in turn", "eager"))
    if asked.pipeline_parallel_schedule_csv:
        assert Path(asked.pipeline_parallel_schedule_csv).read_text() == pipelining_csv(plan)


@pytest.mark.parametrize("name", AUTOMODEL)
def test_automodel_reads_the_recipe(name: str, tmp_path: Path) -> None:
    """Its parser of the section has the plan's sizes, modules, order, recomputation and precision."""
    reading = installed("nemo_automodel.recipes._dist_utils")
    yaml = installed("yaml")
    plan = PLANS[name]()
    recipe = yaml.safe_load(automodel_recipe(plan))
    found = reading.parse_distributed_section(recipe["distributed"])
    grid, asked = plan.stages[0].grid, found["pipeline_config"]
    assert (found["pp_size"], found["tp_size"], found["dp_size"]) == (len(plan.ranks), grid.tensor, grid.data)
    assert found["activation_checkpointing"] == bool(plan.decisions)
    half = plan.training.precision != "float32"
    assert found["strategy_config"].mp_policy.param_dtype == (torch.bfloat16 if half else torch.float32)
    assert (asked is None) == (len(plan.stages) == 1)
    if asked is not None:
        assert len(asked.module_fqns_per_model_part) == len(plan.stages)
        steps = recipe["step_scheduler"]["local_batch_size"] // asked.pp_microbatch_size
        assert steps == plan.training.microbatches
        assert schedules.get_schedule_class(asked.pp_schedule)
        assert bool(asked.pp_schedule_csv) == (name in ("in turn", "eager"))


DEEPSPEED = """
import json, os, sys
import deepspeed, torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

config = json.load(open("deepspeed.json"))
bounds, stages = config["pipeline"]["partition"], config["pipeline"]["stages"]

class Planned(PipelineModule):
    def _partition_layers(self, method="uniform"):
        self.parts = bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=bounds[stage], stop=bounds[stage + 1])

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # a kernel for CPUs, which it would compile
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
layers = [LayerSpec(torch.nn.Linear, 2, 2) for _ in range(bounds[-1])]
module = Planned(layers, num_stages=stages)
read = DeepSpeedConfig("deepspeed.json", mpu=module.mpu())
held = [int(name) for name, _ in module.named_children() if name.isdigit()]
print("READ", json.dumps([
    read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps,
    read.gradient_clipping, read.bfloat16_config.enabled, read.pipeline["activation_checkpoint_interval"],
    read.zero_config.stage, held,
]))
"""


@pytest.mark.parametrize(
    ("name", "rank"), [("recomputed and clipped", 1), ("master weights", 2), ("divided state", 3)]
)
@pytest.mark.timeout(300)
def test_deepspeed_reads_the_configuration_and_takes_its_partition(
    name: str, rank: int, tmp_path: Path
) -> None:
    """DeepSpeed's configuration has the plan's batch, clipping and precision, and a PipelineModule the
    stage's blocks.
    """
    installed("deepspeed")
    plan = PLANS[name]()
    (tmp_path / "deepspeed.json").write_text(deepspeed_config(plan))
    (tmp_path / "read.py").write_text(DEEPSPEED)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "read.py"], cwd=tmp_path, text=True, capture_output=True, timeout=280,
        check=False, env=environment(rank, len(plan.workers)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("READ ")]
    asked, edges = plan.training, plan.profile.edges
    grid, stage = plan.stages[0].grid, plan.stages[rank // plan.stages[0].grid.data]
    blocks = [block for block, start in enumerate(edges[:-1]) if stage.start <= start < stage.stop]
    assert json.loads(line.removeprefix("READ ")) == [
        asked.batch_size, asked.microbatch_size // grid.data, asked.microbatches, asked.clip_norm or 0.0,
        asked.precision == "master-bfloat16", int(bool(plan.decisions)), int(grid.shard == "optimizer"), blocks,
    ]  # fmt: skip


ZERO = """
import json, sys
import deepspeed, torch
from deepspeed.runtime.config import DeepSpeedConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # a kernel for CPUs, which it would compile
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
read = DeepSpeedConfig("deepspeed.json")
zero = read.zero_config
away = [zero.offload_optimizer, zero.offload_param]
print("READ", json.dumps([
    read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps,
    read.gradient_clipping, read.bfloat16_config.enabled, zero.stage,
    [one is not None and one.device == "cpu" for one in away],
    read.compile_config.deepcompile and read.compile_config.offload_activation,
]))
"""


@pytest.mark.parametrize(
    ("shard", "decisions"),
    [("none", ()), ("optimizer", (UPDATED,)), ("parameters", (UPDATED, WEIGHTS)), ("parameters", (SAVED,))],
)
@pytest.mark.timeout(300)
def test_deepspeed_reads_what_replicas_divide_and_offload(
    shard: Sharding, decisions: tuple[Decision, ...], tmp_path: Path
) -> None:
    """Its configuration has ZeRO's stage, what is on the host, batch, clipping and precision."""
    installed("deepspeed")
    plan = whole(2, shard, "master-bfloat16", clip_norm=0.5, decisions=decisions)
    (tmp_path / "deepspeed.json").write_text(deepspeed_config(plan))
    (tmp_path / "read.py").write_text(ZERO)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "read.py"], cwd=tmp_path, text=True, capture_output=True, timeout=280,
        check=False, env=environment(0, 2),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("READ ")]
    stage = ("none", "optimizer", "gradients", "parameters").index(shard)
    assert json.loads(line.removeprefix("READ ")) == [
        8, 1, 4, 0.5, True, stage, [UPDATED in decisions, WEIGHTS in decisions], SAVED in decisions,
    ]  # fmt: skip


def environment(rank: int, size: int) -> dict[str, str]:
    """Return the environment that torchrun sets for a process."""
    told = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29511,
    }
    return os.environ | {name: str(value) for name, value in told.items()} | {"DS_ACCELERATOR": "cpu"}


def test_kubernetes_own_types_have_every_field() -> None:
    """The Kubernetes client builds its objects from the documents, required fields included, without loss."""
    client = installed("kubernetes.client")
    yaml = installed("yaml")
    documents = list(yaml.safe_load_all(kubernetes_job(planned(3), "it's.json")))
    for document, kind in zip(documents, ("V1Service", "V1Job"), strict=True):
        api = client.ApiClient()
        try:
            made = api.deserialize(json.dumps(document), kind, "application/json")
        except TypeError:  # kubernetes 36
            made = api.deserialize(SimpleNamespace(data=json.dumps(document)), kind)
        assert api.sanitize_for_serialization(made) == document


CONTROLLER = """
ClusterName=tried
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/controller.pid
SlurmctldLogFile={folder}/controller.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SchedulerType=sched/builtin
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
ResumeTimeout=600
NodeName=host[1-16] CPUs=64 RealMemory=1000000 Gres=gpu:8 State=CLOUD
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@contextmanager
def controller(folder: Path) -> Iterator[dict[str, str]]:
    """Start a SLURM controller of 16 unstarted hosts with 8 GPUs each; return its environment."""
    if shutil.which("slurmctld") is None or shutil.which("sbatch") is None:
        pytest.skip("needs slurmctld and sbatch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    written = CONTROLLER.format(host=host, port=port, user=getpass.getuser(), folder=folder)
    (folder / "slurm.conf").write_text(written)
    (folder / "gres.conf").write_text("NodeName=host[1-16] Name=gpu Count=8\n")
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    with subprocess.Popen(["slurmctld", "-D"], env=environment, stdout=DEVNULL, stderr=DEVNULL) as process:
        try:
            for _ in range(600):
                if not subprocess.run(
                    ["sinfo"], env=environment, capture_output=True, check=False
                ).returncode:
                    break
                time.sleep(0.1)
            yield environment
        finally:
            process.kill()


def test_slurm_would_start_the_script(tmp_path: Path) -> None:
    """`sbatch --test-only` finds the plan's number of hosts; with fewer GPUs per host it finds none."""
    many = plan(
        random_profile(24),
        load_cluster("3xdgx1-v100@25GB/s"),
        batch_size=2,
        microbatches=2,
        planner="uniform",
    )
    with controller(tmp_path) as environment:

        def tried(script: str) -> subprocess.CompletedProcess[str]:
            (tmp_path / "train.sbatch").write_text(script)
            words = ["sbatch", "--test-only", "train.sbatch"]
            return subprocess.run(
                words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )

        for made, hosts in ((planned(3), "host1 in"), (many, "host[1-3] in")):
            done = tried(slurm_script(made, "a plan.json"))
            assert done.returncode == 0 and "to start at" in done.stderr and hosts in done.stderr, done.stderr
        more = tried(slurm_script(many, "plan.json").replace("--gpus-per-node=8", "--gpus-per-node=9"))
        assert more.returncode != 0 and "not available" in more.stderr, more.stderr
