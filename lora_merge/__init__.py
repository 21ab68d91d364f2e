"""Merge a QLoRA adapter the way it was trained, prove that the merged checkpoint decides alike, then let it write.

The public functions are imported on first use, so that ``import lora_merge`` and every ``--help`` stay instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "EngineOptions": "lora_merge.generation.options",
    "GateOptions": "lora_merge.generation.options",
    "GenerateOptions": "lora_merge.generation.options",
    "GenerateResult": "lora_merge.generation.run",
    "GenerationError": "lora_merge.generation.errors",
    "UserError": "lora_merge.errors",
    "MergeError": "lora_merge.merging.errors",
    "MergeOptions": "lora_merge.merging.api",
    "MergeResult": "lora_merge.merging.api",
    "QuantRecipe": "lora_merge.merging.quantization",
    "check_gate": "lora_merge.generation.api",
    "generate_gated": "lora_merge.generation.api",
    "join_results": "lora_merge.generation.joining",
    "merge": "lora_merge.merging.api",
    "plan_merge": "lora_merge.merging.api",
    "record_recipe": "lora_merge.merging.recipes",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from lora_merge.errors import UserError as UserError
    from lora_merge.generation.api import check_gate as check_gate
    from lora_merge.generation.api import generate_gated as generate_gated
    from lora_merge.generation.errors import GenerationError as GenerationError
    from lora_merge.generation.joining import join_results as join_results
    from lora_merge.generation.options import EngineOptions as EngineOptions
    from lora_merge.generation.options import GateOptions as GateOptions
    from lora_merge.generation.options import GenerateOptions as GenerateOptions
    from lora_merge.generation.run import GenerateResult as GenerateResult
    from lora_merge.merging.api import MergeOptions as MergeOptions
    from lora_merge.merging.api import MergeResult as MergeResult
    from lora_merge.merging.api import merge as merge
    from lora_merge.merging.api import plan_merge as plan_merge
    from lora_merge.merging.errors import MergeError as MergeError
    from lora_merge.merging.quantization import QuantRecipe as QuantRecipe
    from lora_merge.merging.recipes import record_recipe as record_recipe


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
