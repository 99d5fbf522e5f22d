"""Damaged and hostile checkpoints: each raises one sentence with the file's name, and no other exception."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pipefit.checkpoints import Checkpoint, find, load_state_dict
from pipefit.checkpoints.manifest import Shard
from pipefit.checkpoints.shards import write_shard
from pipefit.errors import FileError
from support.synthetic_checkpoints import write

SHARD = "worker-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a whole checkpoint with a previous one."""
    write(tmp_path, 4)
    return write(tmp_path, 8)


def read_all(folder: Path) -> None:
    """Call every reading operation of a checkpoint."""
    found = find(folder)
    found.verify()
    found.read(found.manifest.tensors)
    load_state_dict(folder)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place // 8 % len(content)] ^= 1 << place % 8
    path.write_bytes(bytes(content))


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def put_link_outside(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def put_other(path: Path) -> None:
    shutil.copy(path.with_name("worker-00000.safetensors"), path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "is missing"),
    "empty": (lambda path: path.write_bytes(b""), "it has 0 B"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "is damaged: it has"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is damaged: it has"),
    "a bit in the header": (lambda path: flip(path, 100), "SHA-256 differs"),
    "a bit in a tensor": (lambda path: flip(path, 8 * path.stat().st_size - 3), "SHA-256 differs"),
    "another shard": (put_other, "is damaged"),
    "a pipe": (put_fifo, "is not a regular file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is not a regular file|cannot be read"),
    "a link to itself": (put_link, "cannot be read"),
    "a link out of the folder": (put_link_outside, "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_offered(folder: Path, damage: str) -> None:
    """A damaged shard is named, with the previous checkpoint to load instead."""
    do, words = DAMAGES[damage]
    do(folder / SHARD)
    with pytest.raises(FileError, match=words) as caught:
        read_all(folder)
    assert str(folder / SHARD) in str(caught.value)
    assert str(caught.value).endswith("the checkpoint before it is " + str(folder.parent / "step-00000004"))
    assert "\n" not in str(caught.value)


def test_the_checkpoint_before_is_that_of_the_step_before(folder: Path) -> None:
    """The previous checkpoint is found by number, not by letters: step 100,000,000 has one digit more."""
    folder.with_name("step-00000004").rename(folder.with_name("step-99999999"))
    newest = folder.rename(folder.with_name("step-100000000"))
    (newest / SHARD).unlink()
    with pytest.raises(FileError, match=r"the checkpoint before it is .*/step-99999999$"):
        read_all(newest)


@pytest.mark.parametrize("damage", [damage for damage, (_, words) in DAMAGES.items() if "SHA" not in words])
def test_headers_show_all_but_other_bits(folder: Path, damage: str) -> None:
    """All damage except changed bits of tensors is found from headers, with the same message."""
    do, words = DAMAGES[damage]
    do(folder / SHARD)
    with pytest.raises(FileError, match=words) as caught:
        find(folder).check_headers()
    assert str(folder / SHARD) in str(caught.value)
    assert str(caught.value).endswith("the checkpoint before it is " + str(folder.parent / "step-00000004"))


def test_headers_are_read_and_not_more(folder: Path) -> None:
    """A check of headers reads nothing else: it accepts a whole checkpoint and one with a flipped tensor bit,
    which only the hash shows, and refuses a tensor with another shape in the manifest.
    """
    found = find(folder)
    found.check_headers()
    path = folder / SHARD
    flip(path, 8 * path.stat().st_size - 3)
    found.check_headers()
    first, *rest = found.manifest.tensors
    lies = replace(found, manifest=replace(found.manifest, tensors=(replace(first, shape=(1, 2)), *rest)))
    with pytest.raises(
        FileError, match=r"is damaged: .* and \(1, 2\) in the manifest; the checkpoint before"
    ):
        lies.check_headers()


def change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(fields)


def of_tensor(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["tensors"][0].update(fields)


def of_shard(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["shards"][0].update(fields)


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another kind of document": (change(pipefit="plan"), "is not the manifest of a checkpoint"),
    "a later version": (change(version=3), "is not of version 2"),
    "a version that is true": (change(version=True), "is not of version 2"),
    "a key more": (change(code="import os"), "this key is unknown"),
    "step or seed is not valid": (lambda document: document.pop("step"), "this is missing"),
    "a step below zero": (change(step=-1), "step or seed is not valid"),
    "a step too large": (change(step=1 << 70), "step or seed is not valid|is expected"),
    "a step that is text": (change(step="5"), "is expected, not"),
    "a path out of the folder": (
        of_shard(file="../step-00000004/worker-00000.safetensors"),
        "not the name of a shard",
    ),
    "an absolute path": (of_shard(file="/etc/passwd"), "not the name of a shard"),
    "a shard with a line break": (of_shard(file="worker-00000.safetensors\n"), "not the name of a shard"),
    "a digest that is none": (of_shard(sha256="0" * 63), "lacks a SHA-256"),
    "a size that is none": (of_shard(nbytes=0), "valid size"),
    "another digest": (of_shard(sha256="0" * 64), "SHA-256 differs"),
    "another size": (of_shard(nbytes=5), "is damaged: it has"),
    "another dtype": (of_tensor(dtype="int32"), "is damaged: 0.weight has dtype torch.float32"),
    "a dtype that is code": (of_tensor(dtype="load"), "is not a dtype"),
    "another shape": (of_tensor(shape=[4, 3]), r"is damaged: 0.weight has .* shape \(3, 4\)"),
    "a shape below zero": (of_tensor(shape=[-3, -4]), "impossible shape"),
    "a huge shape": (of_tensor(shape=[1 << 40, 1 << 40]), "impossible shape"),
    "too many dimensions": (of_tensor(shape=[1] * 65), "impossible shape"),
    "a name that is not there": (of_tensor(name="other"), "is damaged: other is missing"),
    "a shard that is not there": (of_tensor(shard=2), "is in shard 2, but there are 2"),
    "a tensor twice": (lambda document: document["tensors"].append(document["tensors"][0]), "occurs twice"),
    "a shard twice": (lambda document: document["shards"].append(document["shards"][0]), "occurs twice"),
    "nested lists": (change(groups=[[[[]]]]), "are expected"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(folder: Path, lie: str) -> None:
    """A manifest is checked against its types, itself and the shards."""
    tell, words = LIES[lie]
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    del document["sha256"]
    tell(document)
    header = {key: document.pop(key) for key in ("pipefit", "version")}
    rest = '", ' + json.dumps(document)[1:]
    path.write_text(
        f'{json.dumps(header)[:-1]}, "sha256": "{hashlib.sha256(rest.encode()).hexdigest()}{rest}'
    )
    with pytest.raises(FileError, match=words) as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)


HEADER = b'{"pipefit": "checkpoint", "version": 2, "sha256": "%s"}'


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"pipefit": "checkpoint"}',
        HEADER % b"", HEADER % b"\\ud800", HEADER % b"\\u0661",
    ],
)  # fmt: skip
def test_a_manifest_that_is_no_document_is_refused(folder: Path, content: bytes) -> None:
    """An invalid manifest is refused: empty, truncated, not an object, not text, nested too deeply, without a
    version, or with an impossible digest.
    """
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(FileError):
        read_all(folder)


def refusal(folder: Path) -> str | None:
    """Return the error message of a checkpoint; None if it can be read."""
    try:
        read_all(folder)
    except FileError as error:
        return str(error)
    return None


def test_any_bit_that_flips_is_refused(folder: Path) -> None:
    """Any of a hundred flipped bits in a checkpoint is refused, unless it leaves the contents unchanged."""
    random, files = Random(0), sorted(folder.iterdir())
    before = find(folder).manifest
    for _ in range(100):
        path = random.choice(files)
        place, kept = random.randrange(8 * path.stat().st_size), path.read_bytes()
        flip(path, place)
        said = refusal(folder)
        if said is None:  # a blank before the digest, which is another blank now
            assert path.name == "manifest.json"
            assert find(folder).manifest == before
        else:
            assert str(path) in said
            assert "\n" not in said
        path.write_bytes(kept)
    read_all(folder)


def test_a_shard_that_is_no_safetensors_file_is_refused(folder: Path) -> None:
    """A shard that is not a safetensors file is refused by the parser, even with the right size and hash."""
    huge, pickled = (1 << 62).to_bytes(8, "little") + b"{}", b"\x80\x04cos\nsystem\n"
    for content in (b"\xff" * 200, huge, b"\2\0\0\0\0\0\0\0[]", pickled):
        (folder / SHARD).write_bytes(content)
        found = find(folder)
        shard = Shard(file=SHARD, nbytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        manifest = found.manifest
        lying = Checkpoint(folder=folder, manifest=replace(manifest, shards=(manifest.shards[0], shard)))
        with pytest.raises(FileError, match="is not a safetensors file"):
            lying.read(manifest.tensors)


def test_a_shard_is_written_anew_or_not_at_all(tmp_path: Path) -> None:
    """A shard is never written into an existing file, for example through a link."""
    (tmp_path / SHARD).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / SHARD, {})
    assert not (tmp_path / "elsewhere").exists()
