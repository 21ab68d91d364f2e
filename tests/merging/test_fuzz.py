"""Header and index readers against arbitrary bytes: an error of ours, or what the safetensors library reads too."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from lora_merge.merging.checkpoint import read_checkpoint
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import ModelFolder
from lora_merge.merging.safetensors_file import read_header, read_tensor

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

sizes = st.integers(-1, 6) | st.sampled_from([2**31, 2**62, 2**63, 10**30]) | st.floats() | st.none() | st.text(max_size=2)
dtypes = st.sampled_from(["F32", "BF16", "U8", "F64", "BOOL"]) | st.text(max_size=4) | st.none()
entries = st.fixed_dictionaries(
    {"dtype": dtypes, "shape": st.lists(sizes, max_size=3) | sizes, "data_offsets": st.lists(sizes, max_size=3) | sizes},
    optional={"surprise": st.none()},
)
values = st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3))
headers = st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), entries | values, max_size=4)


def sound_entries(shapes: list[tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    """A header that is right: tensors one behind the other, and how many bytes they take."""
    header, position = {}, 0
    for number, (dtype, shape) in enumerate(shapes):
        count = {"F32": 4, "BF16": 2, "U8": 1}[dtype]
        for size in shape:
            count *= size
        header[f"tensor {number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + count]}
        position += count
    return header, position


sound = st.lists(st.tuples(st.sampled_from(["F32", "BF16", "U8"]), st.lists(st.integers(0, 4), max_size=3)), max_size=5)


def verdicts(path: Path) -> tuple[set[str] | None, set[str] | None]:
    """The tensor names that we read and that the library reads; None for a refusal."""
    try:
        ours = {tensor.name for tensor in read_header(path).tensors}
    except MergeError:
        ours = None
    try:
        with safe_open(path, "np") as file:
            theirs = set(file.keys())
    except (SafetensorError, OSError):
        theirs = None
    return ours, theirs


def write(path: Path, header: bytes, data: bytes, length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


@FUZZ
@given(header=headers, data=st.binary(max_size=64))
def test_no_header_of_ours_that_the_library_refuses(tmp_path, header, data):
    """Where we accept a header, the library does too and sees the same tensors: we are never more lenient."""
    path = write(tmp_path / "x.safetensors", json.dumps(header).encode(), data)
    ours, theirs = verdicts(path)
    assert ours is None or ours == theirs


@FUZZ
@given(shapes=sound)
def test_sound_files_are_read(tmp_path, shapes):
    """Headers that are right, scalars and empty tensors included. Oracle: the library, names and bytes."""
    header, size = sound_entries(shapes)
    path = write(tmp_path / "x.safetensors", json.dumps(header).encode(), bytes(range(256)) * (size // 256 + 1))
    path.write_bytes(path.read_bytes()[: 8 + len(json.dumps(header).encode()) + size])
    ours, theirs = verdicts(path)
    assert ours == theirs == set(header)
    with safe_open(path, "np") as file:
        for tensor in read_header(path).tensors:
            assert list(tensor.shape) == file.get_slice(tensor.name).get_shape()
            if tensor.dtype.name == "U8":
                assert (read_tensor(tensor) == file.get_tensor(tensor.name)).all()


@FUZZ
@given(shapes=sound, place=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 400))
def test_a_changed_byte_or_a_cut_file(tmp_path, shapes, place, byte, cut):
    """One byte changed, and then the file cut: never more lenient than the library, never another kind of error."""
    header, size = sound_entries(shapes)
    content = bytearray(write(tmp_path / "x.safetensors", json.dumps(header).encode(), bytes(size)).read_bytes())
    content[place % len(content)] = byte
    for changed in (content, content[: cut % len(content)]):
        (tmp_path / "x.safetensors").write_bytes(changed)
        ours, theirs = verdicts(tmp_path / "x.safetensors")
        assert ours is None or ours == theirs


@FUZZ
@given(content=st.binary(max_size=200), length=st.integers(0, 2**64 - 1))
@example(content=b"", length=0)
@example(content=b"{}", length=2)
@example(content=b"[" * 100_000, length=100_000)
def test_arbitrary_bytes(tmp_path, content, length):
    path = write(tmp_path / "x.safetensors", content, b"", length)
    ours, theirs = verdicts(path)
    assert ours is None or ours == theirs


@FUZZ
@given(
    index=st.dictionaries(
        st.text(max_size=6) | st.just("weight_map"), values | st.dictionaries(st.text(max_size=4), values), max_size=3
    )
)
def test_arbitrary_index(tmp_path, index):
    """An index of any content: read, or refused with an error of ours; no file outside the folder is opened."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MergeError):
        read_checkpoint(ModelFolder(tmp_path, "x"))
