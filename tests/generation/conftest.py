"""Fixtures of the generation tests; what they are made of is in builders.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.generation.builders import certify, make_checkpoint, make_prompts, write_lines
from verification.gate import certificate_path


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """The checkpoint with its certificate; nobody may write to it."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "merged")
    certify(folder)
    return folder


@pytest.fixture
def checkpoint(pristine, tmp_path) -> Path:
    """A copy of the checkpoint and its certificate, to do anything with."""
    folder = tmp_path / "merged"
    shutil.copytree(pristine, folder)
    shutil.copytree(certificate_path(pristine).parent, certificate_path(folder).parent)
    return folder


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write_lines(tmp_path / "prompts.jsonl", make_prompts(40))
