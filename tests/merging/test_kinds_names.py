"""Vision-language models under the names of both transformers generations, and text-only adapters on them. Oracles as in
test_kinds."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lora_merge.merging.api import MergeOptions, merge
from lora_merge.merging.errors import MergeError
from lora_merge.merging.names import NameMap, neutral
from tests.merging.kinds import Kind, answer, load, save_base, train
from tests.merging.oracle import assert_same_bits, load_folder

TEXT = Kind({"target_modules": r".*language_model.*\.(q_proj|down_proj)", "modules_to_save": ["lm_head"]})


def new_names(name: str) -> str:
    """As modules are called in transformers 5."""
    name = re.sub(r"^language_model\.lm_head", "lm_head", name)
    name = re.sub(r"^language_model\.model\.", "model.language_model.", name)
    return re.sub(r"^(vision_tower|multi_modal_projector)", r"model.\1", name)


def old_names(name: str) -> str:
    """As modules were called before 4.52, and as the hub's checkpoints still have them."""
    name = re.sub(r"^lm_head", "language_model.lm_head", name)
    name = re.sub(r"^model\.language_model\.", "language_model.model.", name)
    name = re.sub(r"^model\.(vision_tower|multi_modal_projector)\.", r"\1.", name)
    return re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)


def text_names(name: str) -> str:
    """As the text-only class calls its modules."""
    return re.sub(r"^model\.language_model\.", "model.", name)


def renamed(folder: Path, target: Path, rename: Callable[[str], str], file: str, prefix: str = "") -> Path:
    """A copy of a base or adapter with other names."""
    shutil.copytree(folder, target)
    tensors = load_file(target / file)
    save_file(
        {prefix + rename(name.removeprefix(prefix)): tensor for name, tensor in tensors.items()}, target / file, {"format": "pt"}
    )
    return target


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path, torch.Tensor]:
    """A base as transformers 5 saves it, an adapter of the language model, and the live model's answer to picture and text."""
    root = tmp_path_factory.mktemp("names")
    base = save_base(root / "base", "gemma3_vlm")
    live = train(load(base, "gemma3_vlm"), TEXT)
    live.save_pretrained(root / "adapter")
    return base, root / "adapter", answer(live, "gemma3_vlm")


@pytest.mark.parametrize("base_names", [new_names, old_names])
@pytest.mark.parametrize("adapter_names", [new_names, old_names, text_names])
def test_every_pair_of_generations(base_names, adapter_names, made, tmp_path):
    base, adapter, expected = made
    base = renamed(base, tmp_path / "base", base_names, "model.safetensors")
    adapter = renamed(adapter, tmp_path / "adapter", adapter_names, "adapter_model.safetensors", "base_model.model.")
    out = merge(base, adapter, tmp_path / "out", MergeOptions(dtype="float32")).out
    names = set(load_folder(base))
    assert set(load_folder(out)) - names == {base_names("lm_head.weight")}, "the base's names, and the head that was tied"
    assert (answer(load(out, "gemma3_vlm", None), "gemma3_vlm") - expected).abs().max() < 2e-4 * expected.abs().max()


def test_vision_tower_and_projector(tmp_path):
    """Adapters on the vision side, on a base with the old names."""
    base = save_base(tmp_path / "new", "gemma3_vlm")
    live = train(load(base, "gemma3_vlm"), Kind({"target_modules": ["q_proj", "fc1"]}, scale=0.3))
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, "gemma3_vlm")
    base = renamed(base, tmp_path / "old", old_names, "model.safetensors")
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    assert (answer(load(out, "gemma3_vlm", None), "gemma3_vlm") - expected).abs().max() < 2e-4 * expected.abs().max()


def test_full_models_adapter_on_the_text_only_checkpoint(tmp_path):
    """The reverse: names of the full class, tensors of the text-only one."""
    base = save_base(tmp_path / "base", "gemma3")
    live = train(load(base, "gemma3"), Kind({"target_modules": ["q_proj", "up_proj"]}))
    live.save_pretrained(tmp_path / "plain")
    full = lambda name: re.sub(r"^model\.", "model.language_model.", name)  # noqa: E731
    adapter = renamed(tmp_path / "plain", tmp_path / "full", full, "adapter_model.safetensors", "base_model.model.")
    one, other = merge(base, adapter, tmp_path / "a").out, merge(base, tmp_path / "plain", tmp_path / "b").out
    for name, tensor in load_folder(other).items():
        assert_same_bits(load_folder(one)[name], tensor, name)


def test_vision_adapter_on_the_text_only_checkpoint_is_refused(made, tmp_path):
    base = save_base(tmp_path / "base", "gemma3")
    live = train(load(made[0], "gemma3_vlm"), Kind({"target_modules": ["fc1", "up_proj"]}))
    live.save_pretrained(tmp_path / "adapter")
    with pytest.raises(MergeError, match=r"vision_tower.*fc1"):
        merge(base, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_base_tensors_pass_through(made, tmp_path):
    base, adapter, _ = made
    shutil.copytree(base, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    extra = {
        "mtp.layers.0.q_proj.weight": torch.randn(4, 4),
        "counter": torch.arange(5),
        "scale": torch.ones(3).to(torch.float8_e4m3fn),
    }
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    after = load_folder(merge(tmp_path / "base", adapter, tmp_path / "out").out)
    for name, tensor in extra.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_names_that_two_tensors_share_match_nothing():
    names = NameMap.of(["model.layers.0.q.weight", "language_model.model.layers.0.q.weight"])
    assert names.find("model.layers.0.q.weight") == "model.layers.0.q.weight"
    assert names.find("model.language_model.layers.0.q.weight") is None
    assert "could be" in names.nearest("model.language_model.layers.0.q.weight")
    assert neutral("model.vision_tower.encoder.x") == neutral("vision_tower.vision_model.encoder.x")
    assert neutral("model.layers.0.block_sparse_moe.gate.weight") == neutral("model.layers.0.mlp.gate.weight")


@pytest.mark.parametrize("flags", [{}, {"top": True}, {"text": True}, {"top": True, "text": True}])
def test_an_untied_text_model_says_so_itself(flags, tmp_path):
    """Oracle: the class of the text model, which vLLM's Gemma 3 asks; it ties where nothing is said."""
    base = save_base(tmp_path / "base", "gemma3_vlm")
    path = base / "config.json"
    config = json.loads(path.read_text())
    for place, part in (("top", config), ("text", config["text_config"])):
        part.pop("tie_word_embeddings", None)
        if flags.get(place):
            part["tie_word_embeddings"] = True
    path.write_text(json.dumps(config))
    train(load(base, "gemma3_vlm"), Kind({"target_modules": ["q_proj", "lm_head"]})).save_pretrained(tmp_path / "adapter")
    out = merge(base, tmp_path / "adapter", tmp_path / "out").out
    merged = transformers.AutoConfig.from_pretrained(out)
    assert merged.tie_word_embeddings is False and merged.get_text_config().tie_word_embeddings is False
