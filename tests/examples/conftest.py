"""The example's scripts are modules beside each other, as they are when one of them is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

GROCERY = Path(__file__).parents[2] / "examples" / "grocery"
sys.path.insert(0, str(GROCERY))


@pytest.fixture(scope="session")
def grocery() -> Path:
    """The folder of the example."""
    return GROCERY


@pytest.fixture(scope="session")
def base() -> Path:
    """The example's base model; fetched once (238 MB) where it is not there yet."""
    import fetch_model

    folder = GROCERY.parents[1] / fetch_model.DEFAULT_OUT
    fetch_model.fetch(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(base: Path) -> Any:
    """The base model's tokenizer."""
    from lora_merge.engines.model_files import load_tokenizer

    return load_tokenizer(base)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
