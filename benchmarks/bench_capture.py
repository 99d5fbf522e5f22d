"""How long, and with how much memory, pipefit captures and profiles models far too large for this machine.

    python benchmarks/bench_capture.py [--json FILE]

Each is built, captured and profiled over fake tensors in a process of its own; the peak is that process's resident set,
torch and transformers included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
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
TITLES = {"llama": "Llama, 7 B", "gpt2": "GPT-2 XL, 1.5 B"}


def measure(name: str) -> dict[str, Any]:
    """Seconds and peak bytes of one model, in this process."""
    from pipefit.capture.sample import sample
    from pipefit.fake.chain import fake_chain
    from pipefit.fake.target import FakeTarget
    from pipefit.profiler import profile
    from pipefit.zoo.huggingface import hf

    task = hf(name, **MODELS[name])
    like = sample(task, 1)
    with FakeTarget("cpu") as fake:
        began = time.perf_counter()
        chain = fake_chain(task, fake, like)
        captured = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    found = profile(task, microbatch_size=1)
    return {
        "model": TITLES[name],
        "layers": len(chain.layers),
        "parameters": sum({id(p): p.numel() for layer in chain.layers for p in layer.module.parameters()}.values()),
        "kinds": len(found.measurements[0].kinds),
        "capture_seconds": captured,
        "capture_peak_bytes": peak,
        "profile_seconds": time.perf_counter() - began,
        "profile_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


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
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['model']}: {row['layers']} layers, {row['parameters'] / 1e9:.2f} B parameters: "
            f"capture {row['capture_seconds']:.1f} s, {row['capture_peak_bytes'] / 2**30:.2f} GiB; "
            f"capture and profile {row['profile_seconds']:.1f} s, {row['profile_peak_bytes'] / 2**30:.2f} GiB"
        )


if __name__ == "__main__":
    main()
