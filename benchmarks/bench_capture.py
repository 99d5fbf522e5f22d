"""How long, and with how much memory, pipefit captures and profiles models far too large for this machine.

    python benchmarks/bench_capture.py [--json FILE]

Each is built, captured and profiled over fake tensors in a process of its own: first captured alone; then profiled as a
GPU would run it; then for this CPU, where what kernels take inside is measured, each operation once; then the same with
what was measured kept in the cache. Every profile captures again. Seconds are the process's own on the CPU; the peak is
the largest resident set by then, torch and transformers included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measured_on import machine

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "sequence": 2048,
    },
    "gpt2": {"n_layer": 48, "n_embd": 1600, "n_head": 25, "sequence": 1024},
}
STEPS = {"profile for CUDA": "cuda", "profile for this CPU": "cpu", "the same again": "cpu"}
TITLES = {"llama": "Llama, 7 B", "gpt2": "GPT-2 XL, 1.5 B"}


def measure(name: str) -> dict[str, Any]:
    """Seconds and peak bytes of one model, in this process."""
    from pipefit.capture.sample import sample
    from pipefit.fake_cuda.chain import fake_chain
    from pipefit.fake_cuda.target import FakeTarget
    from pipefit.models.hugging_face import hf
    from pipefit.profiler import profile

    task = hf(name, **MODELS[name])
    like = sample(task, 1)
    with FakeTarget("cpu") as fake:
        began = time.process_time()
        chain = fake_chain(task, fake, like)
        found = {"capture": spent(began)}
    row = {
        "model": TITLES[name],
        "blocks": len(chain.blocks),
        "layers": len(chain.layers),
        "parameters": sum(
            {id(p): p.numel() for layer in chain.layers for p in layer.module.parameters()}.values()
        ),
    }
    for step, target in STEPS.items():
        began = time.process_time()
        kinds = len(profile(task, microbatch_size=1, target=target).measurements[0].kinds)
        found[step] = spent(began)
    return row | {"kinds": kinds, "steps": found}


def spent(began: float) -> dict[str, float]:
    """Seconds on the CPU since `began`, and the largest resident set so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": time.process_time() - began, "peak_bytes": peak}


def main() -> None:
    """Measure every model, each in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write rows and machine here")
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows = []
    for name in MODELS:
        command = [sys.executable, __file__, "--one", name]
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | {"XDG_CACHE_HOME": empty}
            output = subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment
            ).stdout
        rows.append(json.loads(output.splitlines()[-1]))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        size = f"{row['blocks']} blocks ({row['layers']} layers), {row['parameters'] / 1e9:.2f} B parameters"
        print(f"{row['model']}: {size}")
        for step, its in row["steps"].items():
            print(f"    {step:21} {its['seconds']:6.1f} s {its['peak_bytes'] / 2**30:6.2f} GiB")


if __name__ == "__main__":
    main()
