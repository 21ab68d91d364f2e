"""What ``verify-skip-drift`` says of prompts that the merged checkpoint cannot take, before it loads a model."""

from __future__ import annotations

import json
from pathlib import Path

import click.testing
import pytest
from transformers import AutoModelForCausalLM

from lora_merge.engines.model_files import load_tokenizer
from tests.verification.tiny_qlora import write_rows
from verification.cli import main


def test_a_token_that_the_merged_checkpoint_has_no_row_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a text-only checkpoint whose tokenizer knows the tokens of images."""
    tokenizer = load_tokenizer(place / "merged")
    rows = json.loads((place / "merged" / "config.json").read_text())["vocab_size"]
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<image {number}>" for number in range(rows)]})
    tokenizer.save_pretrained(place / "merged")
    beyond = tokenizer.convert_ids_to_tokens(rows)
    write_rows(place / "prompts.jsonl", [{"id": "p0", "prompt": "leek"}, {"id": "p1", "prompt": f"leek {beyond}"}])
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *given, **options: pytest.fail("a model was loaded"))
    given = ["--merged", place / "merged", "--prompts", place / "prompts.jsonl", "--max-delta", "0.02", "--engine", "hf"]
    result = click.testing.CliRunner().invoke(main, [*map(str, given), "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 3, result.output
    reason = f"prompt 'p1' (line 2): it holds token {rows} ({beyond!r}), which the model has no row for"
    assert reason in json.loads(result.stdout)["reasons"][0]
