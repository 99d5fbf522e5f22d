"""A plan of torchtitan's own Llama, trained by torchtitan's pipeline from the export, by torch's, and by pipefit's.

`make tools` installs torchtitan. Its attention needs a GPU, so the Llama here has torch's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.llama3 import model_registry

import pipefit

torch.set_num_threads(1)

class Causal(nn.Module):
    def forward(self, q, k, v, **_):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

def build():
    spec = model_registry("debugmodel")
    with torch.device("meta"):
        module = spec.model.build()
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        module.init_weights(buffer_device=None)
    for block in module.layers.values():
        block.attention.inner_attention = Causal()
    return spec, module

def batch(samples):
    tokens = torch.randint(0, 2048, (samples, 17), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

def loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)

def task():
    return pipefit.Task(build()[1], batch=batch, loss=loss, optimizer=optimizer)
"""

PLANNED = """
import json, sys
from pathlib import Path
import pipefit
from pipefit.export import pipelining_csv, torchtitan_config
from pipefit.schema.json_io import save
from titan_task import batch, build, loss, optimizer, task

plan = pipefit.plan(task(), "emulated:4x256MiB", batch_size=8, microbatches=4, planner="exact", data=1, stages=4,
                    schedule=sys.argv[1], recompute=sys.argv[2])
save(plan, "plan.json")
Path("titan_plan.py").write_text(torchtitan_config(plan))
Path("schedule.csv").write_text(pipelining_csv(plan))

_, module = build()
own, plain = optimizer(module.parameters()), []
for step in range(3):
    losses = []
    for inputs, targets in zip(*(one.chunk(4) for one in batch(8))):
        losses.append(loss(module(inputs), targets))
        (losses[-1] / 4).backward()
    own.step()
    own.zero_grad()
    plain.append(sum(one.item() for one in losses) / 4)
trainer = pipefit.Trainer(task(), plan)
print("READ", json.dumps([plain, [trainer.step(batch(8)) for _ in range(3)]]))
"""

TRAINED = """
import json
import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims as dims
from torchtitan.config import CompileConfig
import pipefit
from pipefit.schema.json_io import load
from titan_plan import activation_checkpoint, parallelism, training
from titan_task import batch, build, loss, optimizer, task

dist.init_process_group("gloo")
dims.device_type = "cpu"
spec, module = build()
mesh = dims.ParallelDims(
    dp_replicate=parallelism.data_parallel_replicate_degree, dp_shard=parallelism.data_parallel_shard_degree,
    cp=1, tp=1, ep=1, pp=parallelism.pipeline_parallel_degree, world_size=dist.get_world_size(),
)
schedule, parts, first, last = spec.pipelining_fn(
    module, parallel_dims=mesh, training=training, parallelism=parallelism, compile_config=CompileConfig(),
    ac_config=activation_checkpoint, dump_folder=".", device=torch.device("cpu"), model_config=spec.model,
    parallelize_fn=spec.parallelize_fn, loss_fn=lambda outputs, targets: (loss(outputs, targets) / 4, None),
)
own, titan = optimizer([p for part in parts for p in part.parameters()]), []
inputs, targets = batch(8)
for step in range(3):
    losses = []
    schedule.step(*((inputs,) if first else ()), **(dict(target=targets, losses=losses) if last else {}))
    own.step()
    own.zero_grad()
    titan.append(sum(one.item() for one in losses))
pipeline = pipefit.pipeline(task(), load("plan.json"))
torchs = [float(pipeline.step(inputs, target=targets)) for step in range(3)]
if last:
    print("READ", json.dumps([titan, torchs]), flush=True)
"""


def results(folder: Path, *command: str) -> list[list[float]]:
    """Run a command in the folder; return the losses that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=folder, text=True, capture_output=True, timeout=280,
        check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("READ ")]
    return list(json.loads(line.removeprefix("READ ")))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "always"), ("eager-1f1b", "never")])
def test_four_engines_have_the_losses_of_plain_training(
    schedule: str, recompute: str, tmp_path: Path
) -> None:
    """torchtitan's engine, with the order it knows or from the file, torch's, and pipefit's runtime."""
    for name, text in (("titan_task", MODEL), ("planned", PLANNED), ("trained", TRAINED)):
        (tmp_path / f"{name}.py").write_text(text)
    plain, ours = results(tmp_path, "planned.py", schedule, recompute)
    titan, torchs = results(
        tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "trained.py"
    )
    assert len(plain) == 3 and plain[2] < plain[0]
    for losses in (ours, titan, torchs):
        assert losses == pytest.approx(plain, rel=1e-6)
