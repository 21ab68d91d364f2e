"""Broken input: exit 1, one line that names the thing, no output folder, nothing hidden left behind."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from lora_merge.merging.api import MergeOptions, merge, plan_merge
from lora_merge.merging.cli import main
from lora_merge.merging.errors import MergeError

A_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


class Case:
    """Private copies of a base and an adapter to break, and the command on them."""

    def __init__(self, root: Path, base: Path, adapter: Path) -> None:
        self.root, self.base, self.adapter, self.out = root, root / "base", root / "adapter", root / "results" / "out"
        shutil.copytree(base, self.base)
        shutil.copytree(adapter, self.adapter)
        self.out.parent.mkdir()

    def edit_adapter(self, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        file = self.adapter / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    def edit_base(self, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        file = self.base / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    def edit_json(self, file: Path, **changes: Any) -> None:
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    def edit_header(self, file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        """Rewrite a safetensors header and leave the data as it is."""
        data = file.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    def run(self, *extra: str) -> Any:
        arguments = ["--base", str(self.base), "--adapter", str(self.adapter), "--out", str(self.out), "--quiet", *extra]
        return CliRunner().invoke(main, arguments)

    def assert_refused(self, *named: str, extra: tuple[str, ...] = ()) -> None:
        result = self.run(*extra)
        assert result.exit_code == 1, result.output
        lines = [line for line in result.stderr.splitlines() if not line.startswith("warning:")]
        assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
        for text in named:
            assert text in lines[0], lines[0]
        assert not self.out.exists() and not list(self.out.parent.iterdir()), "nothing may be left behind"


@pytest.fixture
def case(tmp_path, bases, adapters) -> Case:
    return Case(tmp_path, bases("llama"), adapters("llama"))


@pytest.fixture
def sharded(tmp_path, bases, adapters) -> Case:
    return Case(tmp_path, bases("llama", True), adapters("llama"))


def test_the_case_itself_merges(case):
    assert case.run().exit_code == 0 and case.out.is_dir()


# The adapter's tensors


def test_module_that_the_base_does_not_have(case):
    def rename(tensors):
        for half in "AB":
            key = A_KEY.replace("lora_A", f"lora_{half}")
            tensors[key.replace("q_proj", "query")] = tensors.pop(key)

    case.edit_adapter(rename)
    case.assert_refused("layers.0.self_attn.query", "layers.0.self_attn.q_proj.weight")


def test_key_without_a_meaning(case):
    case.edit_adapter(lambda tensors: tensors.update({"base_model.model.model.norm.surprise": torch.ones(3)}))
    case.assert_refused("base_model.model.model.norm.surprise")


@pytest.mark.parametrize("half", ["A", "B"])
def test_missing_half(case, half):
    case.edit_adapter(lambda tensors: tensors.pop(A_KEY.replace("lora_A", f"lora_{half}")))
    case.assert_refused(f"lora_{half}", "layers.0.self_attn.q_proj")


def test_shape_of_another_base(case):
    case.edit_adapter(lambda tensors: tensors.update({A_KEY: torch.ones(4, 60)}))
    case.assert_refused("layers.0.self_attn.q_proj", "[64, 60]", "[64, 64]")


def test_rank_that_contradicts_the_configuration(case):
    case.edit_json(case.adapter / "adapter_config.json", r=8)
    case.assert_refused("rank", "4", "8")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_adapter_that_is_not_finite(case, bad):
    case.edit_adapter(lambda tensors: tensors[A_KEY].__setitem__((2, 3), bad))
    case.assert_refused(A_KEY, "[2, 3]", str(bad))


def test_adapter_of_integers(case):
    case.edit_adapter(lambda tensors: tensors.update({A_KEY: torch.ones(4, 64, dtype=torch.int8)}))
    case.assert_refused(A_KEY, "I8")


def test_adapter_without_tensors(case):
    case.edit_adapter(lambda tensors: tensors.clear())
    case.assert_refused("adapter_model.safetensors", "no tensors")


def test_update_that_overflows_the_output_type(case):
    case.edit_adapter(lambda tensors: [tensor.fill_(1e20) for tensor in tensors.values()])
    case.assert_refused("not finite", "layers.0", extra=("--dtype", "float16"))


# The adapter's configuration


def test_no_configuration(case):
    (case.adapter / "adapter_config.json").unlink()
    case.assert_refused("adapter_config.json")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", -4),
        ("r", "4"),
        ("r", 10**9),
        ("lora_alpha", None),
        ("lora_alpha", "16"),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"no_such_module": 4}),
        ("alpha_pattern", {"(": 4}),
        ("use_qalora", True),
        ("layer_replication", [[0, 2]]),
        ("init_lora_weights", "pissa_niter_4"),
        ("setting_of_the_future", True),
    ],
)
def test_configuration_that_cannot_be_followed(case, setting, value):
    case.edit_json(case.adapter / "adapter_config.json", **{setting: value})
    case.assert_refused("adapter_config.json", setting)


def test_infinite_alpha(case):
    file = case.adapter / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 6', '"lora_alpha": Infinity'))
    case.assert_refused("lora_alpha", "inf")


def test_configuration_that_is_no_json(case):
    (case.adapter / "adapter_config.json").write_text("{")
    case.assert_refused("adapter_config.json")


# Safetensors files


def test_truncated_weights(case):
    file = case.base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    case.assert_refused("model.safetensors", "truncated")


def test_truncated_adapter_header(case):
    file = case.adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    case.assert_refused("adapter_model.safetensors", "truncated")


def test_empty_file(case):
    (case.base / "model.safetensors").write_bytes(b"")
    case.assert_refused("model.safetensors", "truncated")


def test_header_that_lies_about_a_shape(case):
    case.edit_header(case.base / "model.safetensors", lambda header: header["model.norm.weight"].update(shape=[65]))
    case.assert_refused("model.norm.weight", "128 bytes", "130")


def test_header_with_overlapping_tensors(case):
    def overlap(header):
        a, b = header["model.layers.0.self_attn.k_proj.weight"], header["model.layers.0.self_attn.v_proj.weight"]
        b["data_offsets"] = a["data_offsets"]

    case.edit_header(case.base / "model.safetensors", overlap)
    case.assert_refused("overlaps")


def test_header_that_is_huge(case):
    file = case.base / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**62) + file.read_bytes()[8:])
    case.assert_refused("model.safetensors")


def test_header_with_an_unknown_type(case):
    case.edit_header(case.base / "model.safetensors", lambda header: header["model.norm.weight"].update(dtype="F4"))
    case.assert_refused("model.norm.weight", "F4")


@pytest.mark.parametrize(
    "text", [b"[]", b"{", b'{"a": 1}', b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"\xff\xfe"]
)
def test_header_that_is_no_header(case, text):
    (case.base / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    case.assert_refused("model.safetensors")


# The base


def test_pickled_adapter(case):
    weights = case.adapter / "adapter_model.safetensors"
    weights.unlink()
    (case.adapter / "adapter_model.bin").write_bytes(b"not a pickle that torch wrote")
    case.assert_refused("adapter_model.bin")


def test_pickled_base(case):
    (case.base / "model.safetensors").rename(case.base / "pytorch_model.bin")
    case.assert_refused("pytorch_model.bin", "safetensors")


def test_base_that_does_not_exist(case):
    shutil.rmtree(case.base)
    case.assert_refused(str(case.base), "no such folder")


def test_base_without_configuration(case):
    (case.base / "config.json").unlink()
    case.assert_refused("config.json")


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", 7])
def test_shard_name_that_leaves_the_folder(sharded, place):
    index = sharded.base / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.norm.weight"] = place
    index.write_text(json.dumps(value))
    sharded.assert_refused("model.norm.weight", repr(place))


def test_missing_shard(sharded):
    missing = sorted(sharded.base.glob("*.safetensors"))[1]
    missing.unlink()
    sharded.assert_refused(missing.name)


def test_index_that_contradicts_its_shards(sharded):
    index = sharded.base / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    del value["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(value))
    sharded.assert_refused("model.norm.weight", "not listed")


def test_base_with_nan_on_the_way_through_four_bits(case):
    name = "model.layers.1.mlp.up_proj.weight"
    case.edit_base(lambda tensors: tensors[name].__setitem__((0, 0), float("nan")))
    case.assert_refused(name, "NaN", extra=("--from-4bit",))


def test_base_with_nan_under_an_update(case):
    name = "model.layers.1.mlp.up_proj.weight"
    case.edit_base(lambda tensors: tensors[name].__setitem__((5, 7), float("nan")))
    case.assert_refused(name, "[5, 7]", "not finite")


def test_quantized_base_of_another_library(case):
    case.edit_json(case.base / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    case.assert_refused("gptq", "16-bit")


def test_remote_code_is_not_run(case):
    (case.base / "modeling_evil.py").write_text("raise SystemExit('was run')")
    case.edit_json(case.base / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    case.assert_refused("--trust-remote-code", extra=("--from-4bit",))


def test_architecture_that_transformers_does_not_know(case):
    case.edit_json(case.base / "config.json", model_type="unheard_of", architectures=["UnheardOf"])
    case.assert_refused("UnheardOf", extra=("--from-4bit",))


# Recipe, output and command line


def test_recipe_record_of_another_version(case):
    (case.adapter / "quantization_recipe.json").write_text(
        json.dumps({"format": "lora-merge/quantization-recipe", "version": 99})
    )
    case.assert_refused("quantization_recipe.json", "99", extra=("--from-4bit",))


def test_recipe_record_with_an_impossible_value(case):
    record = {"format": "lora-merge/quantization-recipe", "version": 1, "recipe": {"block_size": 63}}
    (case.adapter / "quantization_recipe.json").write_text(json.dumps(record))
    case.assert_refused("block_size", "63", extra=("--from-4bit",))


def test_recipe_of_modules_that_the_base_does_not_have(case):
    record = {
        "format": "lora-merge/quantization-recipe",
        "version": 1,
        "recipe": {"quantized_modules": ["model.layers.9.mlp.up_proj"]},
    }
    (case.adapter / "quantization_recipe.json").write_text(json.dumps(record))
    case.assert_refused("model.layers.9.mlp.up_proj", extra=("--from-4bit",))


def test_recipe_flags_without_from_4bit(case):
    with pytest.raises(MergeError, match=r"quant_type was given, .* from_4bit=True"):
        plan_merge(case.base, case.adapter, MergeOptions(recipe={"quant_type": "nf4"}))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--quant-type", "nf4"), "--quant-type was given, .* add --from-4bit"),
        (("--no-double-quant",), "--double-quant was given, .* add --from-4bit"),
        (("--blocksize", "128"), "--blocksize was given, .* add --from-4bit"),
        (("--quant-config", "x.json"), "--quant-config was given, .* add --from-4bit"),
        (("--weights", "0.7,0.3"), "--weights: 0.7,0.3: expected one finite number"),
        (("--weights", "nan"), "--weights: nan: expected one finite number"),
    ],
)
def test_misused_flags_are_named_as_they_were_typed(case, flags, message):
    result = case.run(*flags)
    assert result.exit_code == 2 and re.search(message, result.stderr.splitlines()[-1]), result.stderr
    assert not case.out.exists()


def test_output_that_exists(case):
    case.out.mkdir()
    (case.out / "precious").write_text("data")
    result = case.run()
    assert result.exit_code == 1 and "--overwrite" in result.stderr
    result = case.run("--overwrite")
    assert result.exit_code == 1 and "merge_manifest.json" in result.stderr, "only a merge of ours may be replaced"
    assert (case.out / "precious").read_text() == "data" and len(list(case.out.parent.iterdir())) == 1


def test_output_inside_the_base(case):
    case.out = case.base / "merged"
    result = case.run()
    assert result.exit_code == 1 and "base" in result.stderr and not case.out.exists()


def test_revision_of_a_folder(case):
    case.assert_refused("--revision", extra=("--revision", "main"))


@pytest.mark.parametrize(
    "arguments", [[], ["--base", "x"], ["--from-5bit"], ["--base", "x", "--adapter", "y", "--out", "z", "--jobs", "0"]]
)
def test_usage_errors_exit_with_2(arguments):
    assert CliRunner().invoke(main, arguments).exit_code == 2


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_every_pattern_of_nan_is_noticed(tmp_path, bases, adapters, pattern):
    """Adding half a unit to the largest NaN patterns overflows into the sign: the result would be a harmless-looking -0.0."""
    case = Case(tmp_path, bases("llama", dtype=torch.float32), adapters("llama"))
    name = "model.layers.1.mlp.up_proj.weight"
    case.edit_base(lambda tensors: tensors[name].view(torch.int32).__setitem__((5, 7), pattern - 2**32 * (pattern >= 2**31)))
    case.assert_refused(name, "[5, 7]", "not finite", extra=("--dtype", "bfloat16"))


def test_a_name_that_no_disk_takes_is_one_line(bases, adapters, tmp_path):
    with pytest.raises(MergeError, match=r"^/.{99}\.\.\.a{50}: cannot be created: File name too long$"):
        merge(bases("llama"), adapters("llama"), tmp_path / ("a" * 300))
