"""The digests that a merge takes in passing, on one core and on two. Oracle: hashlib over the finished files."""

from __future__ import annotations

import hashlib
import threading

import pytest

from lora_merge.merging import sha256, shard_digests, writer
from lora_merge.merging.api import MergeOptions, merge
from lora_merge.merging.errors import MergeError
from lora_merge.merging.streaming import SourceFile


@pytest.fixture(params=[1, 2])
def cores(request, monkeypatch):
    monkeypatch.setattr(writer._Crew, "hashing_cores", request.param)
    monkeypatch.setattr(shard_digests, "_CHUNK", 1000)  # so that tiny files are many chunks
    return request.param


def test_the_cores_are_those_that_the_arithmetic_can_spare():
    """Half of them: 16 for three files, which are hashed on two each; 2 for any number, on one."""
    found = {
        (jobs, files): writer._Crew(None, None, jobs, files, None, None).hashing_cores  # type: ignore[arg-type]
        for jobs, files in ((16, 3), (16, 4), (16, 5), (16, 30), (4, 1), (4, 2), (2, 1), (2, 9), (1, 1))
    }
    assert [pair for pair, cores in found.items() if cores == 2] == [(16, 3), (16, 4), (4, 1)]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, MergeOptions(from_4bit=True)),
        ({}, MergeOptions(dtype="float32")),
        ({"modules_to_save": ["lm_head"]}, MergeOptions()),
        ({"target_modules": ["v_proj"]}, MergeOptions()),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_they_are_those_of_the_files(cores, settings, options, sharded, bases, adapters, tmp_path):
    base = bases("llama", sharded)
    result = merge(base, adapters("llama", **settings), tmp_path / "out", options)
    for folder, files in ((base, result.manifest.base.files), (result.out, result.manifest.output)):
        assert any(name.endswith(".safetensors") for name in files)
        for name, found in files.items():
            assert found == hashlib.sha256((folder / name).read_bytes()).hexdigest(), name


@pytest.fixture(params=["hashlib", "interleaved"])
def pair(request, monkeypatch):
    """Both kinds of pair, whichever this processor is faster with: hashlib's has a thread of its own."""
    if request.param == "interleaved" and not sha256.has_instructions():
        pytest.skip("a processor without SHA instructions")
    monkeypatch.setattr(sha256, "pays", lambda: request.param == "interleaved")


@pytest.mark.usefixtures("pair")
def test_no_thread_is_left_after_a_merge(cores, bases, adapters, tmp_path):
    base, adapter = bases("llama"), adapters("llama")
    before = set(threading.enumerate())
    result = merge(base, adapter, tmp_path / "out", MergeOptions(dtype="float32"))
    assert set(threading.enumerate()) <= before
    assert result.out.is_dir()


@pytest.mark.usefixtures("pair")
def test_a_base_that_cannot_be_read_to_its_end_is_refused(cores, bases, adapters, tmp_path, monkeypatch):
    real = SourceFile.read

    def broken(file, start, nbytes):
        if start > (5000 if cores == 2 else -1):  # one core has the weights at hand and reads the header
            raise MergeError(f"{file.path}: cannot be read: Input/output error")
        return real(file, start, nbytes)

    monkeypatch.setattr(SourceFile, "read", broken)
    base, adapter = bases("llama"), adapters("llama")
    before = set(threading.enumerate())
    with pytest.raises(MergeError) as caught:
        merge(base, adapter, tmp_path / "out", MergeOptions(dtype="float32"))
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) <= before  # though the traceback keeps alive what nobody has closed
    caught.match("Input/output error")


def test_hashing_the_base_ends_when_the_merge_fails(bases, adapters, tmp_path, monkeypatch):
    """It does not go on to the end of a large file for nothing."""
    monkeypatch.setattr(shard_digests, "_CHUNK", 10)
    base = SourceFile.opened(next(bases("llama").glob("*.safetensors")))
    digests = shard_digests.Apart(base)
    digests.close()
    read = digests._read.result()
    assert read != hashlib.sha256(base.path.read_bytes()).hexdigest()
