"""Files written past the page cache and through it hold the same bytes, whatever is appended and wherever blocks end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_merge.merging import output_file
from lora_merge.merging.errors import MergeError
from lora_merge.merging.output_file import ALIGNMENT, OutputFile
from lora_merge.merging.streaming import Block, SourceFile

SOURCE = np.random.default_rng(0).integers(0, 256, 1 << 17, dtype=np.uint8).tobytes()
# Lengths around the alignment and the (shrunken) buffer, where the cases are.
LENGTHS = st.one_of(
    st.integers(0, 40), st.sampled_from([4095, 4096, 4097, 8191, 8192, 16384, 16385, 40000]), st.integers(0, 1 << 16)
)


@pytest.fixture(params=["direct", "cached", "refused at writing", "kernel cannot copy", "kernel copies short"])
def way(request, monkeypatch) -> str:
    """How the file is written; the last three are what file systems do that this one does not."""
    monkeypatch.setattr(output_file, "BUFFER_BYTES", 2 * ALIGNMENT)
    monkeypatch.setattr(output_file, "DIRECT_FROM", 0 if request.param != "cached" else 1 << 60)
    real = os.copy_file_range
    if request.param == "refused at writing":
        direct = set()
        opened, written = os.open, os.pwrite

        def open_(path, flags, *mode):
            descriptor = opened(path, flags, *mode)
            (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
            return descriptor

        def pwrite(descriptor, content, position):
            if descriptor in direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return written(descriptor, content, position)

        monkeypatch.setattr(output_file.os, "open", open_)
        monkeypatch.setattr(output_file.os, "pwrite", pwrite)
    if request.param == "kernel cannot copy":

        def refuse(*_):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(output_file.os, "copy_file_range", refuse)
    if request.param == "kernel copies short":
        monkeypatch.setattr(output_file.os, "copy_file_range", lambda s, d, count, *rest: real(s, d, max(count // 2, 1), *rest))
    return request.param


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.tuples(st.booleans(), LENGTHS, st.integers(0, 5000)), max_size=10))
def test_the_file_holds_what_was_appended(way, parts, tmp_path_factory):
    """Blocks from memory and blocks that the kernel copies from any place of another file, in any order."""
    folder = tmp_path_factory.mktemp("file")
    (folder / "source").write_bytes(SOURCE)
    source = SourceFile.opened(folder / "source")
    expected = b""
    with OutputFile(folder / "out", 1 << 20) as file:
        for copied, length, start in parts:
            content = SOURCE[start : start + length]
            expected += content
            file.append(Block(memoryview(content), copied_from=source if copied else None, copied_start=start))
        file.finish()
    os.close(source.descriptor)
    assert (folder / "out").read_bytes() == expected


def test_large_files_do_not_pass_through_the_page_cache(tmp_path):
    """What is written directly leaves nothing for a sync to do; a small file is cached as usual."""
    for nbytes, cached in [(output_file.DIRECT_FROM, 0), (output_file.DIRECT_FROM - 1, len(SOURCE))]:
        with OutputFile(tmp_path / str(nbytes), nbytes) as file:
            if cached == 0 and file._direct is None:
                pytest.skip("this file system has no direct writing")
            file.append(Block(memoryview(SOURCE)))
            file.finish()
            assert file.cached_bytes == cached


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no file system in memory")
def test_a_file_system_in_memory():
    path = Path("/dev/shm") / f"output-file-{os.getpid()}"
    try:
        with OutputFile(path, output_file.DIRECT_FROM) as file:
            file.append(Block(memoryview(SOURCE)))
            file.finish()
        assert path.read_bytes() == SOURCE
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("direct_from", [0, 1 << 60])
def test_errors_are_one_line(error, direct_from, monkeypatch, tmp_path):
    monkeypatch.setattr(output_file, "DIRECT_FROM", direct_from)
    monkeypatch.setattr(output_file, "BUFFER_BYTES", 2 * ALIGNMENT)

    def fail(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(output_file.os, "pwrite", fail)
    with OutputFile(tmp_path / "model.safetensors", 1 << 20) as file:
        with pytest.raises(MergeError, match=r"model\.safetensors: write failed: ") as refusal:
            file.append(Block(memoryview(SOURCE)))
            file.finish()
        assert ("make room" in str(refusal.value)) == (error == errno.ENOSPC)


def test_an_existing_file_is_left_alone(tmp_path):
    (tmp_path / "out").write_bytes(b"mine")
    with pytest.raises(MergeError, match="cannot be created"):
        OutputFile(tmp_path / "out", 10)
    assert (tmp_path / "out").read_bytes() == b"mine"
