"""A base is known again by a sample of its 4-bit weights. Oracle: bitsandbytes' own codes, of live models and of tensors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.functional import get_4bit_type, quantize_4bit
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lora_merge.merging.base_sample import BLOCKS, compare, parse_sample, sample_live
from lora_merge.merging.checkpoint import read_checkpoint
from lora_merge.merging.cli import main
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import ModelFolder
from lora_merge.merging.recipes import RECIPE_FILE, read_sample, record_recipe, resemblance

KINDS = [("nf4", "bfloat16"), ("fp4", "bfloat16"), ("nf4", "float16"), ("nf4", "float32")]


def checkpoint(folder):
    return read_checkpoint(ModelFolder(folder, str(folder)))


def live(base, quant_type="nf4", dtype="bfloat16"):
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=True)
    return AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=getattr(torch, dtype), device_map={"": "cpu"}
    )


@pytest.fixture
def recorded(bases, adapters, tmp_path):
    """An adapter's folder with its record, and the base."""
    folder = shutil.copytree(adapters("llama"), tmp_path / "adapter")
    record_recipe(live(bases("llama")), folder)
    return folder, bases("llama")


def changed(base, folder, share, layers=("self_attn.q_proj",)):
    """A copy of ``base`` in which some layers moved by ``share`` of their norm, by a low-rank update, as a merge moves them."""
    shutil.copytree(base, folder)
    path = folder / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if any(layer in name for layer in layers):
            rows, columns = tensor.shape
            update = torch.randn(rows, 4, generator=generator) @ torch.randn(4, columns, generator=generator)
            tensors[name] = (tensor.float() + share * update * tensor.float().norm() / update.norm()).to(tensor.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("quant_type", "dtype"), KINDS)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_base_of_a_live_model_is_known_again(quant_type, dtype, sharded, bases, adapters, tmp_path):
    folder = shutil.copytree(adapters("llama"), tmp_path / "adapter")
    recipe = record_recipe(live(bases("llama"), quant_type, dtype), folder)
    found = resemblance(folder, checkpoint(bases("llama", sharded)))
    assert found.is_same and found.layers == len(recipe.quantized_modules)
    assert str(found) == f"the same 4-bit weights, by a sample of {found.layers} layers"


def test_a_sample_is_of_bitsandbytes_codes(recorded):
    """Written out: eight blocks, evenly spread, of the levels that the codes stand for."""
    folder, base = recorded
    levels = get_4bit_type("nf4", device="cpu")
    record = json.loads((folder / RECIPE_FILE).read_text())
    for module, digests in record["base_sample"].items():
        tensor = load_file(base / "model.safetensors")[f"{module}.weight"]
        packed, _ = quantize_4bit(tensor, blocksize=64, quant_type="nf4", compress_statistics=True)
        codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).reshape(-1, 64).int()
        places = [(2 * place + 1) * len(codes) // (2 * BLOCKS) for place in range(BLOCKS)]
        expected = [hashlib.sha256(levels[codes[place]].numpy().tobytes()).hexdigest()[:8] for place in places]
        assert digests == "".join(expected), module


@pytest.mark.parametrize("share", [0.01, 0.03, 1.0])
def test_another_base_under_the_same_names_is_told_apart(share, recorded, tmp_path):
    """Also where an adapter was merged into a few layers."""
    folder, base = recorded
    found = resemblance(folder, checkpoint(changed(base, tmp_path / "other", share)))
    assert not found.is_same
    assert found.others == tuple(name for name in read_sample(folder)[1] if name.endswith("q_proj"))
    expected = f"other 4-bit weights in {len(found.others)} of {found.layers} layers by a sample, {found.others[0]} first"
    assert str(found) == expected


def test_another_recipe_is_not_the_sampled_one(recorded):
    """The sample is compared under the recorded recipe; what a merge is told otherwise does not matter."""
    folder, base = recorded
    recipe, sample = read_sample(folder)
    assert compare(sample, checkpoint(base), recipe).is_same
    assert not compare(sample, checkpoint(base), dataclasses.replace(recipe, quant_type="fp4")).is_same


def test_what_cannot_be_compared_is_left_open(recorded, adapters, tmp_path):
    folder, base = recorded
    recipe, sample = read_sample(folder)
    live(base).save_pretrained(tmp_path / "stored")
    assert compare(sample, checkpoint(tmp_path / "stored"), recipe) is None  # quantized already
    transposed = shutil.copytree(base, tmp_path / "transposed")
    config = json.loads((transposed / "config.json").read_text())
    (transposed / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    assert compare(sample, checkpoint(transposed), recipe) is None  # laid out the other way round
    assert compare({"elsewhere": "0" * 8}, checkpoint(base), recipe) is None
    bare = adapters("llama")
    assert read_sample(bare) is None and resemblance(bare, checkpoint(base)) is None


def test_layers_without_readable_codes_give_no_sample(bases):
    """As bitsandbytes leaves them on some processors after the first forward in evaluation mode."""
    layer = next(module for module in live(bases("llama")).modules() if type(module).__name__ == "Linear4bit")
    assert sample_live({"layer": layer}) is not None
    layer.weight.quant_state.packing_format_for_cpu = True
    assert sample_live({"layer": layer}) is None
    layer.weight.quant_state.packing_format_for_cpu = False
    layer.weight.device_mesh = "as FSDP 2 has them"
    assert sample_live({"layer": layer}) is None
    del layer.weight.device_mesh
    assert sample_live({"layer": layer}) is not None
    layer.weight.quant_state = None
    assert sample_live({"layer": layer}) is None
    offloaded = SimpleNamespace(weight=SimpleNamespace(device=torch.device("meta"), quant_state=SimpleNamespace()))
    assert sample_live({"layer": offloaded}) is None


@pytest.mark.parametrize(
    "value", [[], {"a": 1}, {"a": ""}, {"a": "0" * 7}, {"a": "0" * 72}, {"a": "x" * 8}, {"a": "A" * 8}, "no"]
)
def test_a_sample_that_is_none_is_refused(value, recorded):
    folder, _ = recorded
    with pytest.raises(MergeError, match="base_sample is no object of 8 to 64 hexadecimal digits a layer"):
        parse_sample(value, "here")
    path = folder / RECIPE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_sample": value}))
    with pytest.raises(MergeError, match=r"quantization_recipe\.json: base_sample is no object"):
        read_sample(folder)


@pytest.mark.parametrize("options", [(), ("--from-4bit",)])
def test_a_merge_says_that_the_base_is_another_and_nothing_of_a_mere_name(options, recorded, tmp_path):
    folder, base = recorded
    other = changed(base, tmp_path / base.name, 0.05)
    renamed = shutil.copytree(base, tmp_path / "cousin")
    stranger = shutil.copytree(other, tmp_path / "stranger")
    changed_since, another = (
        "its weights have changed since, or the training's base was a residual",
        "give the base of the training",
    )
    for source, out, said in ((other, "a", changed_since), (renamed, "b", None), (stranger, "c", another)):
        arguments = ["--base", source, "--adapter", folder, "--out", tmp_path / out, "--quiet", *options]
        done = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.stderr
        assert (f"{folder} was not trained on base {source}, which holds other 4-bit weights in" in done.stderr) == bool(said)
        assert "another name" not in done.stderr
        assert [text for text in (changed_since, another) if text in done.stderr] == ([said] if said else [])
