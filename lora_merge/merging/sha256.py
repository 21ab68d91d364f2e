"""SHA-256 of two streams at once on one core.

SHA-256 is a chain, each round waits for the one before, and the SHA instructions of x86 processors take four cycles each but may
start one every two. Two independent streams, their rounds taken in turn, fill that gap: on AMD's Zen they go nearly twice as fast
as one after the other, on Intel's Sapphire Rapids they gain nothing. hashlib has no call for that. The algorithm is that of
FIPS 180-4; the instructions are ``sha256rnds2``, ``sha256msg1`` and ``sha256msg2`` (Gulley et al., "Intel SHA Extensions", 2013).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from lora_merge.merging.hash_pair import Bytes
from lora_merge.merging.loops import compiled

BLOCK = 64
"""Bytes that SHA-256 takes at a time."""


def _primes(count: int) -> list[int]:
    found: list[int] = []
    candidate = 2
    while len(found) < count:
        if all(candidate % prime for prime in found):
            found.append(candidate)
        candidate += 1
    return found


def _root_bits(number: int, degree: int) -> int:
    """The first 32 bits of the fractional part of a root of ``number``: how the standard makes its constants."""
    shifted = number << (32 * degree)
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**degree <= shifted else (low, middle)
    return low & 0xFFFFFFFF


_ROUND_CONSTANTS = tuple(_root_bits(prime, 3) for prime in _primes(64))
_INITIAL_STATE = tuple(_root_bits(prime, 2) for prime in _primes(8))
# The instructions keep a..h as (f, e, b, a) and (h, g, d, c), lowest element first.
_PACKED = (5, 4, 1, 0, 7, 6, 3, 2)

_WORD = ir.IntType(32)
_VECTOR = ir.VectorType(_WORD, 4)


def _vector(values: tuple[int, ...]) -> ir.Constant:
    return ir.Constant(_VECTOR, [ir.Constant(_WORD, value) for value in values])


class _Lane:
    """Emits the rounds of one stream: its chain of vectors, four rounds at a time."""

    def __init__(self, builder: ir.IRBuilder, states: tuple[Any, Any], data: Any) -> None:
        self.builder = builder
        self.abef, self.cdgh = states
        swap = self._function("llvm.bswap.v4i32", 1)
        self.words = []
        for part in range(4):
            place = builder.gep(data, [ir.Constant(ir.IntType(64), 16 * part)])
            loaded = builder.load(builder.bitcast(place, _VECTOR.as_pointer()))
            loaded.align = 1
            self.words.append(builder.call(swap, [loaded]))

    def _function(self, name: str, arguments: int) -> Any:
        return cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * arguments), name)

    def four_rounds(self, group: int) -> None:
        builder = self.builder
        if group >= 4:
            # w[t] for four t: from 16, 15, 7 and 2 rounds ago.
            before = self.words
            mixed = builder.call(self._function("llvm.x86.sha256msg1", 2), [before[group - 4], before[group - 3]])
            seven_ago = builder.shuffle_vector(before[group - 2], before[group - 1], _vector((1, 2, 3, 4)))
            mixed = builder.add(mixed, seven_ago)
            self.words.append(builder.call(self._function("llvm.x86.sha256msg2", 2), [mixed, before[group - 1]]))
        rounds = self._function("llvm.x86.sha256rnds2", 3)
        input_ = builder.add(self.words[group], _vector(_ROUND_CONSTANTS[4 * group : 4 * group + 4]))
        self.cdgh = builder.call(rounds, [self.cdgh, self.abef, input_])
        input_ = builder.shuffle_vector(input_, input_, _vector((2, 3, 0, 0)))
        self.abef = builder.call(rounds, [self.abef, self.cdgh, input_])


def _compressing(lanes: int) -> Any:
    """The compression function over ``blocks`` blocks of ``lanes`` streams, as a numba intrinsic over addresses.

    ``states`` points at (lanes, 8) uint32, packed; ``first`` and ``second`` at the streams' bytes.
    """

    def compress(typingctx: Any, states: Any, first: Any, second: Any, blocks: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            address, *data, blocks = arguments
            vectors = builder.inttoptr(address, _VECTOR.as_pointer())
            places = [builder.gep(vectors, [ir.Constant(ir.IntType(64), place)]) for place in range(2 * lanes)]
            kept = []
            for place in places:
                value = builder.load(place)
                value.align = 4
                kept.append(cgutils.alloca_once_value(builder, value))
            with cgutils.for_range(builder, blocks) as loop:
                offset = builder.mul(loop.index, ir.Constant(loop.index.type, BLOCK))
                emitted = []
                for lane in range(lanes):
                    start = builder.inttoptr(builder.add(data[lane], offset), ir.IntType(8).as_pointer())
                    states = (builder.load(kept[2 * lane]), builder.load(kept[2 * lane + 1]))
                    emitted.append((_Lane(builder, states, start), states))
                for group in range(16):
                    for stream, _ in emitted:
                        stream.four_rounds(group)
                for lane, (stream, (abef, cdgh)) in enumerate(emitted):
                    builder.store(builder.add(stream.abef, abef), kept[2 * lane])
                    builder.store(builder.add(stream.cdgh, cdgh), kept[2 * lane + 1])
            for place, value in zip(places, kept, strict=True):
                builder.store(builder.load(value), place).align = 4
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp), code

    return intrinsic(compress)


_compress_one = _compressing(1)
_compress_two = _compressing(2)


@compiled
def _advance_one(states: int, data: int, blocks: int) -> None:
    _compress_one(states, data, data, blocks)


@compiled
def _advance_two(states: int, first: int, second: int, blocks: int) -> None:
    _compress_two(states, first, second, blocks)


class _Stream:
    """One stream's state (8,) uint32 as the instructions keep it, the bytes that fill no block yet, and its length."""

    def __init__(self, state: NDArray[np.uint32]) -> None:
        self.state = state
        self.state[:] = [_INITIAL_STATE[place] for place in _PACKED]
        self._rest = b""
        self._length = 0

    def take(self, part: Bytes) -> NDArray[np.uint8]:
        """The whole blocks of ``part`` that go on from a block's end; what comes before and after them is dealt with here."""
        data = np.frombuffer(part, np.uint8)
        self._length += data.size
        if self._rest:
            missing = BLOCK - len(self._rest)
            self._rest += data[:missing].tobytes()
            data = data[missing:]
            if len(self._rest) < BLOCK:
                return data
            self.advance(np.frombuffer(self._rest, np.uint8))
        whole = data.size // BLOCK * BLOCK
        self._rest = data[whole:].tobytes()
        return data[:whole]

    def advance(self, blocks: NDArray[np.uint8]) -> None:
        if blocks.size:
            _advance_one(self.state.ctypes.data, blocks.ctypes.data, blocks.size // BLOCK)

    def hexdigest(self) -> str:
        padding = b"\x80" + b"\0" * (-(len(self._rest) + 9) % BLOCK) + (8 * self._length).to_bytes(8, "big")
        ended = _Stream(np.empty(8, np.uint32))
        ended.state[:] = self.state
        ended.advance(np.frombuffer(self._rest + padding, np.uint8))
        words = np.empty(8, np.uint32)
        words[list(_PACKED)] = ended.state
        return words.astype(">u4").tobytes().hex()


class Interleaved:
    """The SHA-256 of two streams, a block of each in turn; see :class:`~lora_merge.merging.hash_pair.HashPair`."""

    def __init__(self) -> None:
        self._states = np.empty((2, 8), np.uint32)
        self._streams = [_Stream(state) for state in self._states]

    def update(self, first: Bytes, second: Bytes) -> None:
        one, other = (stream.take(part) for stream, part in zip(self._streams, (first, second), strict=True))
        together = min(one.size, other.size)
        if together:
            _advance_two(self._states.ctypes.data, one.ctypes.data, other.ctypes.data, together // BLOCK)
        for stream, blocks in zip(self._streams, (one, other), strict=True):
            stream.advance(blocks[together:])

    def hexdigests(self) -> tuple[str, str]:
        first, second = (stream.hexdigest() for stream in self._streams)
        return first, second

    def close(self) -> None:
        return


@cache
def pays() -> bool:
    """Whether two streams in turn take clearly less time here than hashlib needs for one after the other."""
    if not has_instructions():
        return False
    content = bytes(1 << 18)
    single = _least_seconds(lambda: hashlib.sha256(content))
    return _least_seconds(lambda: Interleaved().update(content, content)) < 1.6 * single


def _least_seconds(work: Callable[[], object]) -> float:
    """Of five runs, so that what else the machine does counts less."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@cache
def has_instructions() -> bool:
    """Whether numba compiles for a processor with the SHA extensions (this one unless the user names another), and rightly."""
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return False
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # a processor that LLVM cannot ask
        return False
    if not (features.get("sha") and features.get("ssse3")):
        return False
    trial, content = Interleaved(), bytes(range(200))
    trial.update(content, content[1:])
    return trial.hexdigests() == (hashlib.sha256(content).hexdigest(), hashlib.sha256(content[1:]).hexdigest())
