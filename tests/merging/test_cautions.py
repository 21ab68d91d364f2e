"""What a merge says of recipes, several of them too, and of the base that an adapter names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from lora_merge.merging.cli import main
from lora_merge.merging.manifest import read_manifest
from lora_merge.merging.recipes import RECIPE_FILE
from tests.merging.test_hub import FIRST, SECOND, into_cache
from tests.merging.test_kinds_recipes import AXOLOTL, LLAMA_FACTORY, TRL

NF4 = {"quant_type": "nf4", "double_quant": True, "block_size": 64, "quant_dtype": "bfloat16"}


def record(folder: Path, **recipe: Any) -> None:
    content = {"format": "lora-merge/quantization-recipe", "version": 1, "recipe": recipe}
    (folder / RECIPE_FILE).write_text(json.dumps(content))


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@dataclass
class Place:
    base: Path
    one: Path
    two: Path
    out: Path

    def run(self, *rest: object, adapters: int = 2):
        given = [argument for adapter in (self.one, self.two)[:adapters] for argument in ("--adapter", adapter)]
        arguments = ["--base", self.base, *given, "--out", self.out, "--quiet", "--overwrite", *rest]
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    def recipe(self) -> tuple[Any, ...]:
        found = read_manifest(self.out).recipe
        assert found is not None
        return (found.quant_type, found.double_quant, found.block_size, found.quant_dtype)


@pytest.fixture
def place(bases: Callable[..., Path], adapters: Callable[..., Path], tmp_path: Path) -> Place:
    for name in ("one", "two"):
        shutil.copytree(adapters("llama"), tmp_path / name)
        (tmp_path / name / "README.md").unlink(missing_ok=True)
    return Place(bases("llama"), tmp_path / "one", tmp_path / "two", tmp_path / "out")


def test_contradicting_recipes_are_refused(place):
    record(place.one, **NF4)
    record(place.two, **{**NF4, "quant_type": "fp4"})
    result = place.run("--from-4bit")
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    assert f"{place.one} and {place.two} were trained on bases quantized differently: quant_type is nf4" in result.stderr
    assert "fp4 by quantization_recipe.json of the other" in result.stderr and not place.out.exists()
    flagged = place.run("--from-4bit", "--quant-type", "fp4")
    assert flagged.exit_code == 0 and place.recipe()[0] == "fp4"
    assert flagged.stderr == f"warning: quant_type is given as fp4, but the record beside {place.one} says nf4\n"


def test_a_record_against_what_another_trainer_left(place):
    record(place.one, **NF4)
    (place.two / "axolotl.yaml").write_text(AXOLOTL + "bnb_config_kwargs:\n  bnb_4bit_use_double_quant: false\n")
    result = place.run("--from-4bit")
    assert result.exit_code == 1
    assert "double_quant is True by quantization_recipe.json of the first, False by axolotl.yaml (axolotl)" in result.stderr


def test_modules_that_contradict_each_other_are_counted(place):
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    record(place.one, **NF4, quantized_modules=names)
    record(place.two, **NF4, quantized_modules=names[:1])
    assert "quantized_modules is 2 modules by" in place.run("--from-4bit").stderr


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_recipes_that_agree(order, place):
    """The same twice; and two that tell different settings."""
    record(place.one, **{**NF4, "double_quant": False})
    record(place.two, **{**NF4, "double_quant": False})
    result = place.run("--from-4bit")
    assert (result.exit_code, result.stderr) == (0, "") and place.recipe() == ("nf4", False, 64, "bfloat16")
    parts = ({"quant_type": "fp4", "double_quant": False}, {"block_size": 128, "quant_dtype": "float16"})
    record(place.one, **parts[order[0]])
    record(place.two, **parts[order[1]])
    result = place.run("--from-4bit")
    assert (result.exit_code, result.stderr) == (0, "") and place.recipe() == ("fp4", False, 128, "float16")


@pytest.mark.parametrize("silent", [0, 1])
def test_one_adapter_says_nothing(silent, place):
    """What is known of one is better than what is assumed of the other, whichever comes first; and it is said."""
    folders = (place.one, place.two)
    record(folders[1 - silent], **{**NF4, "quant_type": "fp4"})
    result = place.run("--from-4bit")
    assert result.exit_code == 0 and place.recipe()[0] == "fp4" and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"warning: nothing beside {folders[silent]} says how it was trained")
    flags = ("--quant-type", "fp4", "--double-quant", "--blocksize", "64", "--quant-dtype", "bfloat16")
    assert place.run("--from-4bit", *flags).stderr == "", "with flags nothing is taken from one for the other"


def test_what_contradicts_the_record_is_said_wherever_it_comes_from(place, tmp_path):
    record(place.one, **NF4, quantized_modules=["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"])
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}))
    (line,) = place.run("--from-4bit", "--quant-config", config, adapters=1).stderr.splitlines()
    assert line.startswith("warning: quant_type is fp4 by ") and line.endswith(", but the record beside the adapter says nf4")
    (line,) = place.run("--from-4bit", "--quantized-modules", "*q_proj", adapters=1).stderr.splitlines()
    assert line.startswith(
        "warning: quantized_modules is given as *q_proj, but the record beside the adapter says model.layers.0."
    )


@pytest.mark.parametrize("trained", [None, "model.layers.1.mlp.up_proj"])
def test_an_adapter_before_its_training_is_said(trained, place):
    """As ``get_peft_model`` makes it, but for one module at most; PEFT writes lora_B as zeros."""
    tensors = load_file(place.one / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "lora_B" in name and (trained is None or trained not in name):
            tensor.zero_()
    save_file(tensors, place.one / "adapter_model.safetensors")
    expected = [f"warning: {place.one}: every update is zero, as before training, so that the merge changes no weight by it"]
    assert place.run(adapters=1).stderr.splitlines() == ([] if trained else expected)


def test_every_adapter_is_looked_at_on_its_way_into_the_original_weights(place):
    record(place.two, **NF4)
    (warning,) = place.run().stderr.splitlines()
    assert warning.startswith(f"warning: {place.two} was trained on a 4-bit base")


FOUR_BIT = ["unsloth/llama-3.2-1b-unsloth-bnb-4bit", "someone/model-NF4", "/models/Model-4bit/", "a/B-GPTQ-Int4", "x/y-w4a16"]


def apart_from_names(result) -> list[str]:
    """The lines on standard error without the one on a base of another name, which these tests give."""
    return [line for line in result.stderr.splitlines() if "has another name" not in line]


@pytest.mark.parametrize("name", [*FOUR_BIT, "unsloth/llama-3-8b-bnb-4bit"])
def test_names_that_say_4_bit(name, place):
    configure(place.one, base_model_name_or_path=name)
    result = place.run(adapters=1)
    assert result.exit_code == 0
    (line,) = apart_from_names(result)
    assert name in line and "merged into the original weights" in line and "--from-4bit" in line


@pytest.mark.parametrize(
    "name", ["google/gemma-3-4b-it", "Qwen/Qwen3-14Bit", "x/Model-8bit", "org/nf4x", "unsloth/Llama-3.2-1B", None]
)
def test_names_that_do_not(name, place):
    configure(place.one, base_model_name_or_path=name)
    assert apart_from_names(place.run(adapters=1)) == []


EIGHT_BIT = {
    "README.md": "```yaml\n" + AXOLOTL.replace("8bit: false", "8bit: true").replace("4bit: true", "4bit: false") + "```\n",
    "axolotl.yaml": "base_model: x\nload_in_8bit: true\nadapter: lora\n",
    "config.yaml": TRL.replace("load_in_4bit", "load_in_8bit"),
    "training_args.yaml": LLAMA_FACTORY.replace("bit: 4", "bit: 8"),
    "card": "The following `bitsandbytes` quantization config was used during training:\n"
    "- load_in_8bit: True\n- load_in_4bit: False\n- llm_int8_threshold: 6.0\n- bnb_4bit_quant_type: fp4\n",
}


@pytest.mark.parametrize("file", EIGHT_BIT)
def test_training_in_8_bit(file, place):
    (place.one / ("README.md" if file == "card" else file)).write_text(EIGHT_BIT[file])
    result = place.run("--from-4bit", adapters=1)
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    assert f"{place.one}: was trained on a base in 8 bit (" in result.stderr and "--quant-config" in result.stderr
    result = place.run(adapters=1)
    assert result.exit_code == 0 and len(result.stderr.splitlines()) == 1
    assert f"{place.one} was trained on a base in 8 bit (" in result.stderr and "original weights" in result.stderr
    record(place.one, **NF4)
    assert place.run("--from-4bit", adapters=1).exit_code == 0, "a record was meant, a leftover was not"
    (place.one / RECIPE_FILE).unlink()
    assert "8 bit" in place.run("--from-4bit").stderr, "among several, too"


def test_axolotl_in_4_bit_is_not_8(place):
    (place.one / "axolotl.yaml").write_text(AXOLOTL)
    result = place.run("--from-4bit", adapters=1)
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("named", "given", "warned"),
    [
        (None, None, False),
        ("main", None, False),
        ("main", "experiment", False),  # somebody chose it
        ("experiment", "experiment", False),
        ("experiment", None, True),
        (FIRST, None, False),
        (FIRST[:9], None, False),
        (FIRST, "experiment", True),
        (SECOND, None, True),
    ],
)
def test_revision_of_the_base(named, given, warned, bases, place, tmp_path):
    """The revision that an adapter names, against the commit that is merged. Oracle: the commits in the cache."""
    cache = tmp_path / "cache"
    into_cache(cache, "someone/base", bases("llama"), FIRST, "main")
    into_cache(cache, "someone/base", bases("qwen2"), SECOND, "experiment")
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lora_merge.merging", "--base", "someone/base", "--adapter", str(place.one)]
    command += ["--out", str(place.out), "--quiet", *(("--revision", given) if given else ())]
    configure(place.one, base_model_name_or_path="someone/base", revision=named)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    commit = SECOND if given else FIRST
    said = f"warning: {place.one} was trained on revision {named} of someone/base, and what is merged is {given or 'main'} "
    assert done.stderr == (f"{said}({commit[:12]}); add --revision {named}, unless that is the same\n" if warned else "")


def test_revision_of_another_base_or_of_a_folder(place):
    """Nothing can be compared; a folder is what somebody put there."""
    for name in ("someone/other", str(place.base)):
        configure(place.one, base_model_name_or_path=name, revision=SECOND)
        assert apart_from_names(place.run(adapters=1)) == []
