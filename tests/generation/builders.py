"""A tiny float32 checkpoint that decides both ways, its certificate, and prompt files, made to order."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lora_merge.engines.labels import DecisionLabels, resolve_labels
from lora_merge.engines.model_files import load_tokenizer
from tests.engines.builders import INSTRUCTION, WORDS, make_tokenizer
from tests.verification.builders import ordinary
from verification.certificate import make_statement, write_certificate
from verification.checks import Check
from verification.drift_file import write_measurements
from verification.gate import certificate_path
from verification.limits import Limits
from verification.merged_files import folder_files
from verification.verdict import judge

POSITIONS = 160
ENGINE = {"kind": "transformers", "versions": {"fake": "1"}, "dtype": "float32", "device": "cpu", "settings": {}}


def make_checkpoint(folder: Path) -> Path:
    """A random Llama whose head favours the two labels so that all of skip, write and other occur."""
    tokenizer = make_tokenizer()
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=420,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    labels = resolve_labels(tokenizer, [])
    with torch.no_grad():
        head = model.lm_head.weight
        towards_labels = head[5] * 6  # where the hidden state points along this, one of the labels is the likeliest
        for label in (labels.skip, labels.write):
            head[label.token_id] = towards_labels + head[label.token_id] * 0.6
        head[1] *= 2.2  # ends some texts before the limit
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def certify(
    folder: Path,
    *,
    limits: Limits | None = None,
    findings: Sequence[Check] = (),
    engine: Mapping[str, Any] = ENGINE,
    prefill: str = '{"decision": "',
    labels: DecisionLabels | None = None,
    sign_key: Path | None = None,
    drift: float = 0.008,
) -> Path:
    """Write a real certificate of ``folder`` over made-up measurements; returns its path."""
    from lora_merge.merging.digests import root_digest

    files = folder_files(folder)
    source = ordinary(drift=drift)
    about = dataclasses.replace(
        source.conditions,
        labels=labels or resolve_labels(load_tokenizer(folder), []),
        prefill=prefill,
        merged_files=files,
        merged_root=root_digest(files),
        findings=tuple(findings),
        arms={**source.conditions.arms, "merged": dict(engine)},
    )
    measured = dataclasses.replace(source, conditions=about)
    certificate = certificate_path(folder)
    certificate.parent.mkdir(exist_ok=True)
    drift_file = certificate.with_name("drift.jsonl")
    write_measurements(measured, drift_file)
    digest = hashlib.sha256(drift_file.read_bytes()).hexdigest()
    write_certificate(make_statement(judge(measured, limits or Limits(0.02)), about, digest), certificate, sign_key)
    return certificate


def make_prompts(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Prompts of one instruction, of varied length, with fields that pass through."""
    source = random.Random(seed)
    return [
        {
            "id": f"p{index}",
            "prompt": f"{INSTRUCTION}{' and '.join(source.choices(WORDS, k=source.randint(1, 5)))} {index}",
            "dish": "국",
            "id_of_dish": index,
        }
        for index in range(count)
    ]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """``rows`` as JSON Lines; bytes are written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
