"""SHA-256 of two streams at once against hashlib, however the streams are cut."""

from __future__ import annotations

import hashlib
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config

from lora_merge.merging import sha256
from lora_merge.merging.hash_pair import SideBySide, hash_pair

KINDS = [SideBySide] + ([sha256.Interleaved] if sha256.has_instructions() else [])
DATA = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=200)
@given(cuts=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 700)), max_size=12))
def test_digests_are_those_of_hashlib(kind, cuts):
    """Every pair of lengths, in particular around 55, 56, 63, 64 and 65 bytes, where padding and blocks end."""
    sent = [b"", b""]
    with closing(kind()) as hashes:
        for lengths in cuts:
            parts = [DATA[len(so_far) : len(so_far) + length] for so_far, length in zip(sent, lengths, strict=True)]
            hashes.update(memoryview(parts[0]), parts[1])
            sent = [so_far + part for so_far, part in zip(sent, parts, strict=True)]
            assert hashes.hexdigests() == tuple(hashlib.sha256(stream).hexdigest() for stream in sent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 54, 55, 56, 57, 63, 64, 65, 119, 120, 128, 1 << 16])
def test_every_length_of_padding(kind, length):
    parts = DATA[:length], DATA[-length:] if length else b""
    with closing(kind()) as hashes:
        hashes.update(*parts)
        assert hashes.hexdigests() == tuple(hashlib.sha256(stream).hexdigest() for stream in parts)


def test_the_constants_are_those_of_the_standard():
    """FIPS 180-4, sections 4.2.2 and 5.3.3: first and last."""
    assert (sha256._ROUND_CONSTANTS[0], sha256._ROUND_CONSTANTS[-1]) == (0x428A2F98, 0xC67178F2)
    assert (sha256._INITIAL_STATE[0], sha256._INITIAL_STATE[-1]) == (0x6A09E667, 0x5BE0CD19)


def test_the_way_is_chosen_by_measuring(monkeypatch):
    monkeypatch.setattr(sha256, "pays", lambda: True)
    assert type(hash_pair()) is sha256.Interleaved
    monkeypatch.setattr(sha256, "pays", lambda: False)
    assert type(hash_pair()) is SideBySide


def test_a_processor_that_the_user_names_gets_hashlib(monkeypatch):
    """NUMBA_CPU_NAME=generic compiles for a processor without the instructions, whatever this one has."""
    monkeypatch.setattr(config, "CPU_NAME", "generic")
    for asked in (sha256.has_instructions, sha256.pays):
        asked.cache_clear()
    try:
        assert type(hash_pair()) is SideBySide
    finally:
        monkeypatch.undo()
        for asked in (sha256.has_instructions, sha256.pays):
            asked.cache_clear()
