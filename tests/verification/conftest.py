"""One real QLoRA run for all tests of this room; what tests change, they copy first."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lora_merge.merging.api import MergeOptions, merge
from tests.verification.tiny_qlora import train


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, ``adapter``, ``prompts.jsonl``, ``reference.jsonl``, and the merges ``merged`` (from 4 bit) and ``naive``; read
    only.
    """
    folder = tmp_path_factory.mktemp("qlora")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(folder)
    torch.set_num_threads(threads)
    merge(folder / "base", folder / "adapter", folder / "merged", MergeOptions(from_4bit=True))
    merge(folder / "base", folder / "adapter", folder / "naive")
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of everything in :func:`trained` but the base and the adapter, which the manifest names; free to change."""
    shutil.copytree(trained / "merged", tmp_path / "merged")
    shutil.copytree(trained / "naive", tmp_path / "naive")
    for name in ("prompts.jsonl", "reference.jsonl"):
        shutil.copy(trained / name, tmp_path / name)
    return tmp_path
