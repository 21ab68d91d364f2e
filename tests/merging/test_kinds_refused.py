"""Every kind of adapter broken in every way: exit 1, one line that names the thing, no output folder."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from lora_merge.merging.cli import main
from lora_merge.merging.errors import MergeError
from lora_merge.merging.manifest import read_manifest
from lora_merge.merging.pickle_reader import read_pickled_tensors
from lora_merge.merging.recipes import record_recipe
from tests.merging.kinds import Kind, load, save_base, train

Tensors = dict[str, torch.Tensor]

KINDS = {
    "lora": ("llama", Kind({"target_modules": ["q_proj", "up_proj"]}), "layers.1.mlp.up_proj.lora_A.weight"),
    "dora": ("llama", Kind({"target_modules": ["q_proj"], "use_dora": True}), "layers.1.self_attn.q_proj.lora_magnitude_vector"),
    "lora-bias": ("qwen2", Kind({"target_modules": ["q_proj"], "lora_bias": True}), "layers.1.self_attn.q_proj.lora_B.bias"),
    "bias-all": ("qwen2", Kind({"target_modules": ["q_proj"], "bias": "all"}), "layers.1.self_attn.v_proj.bias"),
    "embedding": ("gemma3", Kind({"target_modules": ["embed_tokens"]}), "embed_tokens.lora_embedding_A"),
    "saved": ("llama", Kind({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}), "lm_head.weight"),
    "tokens": (
        "gemma3",
        Kind({"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
        "embed_tokens.token_adapter.trainable_tokens_delta",
    ),
    "experts": (
        "qwen3_moe",
        Kind({"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
        "layers.1.mlp.experts.base_layer.lora_B.weight",
    ),
    "router": (
        "qwen3_moe",
        Kind({"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
        "layers.1.mlp.gate.lora_A.weight",
    ),
    "convolution": ("resnet", Kind({"target_modules": ["convolution"]}), "stages.1.layers.0.layer.1.convolution.lora_B.weight"),
    "gpt2": ("gpt2", Kind({"target_modules": ["c_attn"]}), "h.1.attn.c_attn.lora_B.weight"),
    "vision": ("gemma3_vlm", Kind({"target_modules": ["fc1"]}), "vision_tower.encoder.layers.1.mlp.fc1.lora_A.weight"),
}


def renamed(tensors: Tensors, key: str) -> None:
    tensors[
        key.replace("layers.1", "layers.9")
        .replace("h.1.", "h.9.")
        .replace("stages.1", "stages.9")
        .replace("embed", "embark")
        .replace("lm_head", "my_head")
    ] = tensors.pop(key)


def cut(tensors: Tensors, key: str) -> None:
    tensors[key] = tensors[key][..., :-1, :].contiguous() if tensors[key].ndim == 2 else tensors[key][:-1].contiguous()


def dropped(tensors: Tensors, key: str) -> None:
    del tensors[key]


def not_a_number(tensors: Tensors, key: str) -> None:
    tensors[key].view(-1)[-1] = float("nan")


BREAKAGES: dict[str, Callable[[Tensors, str], None]] = {
    "renamed": renamed,
    "cut": cut,
    "dropped": dropped,
    "not-a-number": not_a_number,
}
# A bias that was not trained is not missed by PEFT either: nothing tells which modules have one.
POSSIBLE = [(kind, how) for kind in KINDS for how in BREAKAGES if (kind, how) not in {("bias-all", "dropped")}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("refused")

    def make(kind: str) -> tuple[Path, Path, str]:
        architecture, settings, ending = KINDS[kind]
        base, adapter = root / architecture, root / f"adapter-{kind}"
        if not base.exists():
            save_base(base, architecture)
        if not adapter.exists():
            train(load(base, architecture), settings).save_pretrained(adapter)
        (key,) = [name for name in load_file(adapter / "adapter_model.safetensors") if name.endswith(ending)]
        return base, adapter, key

    return make


def run(base: Path, adapter: Path, out: Path, *extra: str) -> Any:
    return CliRunner().invoke(main, ["--base", str(base), "--adapter", str(adapter), "--out", str(out), "--quiet", *extra])


def assert_refused(result: Any, out: Path, *named: str) -> None:
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("warning:")]
    assert line.startswith("error: ")
    for text in named:
        assert text in line, line
    assert not out.exists() and not [path for path in out.parent.iterdir() if path.name.startswith(".")]


def broken_copy(adapter: Path, target: Path, change: Callable[[Tensors], Any]) -> Path:
    shutil.copytree(adapter, target)
    tensors = load_file(target / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, target / "adapter_model.safetensors")
    return target


def reconfigured(adapter: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(adapter, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_adapter_merges(kind, made, tmp_path):
    base, adapter, _ = made(kind)
    assert run(base, adapter, tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(("kind", "how"), POSSIBLE)
def test_broken_tensors(kind, how, made, tmp_path):
    base, adapter, key = made(kind)
    adapter = broken_copy(adapter, tmp_path / "adapter", lambda tensors: BREAKAGES[how](tensors, key))
    # The module is named: by the key, or by what is left of it.
    module = key.removeprefix("base_model.model.").partition(".lora_")[0].partition(".token_adapter")[0].removesuffix(".weight")
    named = {"renamed": module.rpartition(".")[2].replace("embed", "embark")}.get(how, module.rpartition(".")[2])
    assert_refused(run(base, adapter, tmp_path / "out"), tmp_path / "out", named if kind != "experts" else "experts")


@pytest.mark.parametrize("kind", ["lora", "dora", "embedding", "experts", "gpt2", "convolution", "vision"])
@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_match_nothing(kind, pattern, made, tmp_path):
    base, adapter, _ = made(kind)
    adapter = reconfigured(adapter, tmp_path / "adapter", **{pattern: {"nowhere_proj": 4}})
    assert_refused(run(base, adapter, tmp_path / "out"), tmp_path / "out", pattern, "nowhere_proj")


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("saved", {"modules_to_save": ["lm_head", "model.norm"]}, "model.norm"),
        ("saved", {"modules_to_save": ["score"]}, "score"),
        ("tokens", {"trainable_token_indices": [1]}, "trainable_tokens_delta"),
        ("tokens", {"trainable_token_indices": [1, 1]}, "trainable_token_indices"),
        ("tokens", {"trainable_token_indices": [1, 5000]}, "5000"),
        ("tokens", {"trainable_token_indices": {"elsewhere": [1, 5]}}, "trainable_token_indices"),
        ("tokens", {"trainable_token_indices": None}, "trainable_token"),
        ("experts", {"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ("experts", {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]}, "gate.weight"),
        ("dora", {"use_dora": False}, "lora_magnitude_vector"),
        ("lora", {"use_dora": True}, "lora_magnitude_vector"),
        ("lora-bias", {"lora_bias": False}, "lora_bias"),
        ("lora", {"lora_bias": True}, "lora_bias"),
        ("bias-all", {"bias": "none"}, "bias"),
        ("lora", {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["nothing"], "r": 8}, "rank"),
        ("experts", {"r": 3}, "rank"),
        ("experts", {"r": 2, "rank_pattern": {"q_proj": 4}}, "rank"),
        ("experts", {"r": 8, "rank_pattern": {"q_proj": 4}}, "rank"),
        ("router", {"r": 2, "rank_pattern": {"q_proj": 4}}, "rank"),
    ],
)
def test_configurations_that_contradict_the_tensors(kind, changes, named, made, tmp_path):
    base, adapter, _ = made(kind)
    adapter = reconfigured(adapter, tmp_path / "adapter", **changes)
    assert_refused(run(base, adapter, tmp_path / "out"), tmp_path / "out", named)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], r".*\.(q_proj|up_proj)"])
def test_a_layer_that_is_missing_altogether(targets, made, tmp_path):
    """Both halves gone: nothing in the file tells, only the configuration and the same module in the other layer."""
    base, adapter, _ = made("lora")
    lost = "layers.1.mlp.up_proj"
    whole = reconfigured(adapter, tmp_path / "whole", target_modules=targets)
    assert run(base, whole, tmp_path / "fine").exit_code == 0
    adapter = broken_copy(whole, tmp_path / "adapter", lambda tensors: [tensors.pop(key) for key in list(tensors) if lost in key])
    assert_refused(run(base, adapter, tmp_path / "out"), tmp_path / "out", lost, "incomplete")
    chosen = reconfigured(adapter, tmp_path / "chosen", target_modules=["q_proj", "model.layers.0.mlp.up_proj"])
    assert run(base, chosen, tmp_path / "chosen-out").exit_code == 0


def test_lora_bias_where_the_base_has_none(made, tmp_path):
    base, _, _ = made("lora")
    train(load(base, "llama"), Kind({"target_modules": ["q_proj"], "lora_bias": True})).save_pretrained(tmp_path / "adapter")
    assert_refused(run(base, tmp_path / "adapter", tmp_path / "out"), tmp_path / "out", "lora_B.bias", "has none")


def test_a_head_that_the_base_does_not_have(made, tmp_path):
    base, adapter, _ = made("lora")
    adapter = broken_copy(
        adapter, tmp_path / "plain", lambda tensors: tensors.update({"base_model.model.score.weight": torch.ones(2, 64)})
    )
    adapter = reconfigured(adapter, tmp_path / "adapter", modules_to_save=["score"])
    assert_refused(run(base, adapter, tmp_path / "out"), tmp_path / "out", "score")


def test_vocabulary_resized_on_one_side_only(made, tmp_path):
    base, _, _ = made("lora")
    kind = Kind({"target_modules": ["embed_tokens"]}, before=lambda model: model.resize_token_embeddings(170))
    train(load(base, "llama"), kind).save_pretrained(tmp_path / "adapter")
    assert_refused(
        run(base, tmp_path / "adapter", tmp_path / "out"), tmp_path / "out", "lm_head.weight 160", "embed_tokens.weight 170"
    )


# Methods and settings that have no merged weights


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": "LOHA"}, "LoHa"),
        ({"peft_type": "LOKR"}, "LoKr"),
        ({"peft_type": "XLORA"}, "X-LoRA"),
        ({"peft_type": "PROMPT_TUNING"}, "virtual tokens"),
        ({"peft_type": "PREFIX_TUNING"}, "prefix"),
        ({"peft_type": "SOMETHING"}, "SOMETHING"),
        ({"alora_invocation_tokens": [5]}, "aLoRA"),
        ({"arrow_config": {"top_k": 2}}, "Arrow"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"kasa_config": {"beta": 1}}, "KaSA"),
        ({"monteclora_config": {"num_samples": 2}}, "MonteCLoRA"),
        ({"velora_config": {"x": 2}}, "VeLoRA"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"from_the_future": 1}, "from_the_future"),
        ({"bias": "some"}, "bias"),
        ({"use_dora": True, "lora_bias": True}, "lora_bias"),
    ],
)
def test_refused_by_name(changes, named, made, tmp_path):
    base, adapter, _ = made("lora")
    adapter = reconfigured(adapter, tmp_path / "adapter", **changes)
    assert_refused(run(base, adapter, tmp_path / "out"), tmp_path / "out", named)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq"])
def test_residual_initializations(init, made, tmp_path):
    base, adapter, _ = made("lora")
    adapter = reconfigured(adapter, tmp_path / "adapter", init_lora_weights=init)
    assert_refused(run(base, adapter, tmp_path / "out"), tmp_path / "out", init, "--base-is-residual")
    assert run(base, adapter, tmp_path / "out", "--base-is-residual").exit_code == 0
    assert read_manifest(tmp_path / "out").base_is_residual


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "mica", "orthogonal"])
def test_other_initializations(init, made, tmp_path):
    base, adapter, _ = made("lora")
    adapter = reconfigured(adapter, tmp_path / "adapter", init_lora_weights=init)
    assert run(base, adapter, tmp_path / "out").exit_code == 0
    assert_refused(run(base, adapter, tmp_path / "two", "--base-is-residual"), tmp_path / "two", "--base-is-residual")


@pytest.mark.parametrize("kept", [True, False])
def test_a_setting_of_the_first_versions_of_peft(kept, made, tmp_path):
    """Their way to evaluate, not their numbers. Their fused layers (``enable_lora``) have another layout and are refused."""
    base, adapter, _ = made("lora")
    old = reconfigured(adapter, tmp_path / "adapter", merge_weights=kept, enable_lora=None)
    assert run(base, old, tmp_path / "out").exit_code == run(base, adapter, tmp_path / "plain").exit_code == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(tmp_path / "plain" / "model.safetensors").keys()
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], tensor)
    fused = reconfigured(adapter, tmp_path / "fused", enable_lora=[True, False, True])
    assert_refused(run(base, fused, tmp_path / "none"), tmp_path / "none", "enable_lora")


# Pickles


class _Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (f"open({str(self.path)!r}, 'w').close()",))


def repacked(file: Path, description: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Replace ``data.pkl`` of a torch.save file."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, description if name.endswith("data.pkl") and description else data)


def test_nothing_in_a_pickle_is_executed(made, tmp_path):
    base, adapter, _ = made("lora")
    pickled = reconfigured(adapter, tmp_path / "adapter")
    (pickled / "adapter_model.safetensors").unlink()
    trap = tmp_path / "sprung"
    torch.save({"x": _Trap(trap)}, pickled / "adapter_model.bin")
    assert_refused(run(base, pickled, tmp_path / "out"), tmp_path / "out", "adapter_model.bin", "exec")
    torch.save({"x": torch.ones(2)}, pickled / "adapter_model.bin")
    repacked(pickled / "adapter_model.bin", pickle.dumps({"x": _Trap(trap)}))
    assert_refused(run(base, pickled, tmp_path / "out"), tmp_path / "out", "adapter_model.bin", "exec")
    assert not trap.exists()


@pytest.mark.parametrize("broken", ["old format", "text", "no dictionary", "no tensor", "transposed", "compressed", "truncated"])
def test_pickles_that_are_no_table_of_tensors(broken, tmp_path):
    file = tmp_path / "adapter_model.bin"
    matrix = torch.arange(6.0).reshape(2, 3)
    if broken == "old format":
        torch.save({"x": matrix}, file, _use_new_zipfile_serialization=False)
    elif broken == "text":
        file.write_text("not a zip")
    else:
        content: Any = {"no dictionary": [matrix], "no tensor": {"x": "text"}, "transposed": {"x": matrix.T}}.get(
            broken, {"x": matrix}
        )
        torch.save(content, file)
    if broken == "compressed":
        repacked(file, b"", zipfile.ZIP_DEFLATED)
    if broken == "truncated":
        file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(MergeError, match=r"adapter_model\.bin"):
        read_pickled_tensors(file)


def test_pickled_tensors_against_torch(tmp_path):
    """Views into one storage, scalars, every type. Oracle: torch.load."""
    from lora_merge.merging.safetensors_file import read_tensor

    whole = torch.randn(10, 4)
    content = {
        "view": whole[3:5],
        "whole": whole,
        "half": torch.randn(3).half(),
        "bfloat16": torch.randn(3, 2).bfloat16(),
        "scalar": torch.tensor(2.5),
        "integers": torch.arange(4),
        "empty": torch.empty(0, 3),
    }
    file = tmp_path / "adapter_model.bin"
    torch.save(content, file)
    found = {tensor.name: tensor for tensor in read_pickled_tensors(file)}
    for name, expected in torch.load(file, weights_only=True).items():
        values = read_tensor(found[name])
        assert found[name].dtype.torch_name == str(expected.dtype).removeprefix("torch.")
        assert values.tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes() if expected.ndim else values == 2.5
    buffer = io.BytesIO()
    torch.save(content, buffer)
    assert found["view"].start == found["whole"].start + 3 * 4 * 4


@pytest.mark.parametrize(("names", "said"), [(("sql",), "there is one in {}/sql"), (("a", "b"), "there are some in {}: a, b")])
def test_a_folder_of_named_adapters_says_where_they_are(names, said, made, tmp_path):
    base, adapter, _ = made("lora")
    for name in names:
        shutil.copytree(adapter, tmp_path / "adapters" / name)
    expected = f"{tmp_path / 'adapters' / 'adapter_config.json'}: no such file; {said.format(tmp_path / 'adapters')}"
    assert_refused(run(base, tmp_path / "adapters", tmp_path / "out"), tmp_path / "out", expected)
    with pytest.raises(MergeError, match=r"no adapter_config\.json; there "):
        record_recipe(torch.nn.Linear(2, 2), tmp_path / "adapters")


def test_an_adapter_in_the_place_of_the_base_is_told(made, tmp_path):
    base, adapter, _ = made("lora")
    assert_refused(
        run(adapter, base, tmp_path / "out"), tmp_path / "out", f"{adapter}: is an adapter; expected a base checkpoint"
    )
