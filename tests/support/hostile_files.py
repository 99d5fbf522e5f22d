"""Cost of reading damaged documents, measured in a separate process with a fork for each file.

`python hostile_files.py FOLDER MEGABYTES` reads the valid documents in FOLDER, damages them, and prints for
each damage a line of JSON: the file's size, the peak memory of `load`, its processor seconds, and its
message.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from pipefit.errors import FileError
from pipefit.schema import json_io
from pipefit.schema.json_io import load, load_cluster
from pipefit.schema.presets import preset_text

HOLE = "\ufffchole\ufffc"


def lists_of(size: int) -> dict[str, str]:
    """Return values of about `size` bytes that are invalid everywhere, or valid only in some place."""

    def many(element: str) -> str:
        return f"[{','.join([element] * (size // (len(element) + 1)))}]"

    return {
        "numbers": many("257"),
        "texts": many('"ab"'),
        "lists": many("[]"),
        "pairs": many("[1,2]"),
        "objects": many("{}"),
        "unknown keys": many('{"k":1}'),
        "keys of one object": "{" + ",".join(f'"k{n}":1' for n in range(size // 12)) + "}",
        "the same key": "{" + ",".join(['"k":1'] * (size // 6)) + "}",
        "deep lists": "[" * (size // 2) + "]" * (size // 2),
        "deep objects": '{"a":' * (size // 6) + "1" + "}" * (size // 6),
        "a text": f'"{"x" * size}"',
        "a text with an emoji": f'"\U0001f600{"x" * size}"',
        "a number": "1" * size,
        "NaN at the end": many("1")[:-1] + ",NaN]",
        "infinity at the end": many("1.5")[:-1] + ",1e999]",
        "truncated": many("1")[:-1],
        "blanks": " " * size + "0",
    }


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield every place in a document once, looking only into the first element of a list."""
    if path:
        yield path
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    )
    for key, part in inner:
        yield from places(part, (*path, key))


def damaged(text: str, path: tuple[str | int, ...], value: str) -> str:
    """Return the document with another value at one place."""
    data = json.loads(text)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = HOLE
    return json.dumps(data, ensure_ascii=False).replace(f'"{HOLE}"', value)


def memory(field: str) -> int:
    """Return this process's memory in bytes, from the kernel's counter."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def measured(path: Path) -> dict[str, Any]:
    """Return the cost and message of `load` in a fork, so that no freed memory is reused."""
    reading, writing = os.pipe()
    if (process := os.fork()) == 0:
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
        before, start = memory("VmRSS"), time.process_time()
        try:
            (load_cluster(str(path)) if path.suffix == ".toml" else load(path))
            said = "loaded"
        except FileError as error:
            said = str(error)
        except BaseException as error:  # noqa: BLE001 - it is reported, and fails the test
            said = f"raised {type(error).__name__}: {error}"[:300]
        seconds = time.process_time() - start
        found = {"memory": memory("VmHWM") - before, "seconds": seconds, "said": said}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = json.loads(pipe.read())
    os.waitpid(process, 0)
    return {"size": path.stat().st_size, **found}


def tomls(size: int) -> dict[str, str]:
    """Return damaged or expanding TOML clusters of about `size` bytes."""
    preset = preset_text("4x-a100-80gb")
    group = '[[devices]]\ncount = 4096\nkind = "a100-80gb"\nmemory = "24GB"\n'
    every = '[[links]]\neach = "device*"\nto = "host0"\nbytes_per_second = 1\n'
    switch = '[[links]]\nmembers = ["device*"]\nbytes_per_second = 1\n'
    return {
        "not TOML": preset + "x" * size,
        "a list of lists": preset + f"x = [{'[],' * (size // 3)}]\n",
        "deep lists": preset + "x = " + "[" * (size // 2) + "]" * (size // 2),
        "deep keys": preset + "a." * (size // 2) + "a = 1\n",
        "unknown keys": preset + "".join(f"k{n} = 1\n" for n in range(size // 10)),
        "a comment": preset + "# " + "x" * size,
        "many devices": preset + group * (size // len(group)),
        "many links": preset.replace("count = 4", "count = 4096") + every * (size // len(every)),
        "many switches": preset.replace("count = 4", "count = 4096") + switch * (size // len(switch)),
    }


def main(folder: Path, size: int, every: int) -> None:
    """Print every `every`th pair of a place and a damage of every document in the folder."""
    values, target = lists_of(size), folder / "damaged.json"
    for toml_size in (size, json_io.LARGEST_TOML_BYTES - 4000):
        for kind, text in tomls(toml_size).items():
            (folder / "damaged.toml").write_text(text)
            print(json.dumps({"damage": f"TOML {kind}", **measured(folder / "damaged.toml")}), flush=True)
    for source in sorted(folder.glob("valid-*.json")):
        text = source.read_text()
        load(source)  # what reading builds once is built
        for number, (path, kind) in enumerate(product(places(json.loads(text)), values)):
            if number % every == every // 8 or (kind, path[-1]) == ("pairs", "tensors"):  # valid pairs
                target.write_text(damaged(text, path, values[kind]))
                print(json.dumps({"damage": f"{source.name} {path} {kind}", **measured(target)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(float(sys.argv[2]) * 1e6), int(sys.argv[3]))
