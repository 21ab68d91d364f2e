"""The two halves of a low-rank update as matrices, cut from the adapter tensors that hold them.

Most adapter tensors are one half of one update. The tensors of an adapter on fused experts hold the halves of every expert at
once; an :class:`ExpertA` or :class:`ExpertB` is one expert's share of them.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging.dtypes import widen
from lora_merge.merging.safetensors_file import TensorInfo, read_tensor

PEFT_PACKING = "peft"
"""lora_B of fused experts as PEFT lays it out: (out_features, rank, experts), the expert fastest."""
EXPERT_MAJOR_PACKING = "expert-major"
"""The other layout in circulation: (out_features, experts, rank), the rank fastest. Key and shape are the same."""
PACKINGS = (PEFT_PACKING, EXPERT_MAJOR_PACKING)


class Factor(Protocol):
    """A matrix to multiply, known by the adapter tensor it comes from."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def read(self) -> NDArray[np.float64]:
        """The matrix in float64, exactly as stored."""
        ...


@dataclass(frozen=True)
class Whole:
    """A whole tensor as (first dimension, all others): a linear layer's half, or a convolution's with its kernel flattened."""

    tensor: TensorInfo

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], math.prod(self.tensor.shape[1:])

    def read(self) -> NDArray[np.float64]:
        return widen(read_tensor(self.tensor), self.tensor.dtype).astype(np.float64).reshape(self.shape)


@dataclass(frozen=True)
class ExpertA:
    """One expert's lora_A, (rank, in_features), out of a tensor (experts * rank, in_features) that goes expert by expert."""

    tensor: TensorInfo
    expert: int
    experts: int

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0] // self.experts, self.tensor.shape[1]

    def read(self) -> NDArray[np.float64]:
        rank = self.shape[0]
        return _whole_once(self.tensor)[self.expert * rank : (self.expert + 1) * rank].astype(np.float64)


@dataclass(frozen=True)
class ExpertB:
    """One expert's lora_B, rows ``[first, last)`` of (out_features, rank), out of a tensor (out_features, rank * experts).

    Attributes:
        packing: which of rank and expert is the fastest; see :data:`PACKINGS`.
        first, last: the rows wanted: a fused gate and up projection is two halves of them.
    """

    tensor: TensorInfo
    expert: int
    experts: int
    packing: str
    first: int
    last: int

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.last - self.first, self.tensor.shape[1] // self.experts

    def read(self) -> NDArray[np.float64]:
        rows = _whole_once(self.tensor)[self.first : self.last]
        if self.packing == PEFT_PACKING:
            return rows.reshape(len(rows), -1, self.experts)[:, :, self.expert].astype(np.float64)
        return rows.reshape(len(rows), self.experts, -1)[:, self.expert, :].astype(np.float64)


def _whole_once(tensor: TensorInfo) -> NDArray[np.float32]:
    """The whole tensor in float32, read once for the many experts that ask for it one after the other."""
    now = os.stat(tensor.path)
    return _remembered(tensor, (now.st_size, now.st_mtime_ns, now.st_ino))


@lru_cache(maxsize=4)
def _remembered(tensor: TensorInfo, identity: tuple[int, ...]) -> NDArray[np.float32]:
    # The file's identity is part of what is remembered, so that a changed file is read anew.
    return widen(read_tensor(tensor), tensor.dtype)
