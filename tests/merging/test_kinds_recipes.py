"""The recipe from what trainers leave beside an adapter. Oracle: the settings that each trainer passes to BitsAndBytesConfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml  # type: ignore[import-untyped]
from peft import LoraConfig, get_peft_model

from lora_merge.merging.errors import MergeError
from lora_merge.merging.quantization import ASSUMED
from lora_merge.merging.recipes import RECIPE_FILE, find_recipe, recipe_of_config, record_recipe
from lora_merge.merging.trainers import eight_bit_training, leftover_recipe

# As PEFT writes it (peft_model.py, create_or_update_model_card), with the settings of a live BitsAndBytesConfig.
PEFT_CARD = """---
library_name: peft
---
## Training procedure

The following `bitsandbytes` quantization config was used during training:
- quant_method: bitsandbytes
- _load_in_8bit: False
- _load_in_4bit: True
- llm_int8_threshold: 6.0
- llm_int8_skip_modules: {skip}
- bnb_4bit_quant_type: {quant_type}
- bnb_4bit_use_double_quant: {double}
- bnb_4bit_compute_dtype: bfloat16
- load_in_4bit: {four}
- load_in_8bit: False

### Framework versions
- PEFT 0.12.0
"""
AXOLOTL = """base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
load_in_4bit: true
adapter: qlora
bf16: auto
"""
LLAMA_FACTORY = """model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
quantization_bit: 4
quantization_method: bnb
finetuning_type: lora
bf16: true
"""
TRL = """model_name_or_path: Qwen/Qwen2-0.5B
load_in_4bit: true
use_peft: true
dtype: bfloat16
"""


def settings(folder: Path, base: str | None = None) -> dict[str, Any] | None:
    recipe = leftover_recipe(folder, base)
    return None if recipe is None else {name: getattr(recipe, name) for name in recipe.origins}


def card(quant_type: str = "nf4", double: bool = True, four: bool = True, skip: str = "None") -> str:
    text = PEFT_CARD.format(quant_type=quant_type, double=double, four=four, skip=skip)
    return text if four else text.replace("_load_in_4bit: True", "_load_in_4bit: False")


def test_nothing_left_says_nothing(tmp_path):
    (tmp_path / "README.md").write_text("# A model\n\n```yaml\nlearning_rate: 0.1\n```\n")
    (tmp_path / "notes.yaml").write_text("- a\n- list\n")
    (tmp_path / "broken.yaml").write_text("{: :")
    assert settings(tmp_path, "meta-llama/Llama-3.2-1B") is None


@pytest.mark.parametrize(
    "value", ["2024-31-12", "0b_", "9" * 5000, '!!int ""', "!!bool x", "!!timestamp x", "[" * 3000], ids=lambda value: value[:12]
)
def test_yaml_that_its_own_library_fails_on(value, tmp_path):
    """Oracle: PyYAML, with an error that is none of its own."""
    text = f"{AXOLOTL}run_name: {value}\n"
    with pytest.raises((ValueError, LookupError, AttributeError, RecursionError)):
        yaml.safe_load(text)
    (tmp_path / "config.yaml").write_text(text)
    assert settings(tmp_path) is None and eight_bit_training(tmp_path) is None


def test_settings_of_another_type_are_one_line(tmp_path):
    expected = r"skip_modules is .*, expected a list of module names"
    for skip in ("5", "lm_head"):
        (tmp_path / "config.yaml").write_text(f"{AXOLOTL}bnb_config_kwargs: {{llm_int8_skip_modules: {skip}}}\n")
        with pytest.raises(MergeError, match=expected):
            settings(tmp_path)
        base = {"quantization_config": {"load_in_4bit": True, "llm_int8_skip_modules": yaml.safe_load(skip)}}
        with pytest.raises(MergeError, match=expected):
            recipe_of_config(base)
    (tmp_path / "config.yaml").write_text(f"{AXOLOTL}bnb_config_kwargs: [1]\n")
    assert settings(tmp_path) is not None, "axolotl's defaults"


@pytest.mark.parametrize(("quant_type", "double"), [("nf4", True), ("nf4", False), ("fp4", False)])
def test_peft(quant_type, double, tmp_path):
    (tmp_path / "README.md").write_text(card(quant_type, double, skip="['lm_head', 'score']"))
    expected = {"quant_type": quant_type, "double_quant": double, "block_size": 64, "skip_modules": ("lm_head", "score")}
    assert settings(tmp_path) == expected
    (tmp_path / "README.md").write_text(card(four=False))
    assert settings(tmp_path) is None


def test_axolotl(tmp_path):
    expected = {"quant_type": "nf4", "double_quant": True, "block_size": 64, "quant_dtype": "bfloat16"}
    (tmp_path / "README.md").write_text(f"<details><summary>See axolotl config</summary>\n\n```yaml\n{AXOLOTL}\n```\n</details>")
    assert settings(tmp_path) == expected
    given = "bnb_config_kwargs:\n  bnb_4bit_use_double_quant: false\n  bnb_4bit_quant_type: fp4\n"
    half = AXOLOTL.replace("bf16: auto", "bf16: false\nfp16: true")
    (tmp_path / "README.md").write_text(f"```yaml\n{half}{given}```\n")
    assert settings(tmp_path) == {**expected, "double_quant": False, "quant_type": "fp4", "quant_dtype": "float16"}


@pytest.mark.parametrize(
    ("lines", "dtype"),
    [
        ("", "bfloat16"),
        ("bf16: auto", "bfloat16"),
        ("bf16: full", "bfloat16"),
        ("bfloat16: true", "bfloat16"),
        ("bf16: false\nbfloat16: true", "bfloat16"),
        ("bf16: true\nfp16: true", "bfloat16"),
        ("bf16: false\nfp16: true", "float16"),
        ("bf16: false\nfloat16: true", "float16"),
        ("bf16: false", "float32"),
        ("bf16: null\nfp16: null", "float32"),
        ("bf16: auto\nfp16: true", None),
        ("float16: true", None),
    ],
)
def test_the_type_in_which_axolotl_loads(lines, dtype, tmp_path):
    """Oracle: its ``resolve_dtype``, after its schema has filled in ``bf16: auto``. None where versions or cards disagree."""
    (tmp_path / "config.yaml").write_text(AXOLOTL.replace("bf16: auto", lines))
    assert settings(tmp_path).get("quant_dtype") == dtype


def test_llama_factory(tmp_path):
    (tmp_path / "training_args.yaml").write_text(LLAMA_FACTORY)
    assert settings(tmp_path) == {"quant_type": "nf4", "double_quant": True, "block_size": 64, "quant_dtype": "bfloat16"}
    (tmp_path / "training_args.yaml").write_text(LLAMA_FACTORY + "double_quantization: false\nquantization_type: fp4\n")
    assert settings(tmp_path) == {"quant_type": "fp4", "double_quant": False, "block_size": 64, "quant_dtype": "bfloat16"}
    (tmp_path / "training_args.yaml").write_text(LLAMA_FACTORY.replace("bit: 4", "bit: 8"))
    with pytest.raises(MergeError, match="quantization_bit"):
        settings(tmp_path)


def test_trl(tmp_path):
    (tmp_path / "config.yaml").write_text(TRL)
    assert settings(tmp_path) == {"quant_type": "nf4", "double_quant": False, "block_size": 64, "quant_dtype": "bfloat16"}
    (tmp_path / "config.yaml").write_text(TRL + "use_bnb_nested_quant: true\n")
    assert settings(tmp_path)["double_quant"] is True


def test_unsloth(tmp_path):
    expected = {"quant_type": "nf4", "double_quant": True, "block_size": 64, "quant_dtype": "bfloat16"}
    assert settings(tmp_path, "unsloth/llama-3-8b-bnb-4bit") == expected
    with pytest.raises(MergeError, match="give it as --base"):
        settings(tmp_path, "unsloth/gemma-3-4b-it-unsloth-bnb-4bit")


def test_leftovers_that_contradict_each_other(tmp_path):
    (tmp_path / "README.md").write_text(card("fp4", double=False))
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    with pytest.raises(MergeError, match=r"README\.md.*axolotl"):
        settings(tmp_path)


def test_order_of_sources(tmp_path):
    """Flags before everything; a record before leftovers; leftovers before the assumed recipe, setting by setting."""
    (tmp_path / "README.md").write_text(card("nf4", double=False))
    found = find_recipe({"quant_type": "fp4"}, None, {}, tmp_path)
    assert (found.quant_type, found.double_quant, found.quant_dtype) == ("fp4", False, "bfloat16")
    assert found.origins["quant_type"] == "given explicitly" and "README.md" in found.origins["double_quant"]
    assert found.origins["quant_dtype"] == ASSUMED and found.assumed, "PEFT does not write down the weights' own type"
    record = {"format": "lora-merge/quantization-recipe", "version": 1, "recipe": {"quant_type": "nf4", "double_quant": True}}
    (tmp_path / "quantization_recipe.json").write_text(json.dumps(record))
    assert find_recipe({}, None, {}, tmp_path).double_quant is True


def test_a_recipe_is_not_recorded_of_a_model_with_its_adapter_merged(bases, tmp_path):
    """PEFT quantizes the sum anew, from float32: these are not the weights that training held."""
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    base = transformers.AutoModelForCausalLM.from_pretrained(bases("llama"), quantization_config=config, device_map="cpu")
    live = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    live.save_pretrained(tmp_path)
    expected = record_recipe(live, tmp_path)
    assert expected.quant_dtype == "bfloat16"
    before = (tmp_path / RECIPE_FILE).read_bytes()
    live.merge_adapter()
    with pytest.raises(MergeError, match=r"q_proj: an adapter is merged into it.*record the recipe before that"):
        record_recipe(live, tmp_path)
    assert (tmp_path / RECIPE_FILE).read_bytes() == before
