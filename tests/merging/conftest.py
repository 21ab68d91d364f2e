"""Bases and adapters that the merge tests share; made once a session and never written to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.merging.tokenizer_places import Place
from tests.tiny import save_tiny_adapter, save_tiny_base

ARCHITECTURES = ("llama", "qwen2", "gemma3")


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``bases(architecture, sharded=False, dtype=torch.bfloat16)`` -> the folder of a tiny base."""
    root = tmp_path_factory.mktemp("bases")

    def base(architecture: str, sharded: bool = False, dtype: torch.dtype = torch.bfloat16) -> Path:
        folder = root / f"{architecture}-{'sharded' if sharded else 'single'}-{str(dtype).removeprefix('torch.')}"
        if not folder.exists():
            save_tiny_base(folder, architecture, dtype, shard_size="60KB" if sharded else None)
        return folder

    return base


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, bases: Callable[..., Path]) -> Callable[..., Path]:
    """``adapters(architecture, **LoraConfig settings)`` -> the folder of a tiny adapter of that architecture's base."""
    root = tmp_path_factory.mktemp("adapters")
    made: dict[str, Path] = {}

    def adapter(architecture: str, dtype: torch.dtype = torch.float32, **settings: object) -> Path:
        key = f"{architecture} {dtype} {sorted(settings.items())}"
        if key not in made:
            made[key] = save_tiny_adapter(root / str(len(made)), bases(architecture), dtype=dtype, **settings)
        return made[key]

    return adapter


@pytest.fixture
def place(bases: Callable[..., Path], adapters: Callable[..., Path], tmp_path: Path) -> Place:
    """Copies of a tiny base and of its adapter, neither with a tokenizer, to put files beside."""
    shutil.copytree(bases("llama"), tmp_path / "base")
    shutil.copytree(adapters("llama"), tmp_path / "adapter")
    settings = tmp_path / "adapter" / "adapter_config.json"  # names the base where it was made
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": str(tmp_path / "base")}))
    return Place(tmp_path)
