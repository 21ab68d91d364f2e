"""What a run is asked to do."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from lora_merge.engines.opening import EngineKind
from lora_merge.generation.errors import ConflictingOptions, GenerationError
from lora_merge.generation.selection import Selection
from lora_merge.generation.shards import Shard

Dtype = Literal["auto", "bfloat16", "float32", "float16"]

MAX_DELTA = 0.02
MAX_TOKENS = 64
MAX_QUARANTINE = 0.01


@dataclass(frozen=True)
class GateOptions:
    """What a run asks of the checkpoint's certificate.

    Attributes:
        certificate: its file; None for ``gate.intoto.json`` in the report folder beside the checkpoint.
        max_delta: the loosest limit of the mean \\|drift\\| it may have been judged by.
        trusted_key: PEM file of the public key that must have signed it.
        accept_assumed_recipe: accept that the quantization recipe of the reference is assumed.
        accept_warnings: accept every other warning.
        allow_ungated: run without any certificate; every row is then marked ``"gated": false``.
    """

    certificate: str | os.PathLike[str] | None = None
    max_delta: float = MAX_DELTA
    trusted_key: str | os.PathLike[str] | None = None
    accept_assumed_recipe: bool = False
    accept_warnings: bool = False
    allow_ungated: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_delta) and 0 < self.max_delta < 1):
            raise GenerationError(f"max_delta is {self.max_delta}; expected a number between 0 and 1")
        if self.allow_ungated and (self.certificate is not None or self.trusted_key is not None):
            raise ConflictingOptions(
                "--allow-ungated reads no certificate; leave out --certificate and --trusted-key, or the former"
            )


@dataclass(frozen=True)
class EngineOptions:
    """How the checkpoint is run. None leaves a choice to the certificate, and without one to the engine.

    Attributes:
        engine: ``auto``, ``hf`` or ``vllm``; ``auto`` is the certified one, and without a certificate vLLM where it is installed.
        dtype: ``auto`` is the certified one, and without a certificate the checkpoint's own.
        device: for Transformers; vLLM runs on the device it was built for.
        batch_size: texts that Transformers writes at once; None for 2,048 on a GPU, where that many fit, and 128 without.
        tensor_parallel_size, max_model_len, gpu_memory_utilization, max_num_seqs: vLLM's own, under its names.
        trust_remote_code: whether Python code in the checkpoint may run. One that was certified with it runs with it only.
    """

    engine: EngineKind = "auto"
    dtype: Dtype = "auto"
    device: str = "auto"
    batch_size: int | None = None
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    trust_remote_code: bool = False

    def vllm_options(self) -> dict[str, Any]:
        """Those that are vLLM's and were given."""
        names = ("tensor_parallel_size", "max_model_len", "gpu_memory_utilization", "max_num_seqs")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def hf_options(self) -> dict[str, Any]:
        """Those that are the Transformers engine's and were given."""
        return {} if self.batch_size is None else {"write_batch_size": self.batch_size}

    def check_for(self, kind: EngineKind) -> None:
        """Refuse options of the engine that will not run: what has no effect was meant to have one."""
        foreign = self.vllm_options() if kind == "hf" else self.hf_options()
        foreign.pop("max_model_len", None)  # also bounds the prompts
        if foreign:
            name = "--batch-size" if kind == "vllm" else f"--{next(iter(foreign)).replace('_', '-')}"
            raise ConflictingOptions(
                f"{name} has no effect on engine {kind}; leave it out, or choose the other engine with --engine"
            )


@dataclass(frozen=True)
class GenerateOptions:
    """How to decide and write.

    Attributes:
        skip_threshold: a prompt whose skip probability is above it gets no text.
        gate: what is asked of the certificate.
        engine: how the checkpoint is run.
        prefill, skip_label, write_label: how the decision is read; None for the certified ones, and without a certificate
            ``{"decision": "``, ``skip`` and ``write``.
        max_tokens: most tokens written after the decision token.
        text_key: key of the text in the JSON that the model writes.
        write_all: write a text for every prompt whose decision is ``write``, whatever its skip probability.
        max_quarantine: largest share of the prompt file that may be set aside.
        chunk_size: prompts that are decided, written and saved at a time; None for 8,192 with a CUDA device and 1,024 without, or
            when resuming for what the run began with.
        shard: which part of the prompts to take on.
        resume: go on with results that are already there.
    """

    skip_threshold: float
    gate: GateOptions = field(default_factory=GateOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    prefill: str | None = None
    skip_label: str | None = None
    write_label: str | None = None
    max_tokens: int = MAX_TOKENS
    text_key: str = "text"
    write_all: bool = False
    max_quarantine: float = MAX_QUARANTINE
    chunk_size: int | None = None
    shard: Shard = field(default_factory=Shard)
    resume: bool = False

    def __post_init__(self) -> None:
        Selection(self.skip_threshold)
        for name in ("max_tokens", "chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise GenerationError(f"{name} is {value}; expected at least 1")
        if not (math.isfinite(self.max_quarantine) and 0 <= self.max_quarantine <= 1):
            raise GenerationError(f"max_quarantine is {self.max_quarantine}; expected a share from 0 to 1")
