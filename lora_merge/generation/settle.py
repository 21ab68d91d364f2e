"""Settles what the user left open, from the certificate, from an earlier run, or by default."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.opening import EngineKind, vllm_is_installed
from lora_merge.engines.own_code import code_from_elsewhere
from lora_merge.engines.prompts import DEFAULT_PREFILL
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.gate import Gate
from lora_merge.generation.options import EngineOptions, GenerateOptions
from lora_merge.generation.record import RunRecord

CHUNK_WITH_GPU = 8192
CHUNK_WITHOUT_GPU = 1024
ENGINE_NAMES: dict[EngineKind, str] = {"hf": "transformers", "vllm": "vllm"}
"""What each engine calls itself in ``describe()``."""


@dataclass(frozen=True)
class Settled:
    """Every choice of a run, made.

    Attributes:
        kind: the engine, ``hf`` or ``vllm``.
        dtype: the certified one, or as it was given.
        engine: the other engine options.
        prefill, skip_label, write_label: how the decision is read.
        chunk_size: prompts at a time.
        longest: tokens of the longest prompt with decision and text; 0 until the prompts are read.
    """

    kind: EngineKind
    dtype: str
    engine: EngineOptions
    prefill: str
    skip_label: str
    write_label: str
    chunk_size: int
    longest: int = 0

    def hf_options(self) -> dict[str, Any]:
        """Options of the Transformers engine; none where vLLM runs."""
        if self.kind != "hf":
            return {}
        from lora_merge.engines.transformers_engine import usual_batches

        deciding, writing = usual_batches(self.engine.device)
        given = self.engine.batch_size
        sizes = {"batch_size": deciding, "write_batch_size": writing if given is None else given}
        return {**sizes, **self._trust()}

    def vllm_options(self) -> dict[str, Any]:
        """Options of the vLLM engine."""
        return {**self.engine.vllm_options(), "longest": self.longest, **self._trust()}

    def _trust(self) -> dict[str, bool]:
        return {"trust_remote_code": True} if self.engine.trust_remote_code else {}

    def to_json(self, options: GenerateOptions, labels: DecisionLabels) -> dict[str, Any]:
        """Everything chosen that can move a row, for the run record."""
        return {
            "engine": self.kind,
            "dtype": self.dtype,
            "engine_options": {**self.engine.hf_options(), **self.engine.vllm_options()},
            "prefill": self.prefill,
            "labels": labels.to_json(),
            "skip_threshold": options.skip_threshold,
            "write_all": options.write_all,
            "max_tokens": options.max_tokens,
            "text_key": options.text_key,
            "chunk_size": self.chunk_size,
        }


def settle(options: GenerateOptions, gate: Gate, earlier: RunRecord | None) -> Settled:
    """Make every choice that ``options`` leave open. ``earlier``: the record of the run that is resumed.

    Raises:
        VerificationError, GenerationError: what was chosen is not what was certified. The token ids of the labels can be compared
            only once the tokenizer is there.
    """
    certificate = gate.certificate
    kind = options.engine.engine
    if kind == "auto":
        kind = gate.engine or ("vllm" if vllm_is_installed() else "hf")
    options.engine.check_for(kind)
    dtype: str = options.engine.dtype
    if dtype == "auto" and gate.dtype is not None:
        dtype = gate.dtype
    settled = Settled(
        kind=kind,
        dtype=dtype,
        engine=options.engine,
        prefill=_first(options.prefill, certificate.prefill if certificate else None, DEFAULT_PREFILL),
        skip_label=_first(options.skip_label, certificate.labels.skip.text if certificate else None, "skip"),
        write_label=_first(options.write_label, certificate.labels.write.text if certificate else None, "write"),
        chunk_size=options.chunk_size or _earlier_chunk_size(earlier) or _usual_chunk_size(),
    )
    if certificate is not None:
        certified = (certificate.labels.skip.text, certificate.labels.write.text)
        if (settled.skip_label, settled.write_label) != certified:
            raise GenerationError(
                f"certificate {certificate.path}: was measured with labels {certified[0]!r} and {certified[1]!r}, this run has "
                f"{settled.skip_label!r} and {settled.write_label!r}; verify again with what generation uses"
            )
        if (certificate.engine.get("settings") or {}).get("trust_remote_code") and not options.engine.trust_remote_code:
            raise GenerationError(
                f"certificate {certificate.path}: the checkpoint was measured with Python code of its own; "
                "if you trust that code, let it run here too: --trust-remote-code"
            )
        elsewhere = code_from_elsewhere(gate.model) if options.engine.trust_remote_code else None
        if elsewhere is not None:
            raise GenerationError(
                f"{elsewhere}, where nothing vouches for it; put it into the checkpoint's folder and verify again"
            )
        gate.check_use({"kind": ENGINE_NAMES[kind], "dtype": settled.dtype}, certificate.labels, settled.prefill)
    return settled


def _first(*choices: str | None) -> str:
    """The first that is not None; an empty one counts."""
    return next(choice for choice in choices if choice is not None)


def _earlier_chunk_size(earlier: RunRecord | None) -> int | None:
    size = None if earlier is None else earlier.settings.get("chunk_size")
    return size if type(size) is int and size > 0 else None


def _usual_chunk_size() -> int:
    import torch

    # Asking the driver through NVML starts no CUDA in this process, which an engine that forks its workers could not bear.
    variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        return CHUNK_WITH_GPU if torch.cuda.is_available() else CHUNK_WITHOUT_GPU
    finally:
        os.environ.pop(variable) if before is None else os.environ.update({variable: before})
