"""Python code that comes with a checkpoint: whether it runs is a part of what the model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILES = ("config.json", "tokenizer_config.json")


def runs_own_code(*parts: Any) -> bool:
    """Whether the class of one of ``parts`` (a model, a tokenizer), or of its configuration, came with the checkpoint.

    Source: Transformers imports such code below ``transformers_modules``.
    """
    objects = [*parts, *(getattr(part, "config", None) for part in parts)]
    return any(type(part).__module__.split(".")[0] == "transformers_modules" for part in objects)


def code_from_elsewhere(folder: str | Path) -> str | None:
    """What Transformers would fetch Python code for the checkpoint in ``folder`` from, as ``FILE: takes Python code from REPO``.

    None where all of it lies in the folder, or where there is none. Source: ``REPO--module.Class`` in ``auto_map``, which
    ``get_class_from_dynamic_module`` takes apart so.
    """
    for name in _FILES:
        try:
            content = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # whoever loads it says what is wrong
        named = content.get("auto_map") if isinstance(content, dict) else None
        for value in named.values() if isinstance(named, dict) else [named]:
            for reference in value if isinstance(value, list) else [value]:
                if isinstance(reference, str) and "--" in reference:
                    return f"{Path(folder) / name}: takes Python code from {reference.split('--')[0]}"
    return None
