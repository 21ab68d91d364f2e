"""A checkpoint with Python code of its own: certified with it, it runs with it only, and only where somebody says so.

Oracle: what the code itself does, which is to turn the head's signs around.
"""

from __future__ import annotations

import json
import uuid

import pytest
from click.testing import CliRunner

from lora_merge.engines.transformers_engine import TransformersEngine
from lora_merge.errors import UserError
from lora_merge.generation.api import generate_gated
from lora_merge.generation.cli import main
from lora_merge.generation.options import EngineOptions, GenerateOptions
from tests.generation.builders import ENGINE, certify, read_rows
from verification.errors import VerificationError

MODEL = """
from transformers import LlamaForCausalLM


class TurnedAround(LlamaForCausalLM):
    def forward(self, *arguments, **settings):
        output = super().forward(*arguments, **settings)
        output.logits = -output.logits
        return output
"""


@pytest.fixture
def with_code(checkpoint):
    """Its model type is one that Transformers knows as well: without trust it loads, and is another model.

    The module has a name of its own, since Transformers keeps what it has imported.
    """
    module = f"modeling_{uuid.uuid4().hex}"
    (checkpoint / f"{module}.py").write_text(MODEL)
    config = json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": f"{module}.TurnedAround"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    certify(checkpoint, engine={**ENGINE, "settings": {"trust_remote_code": True}})
    return checkpoint


def must_not_load(model, settled):
    raise AssertionError("a model was loaded")


def test_an_engine_says_whether_the_code_runs(with_code):
    for trusted in (True, False):
        engine = TransformersEngine.from_checkpoint(with_code, trust_remote_code=trusted, device="cpu")
        assert engine.describe()["settings"]["trust_remote_code"] is trusted
        assert type(engine._live().module).__name__ == ("TurnedAround" if trusted else "LlamaForCausalLM")
        engine.close()


def test_certified_with_its_code_it_runs_with_it(with_code, prompts, tmp_path):
    arguments = ["--model", with_code, "--prompts", prompts, "--skip-threshold", 0.4, "--max-tokens", 4, "--quiet"]
    done = CliRunner().invoke(main, [*map(str, arguments), "--out", str(tmp_path / "r.jsonl"), "--trust-remote-code"])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "r.jsonl.run.json").read_text())
    assert record["gate"]["gated"] is True and record["engine"]["settings"]["trust_remote_code"] is True
    plain = ["--engine", "hf", "--allow-ungated", "--out", str(tmp_path / "plain.jsonl")]
    assert CliRunner().invoke(main, [*map(str, arguments), *plain]).exit_code == 0
    ours, theirs = (read_rows(tmp_path / name) for name in ("r.jsonl", "plain.jsonl"))
    for row, other in zip(ours, theirs, strict=True):
        assert row["skip_probability"] == pytest.approx(1 - other["skip_probability"], abs=1e-5)


def test_certified_with_its_code_it_needs_a_word(with_code, prompts, tmp_path):
    with pytest.raises(UserError, match=r"measured with Python code of its own; if you trust that code, .*: --trust-remote-code"):
        generate_gated(with_code, prompts, tmp_path / "r.jsonl", GenerateOptions(0.5), open_engine=must_not_load)


@pytest.mark.parametrize(
    ("file", "auto_map"),
    [
        ("config.json", {"AutoModelForCausalLM": "org/other--modeling.Other"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["org/other--tokens.Slow", None]}),
    ],
)
def test_code_from_another_place_is_refused(with_code, prompts, tmp_path, file, auto_map):
    """Transformers would fetch it from there: no digest is of it."""
    content = json.loads((with_code / file).read_text())
    (with_code / file).write_text(json.dumps({**content, "auto_map": auto_map}))
    certify(with_code, engine={**ENGINE, "settings": {"trust_remote_code": True}})
    options = GenerateOptions(0.5, engine=EngineOptions(trust_remote_code=True))
    with pytest.raises(UserError, match=f"{file}: takes Python code from org/other, where nothing vouches for it"):
        generate_gated(with_code, prompts, tmp_path / "r.jsonl", options, open_engine=must_not_load)


def test_certified_without_its_code_it_does_not_run_with_it(with_code, prompts, tmp_path):
    certify(with_code, engine={**ENGINE, "settings": {"trust_remote_code": False}})
    options = GenerateOptions(0.5, engine=EngineOptions("hf", trust_remote_code=True))
    with pytest.raises(VerificationError, match="measured with trust_remote_code False, the engine has True, which makes it"):
        generate_gated(with_code, prompts, tmp_path / "r.jsonl", options)
    assert not (tmp_path / "r.jsonl").exists()


def test_trust_without_any_code_is_no_difference(checkpoint, prompts, tmp_path):
    said = []
    options = GenerateOptions(0.5, engine=EngineOptions("hf", trust_remote_code=True))
    result = generate_gated(checkpoint, prompts, tmp_path / "r.jsonl", options, say=said.append)
    assert result.record.engine["settings"]["trust_remote_code"] is False
    assert not any("trust_remote_code" in text for text in said)
