"""Recording the QLoRA reference from a live model, and reading it strictly.

Oracle of the numbers: a plain forward of one prompt at a time, log-softmax in float64.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer

from lora_merge.engines.errors import EngineError, NonFiniteScore
from lora_merge.engines.live_model import LiveModel
from lora_merge.engines.prompts import rows_from_mappings, token_ids_sha256, tokenize
from tests.engines.builders import make_model, make_rows, make_tokenizer
from verification.errors import VerificationError
from verification.live_adapter import check_live_adapter
from verification.reference import read_reference, record_reference

ROWS = make_rows(20)
FLOOR = {"source": "x", "prompts": 100, "mean_abs_delta": 0.0, "max_abs_delta": 0.0, "flips": 0}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make_live(kind: str = "llama") -> PeftModel:
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"], lora_dropout=0.3, init_lora_weights=False)
    return get_peft_model(make_model(kind), config).train()


@pytest.fixture
def live() -> PeftModel:
    return make_live()


@pytest.fixture
def adapter(live, tmp_path) -> Path:
    live.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def recorded(live, tokenizer, adapter, tmp_path) -> Path:
    record_reference(live, tokenizer, ROWS, tmp_path / "reference.jsonl", adapter_dir=adapter)
    return tmp_path / "reference.jsonl"


def test_the_file_says_what_a_plain_forward_says(live, tokenizer, recorded):
    reference = read_reference(recorded)
    prompts = tokenize(rows_from_mappings(ROWS), tokenizer)
    live.eval()
    for prompt, score in zip(prompts, reference.scores, strict=True):
        with torch.no_grad():
            logits = live(input_ids=torch.tensor([prompt.token_ids])).logits[0, -1].double()
        log_p = torch.log_softmax(logits, dim=-1)
        assert score.id == prompt.id
        assert score.log_p_skip == pytest.approx(log_p[reference.labels.skip.token_id].item(), abs=1e-4)
        assert score.log_p_write == pytest.approx(log_p[reference.labels.write.token_id].item(), abs=1e-4)
        assert score.argmax == int(logits.argmax())
        assert reference.token_ids_sha256[prompt.id] == token_ids_sha256(prompt)


def test_the_header_says_what_was_recorded(recorded, adapter):
    header = json.loads(recorded.read_text().splitlines()[0])
    assert (header["format"], header["version"]) == ("lora-merge/reference", 3)
    names = ("adapter_config.json", "adapter_model.safetensors")
    digests = {name: hashlib.sha256((adapter / name).read_bytes()).hexdigest() for name in names}
    assert header["adapter"]["files"] == digests
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[name]) for name in names)).hexdigest()
    assert header["adapter"]["root"] == root
    assert header["recipe"] is None  # no 4-bit layers in this model
    assert header["recipe_origin"] == "reference"
    assert header["dtypes"] == {"embedding": "float32", "adapter": "float32", "compute": None}
    assert header["prompts"]["count"] == len(ROWS)
    assert {"torch", "transformers", "peft"} <= set(header["environment"]["versions"])
    assert set(header["noise_floors"]) == {"batch_shape", "dequantized"}
    assert header["noise_floors"]["batch_shape"] is None or header["noise_floors"]["batch_shape"]["mean_abs_delta"] < 1e-5
    assert header["noise_floors"]["dequantized"] is None  # no 4-bit layers in this model


def test_what_recording_returns_is_one_line_in_a_notebook(live, tokenizer, adapter, tmp_path):
    reference = record_reference(live, tokenizer, ROWS, tmp_path / "reference.jsonl", adapter_dir=adapter)
    root = reference.adapter["root"][:12]
    assert repr(reference) == f"Reference(20 prompts; base without a name, no 4-bit layers; adapter {root}; recorded on cpu)"


def test_recording_leaves_the_model_in_training(live, tokenizer, recorded):
    assert live.training and all(module.training for module in live.modules())
    live(input_ids=torch.tensor([[2, 5, 6]]), labels=torch.tensor([[2, 5, 6]])).loss.backward()


def test_recording_twice_gives_the_same_bytes(live, tokenizer, adapter, recorded, tmp_path):
    record_reference(live, tokenizer, ROWS, tmp_path / "again.jsonl", adapter_dir=adapter)
    assert (tmp_path / "again.jsonl").read_bytes() == recorded.read_bytes()


def test_every_way_of_giving_prompts_records_the_same(live, tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made = tokenize(rows_from_mappings(ROWS), tokenizer)
    files = []
    for index, prompts in enumerate((path, str(path), ROWS, iter(ROWS), made)):
        files.append(tmp_path / f"{index}.jsonl")
        record_reference(live, tokenizer, prompts, files[-1], second_batch_size=None)
    assert len({file.read_bytes() for file in files}) == 1
    with pytest.raises(VerificationError, match="dict, int"):
        record_reference(live, tokenizer, [ROWS[0], 5], tmp_path / "x.jsonl")
    with pytest.raises(VerificationError, match="no prompts"):
        record_reference(live, tokenizer, [], tmp_path / "x.jsonl")
    with pytest.raises(VerificationError, match="occur twice"):
        record_reference(live, tokenizer, made + made, tmp_path / "x.jsonl")


@pytest.mark.parametrize("content", ["", "{}\n", '{"format": "other"}\n', "no JSON", '["lora-merge/reference"]\n'])
def test_only_a_reference_is_recorded_again(content, live, tokenizer, tmp_path, monkeypatch):
    """Said before anything is scored: what else lies at the name is somebody's."""
    monkeypatch.setattr(LiveModel, "last_logits", lambda *_, **__: pytest.fail("scored"))
    out = tmp_path / "there.jsonl"
    out.write_text(content)
    with pytest.raises(VerificationError, match=r"there\.jsonl: exists and is no reference to record again; choose another"):
        record_reference(live, tokenizer, ROWS, out)
    assert out.read_text() == content
    with pytest.raises(VerificationError, match="there is no folder"):
        record_reference(live, tokenizer, ROWS, tmp_path / "none" / "reference.jsonl")


def test_the_name_of_a_model_or_a_tokenizer_is_neither(live, tokenizer, tmp_path):
    out = tmp_path / "reference.jsonl"
    with pytest.raises(VerificationError, match="tokenizer is a str; expected the one of the training run"):
        record_reference(live, "google/gemma-3-270m", ROWS, out)
    with pytest.raises(VerificationError, match="model is a PosixPath; expected the trained model itself"):
        record_reference(tmp_path, tokenizer, ROWS, out)


def test_the_prompts_are_never_replaced(live, tokenizer, recorded, tmp_path):
    """By no name of theirs, and not by a name that a reference has: a file of references is no file of prompts."""
    path, link = tmp_path / "prompts.jsonl", tmp_path / "link.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    link.symlink_to(path)
    before = path.read_bytes()
    for prompts, out in ((path, path), (str(path), link), (link, path), (recorded, recorded)):
        with pytest.raises(VerificationError, match="is the prompt file, which the reference would replace"):
            record_reference(live, tokenizer, prompts, out)
    assert path.read_bytes() == before
    record_reference(live, tokenizer, path, recorded)  # a reference may be recorded again


def test_a_prompt_past_the_model_positions_is_refused(live, tokenizer, tmp_path):
    rows = [*ROWS, {"id": "long", "prompt": "soup " * 300}]
    with pytest.raises(VerificationError, match=r"prompt 'long' has .* positions for 256"):
        record_reference(live, tokenizer, rows, tmp_path / "x.jsonl")


def test_the_noise_floor_is_measured_between_two_shapes_or_not_claimed(live, tokenizer, tmp_path):
    many = [{"id": str(index), "prompt": "soup"} for index in range(12)]
    reference = record_reference(live, tokenizer, many, tmp_path / "a.jsonl", batch_size=12, second_batch_size=5)
    floor = reference.noise_floors["batch_shape"]
    assert floor is not None
    assert floor.prompts == 12 and "of 12 and of 5" in floor.source
    for index, second in enumerate((16, None)):
        without = record_reference(live, tokenizer, many, tmp_path / f"{index}.jsonl", second_batch_size=second)
        assert without.noise_floors["batch_shape"] is None
        assert without.measured_floors == ()


def test_batches_that_had_to_be_halved_are_recorded_as_they_were(live, tokenizer, tmp_path, monkeypatch):
    """Training has left little memory: at 12 halved to 3 a second size of 3 would be the same shapes, a floor of nothing."""
    many = [{**row, "id": f"{row['id']}-{copy}"} for row in ROWS[:4] for copy in range(12)]
    through = LiveModel.last_logits

    def small(self, ids, **settings):
        if len(ids) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        return through(self, ids, **settings)

    monkeypatch.setattr(LiveModel, "last_logits", small)
    reference = record_reference(live, tokenizer, many, tmp_path / "a.jsonl", batch_size=12, second_batch_size=3)
    assert reference.environment["batch_size"] == 3
    assert reference.noise_floors["batch_shape"] is None
    other = record_reference(live, tokenizer, many, tmp_path / "b.jsonl", batch_size=12, second_batch_size=2)
    assert other.noise_floors["batch_shape"].source == "the reference in batches of 3 and of 2"


def test_a_four_bit_model_records_its_recipe(tokenizer, tmp_path):
    """Oracle: the BitsAndBytesConfig that the model was loaded with."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make_model("llama").save_pretrained(tmp_path / "base")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    record_reference(model, tokenizer, ROWS[:4], tmp_path / "reference.jsonl", batch_size=2, second_batch_size=None)
    reference = read_reference(tmp_path / "reference.jsonl")
    assert reference.recipe is not None
    assert (reference.recipe.quant_type, reference.recipe.double_quant, reference.recipe.block_size) == ("fp4", True, 64)
    assert not reference.recipe.assumed
    assert reference.dtypes == {"embedding": "bfloat16", "adapter": "float32", "compute": "bfloat16"}


def test_a_file_of_version_2_is_read_on(recorded):
    """It was taken for recorded at training."""
    lines = recorded.read_text().splitlines()
    header = json.loads(lines[0])
    del header["recipe_origin"]
    recorded.write_text("\n".join([json.dumps({**header, "version": 2}), *lines[1:]]) + "\n")
    assert read_reference(recorded).recipe_origin == "reference"


def test_a_file_of_version_1_is_read_on(recorded):
    """It knew one noise floor, between two batch shapes."""
    lines = recorded.read_text().splitlines()
    header = json.loads(lines[0])
    del header["noise_floors"], header["recipe_origin"]
    floor = {"source": "x", "prompts": 20, "mean_abs_delta": 0.005, "max_abs_delta": 0.1, "flips": 2}
    recorded.write_text("\n".join([json.dumps({**header, "version": 1, "noise_floor": floor}), *lines[1:]]) + "\n")
    reference = read_reference(recorded)
    assert [known.to_json() for known in reference.measured_floors] == [floor]
    assert reference.noise_floors["dequantized"] is None


def test_an_adapter_that_is_not_the_live_one_is_refused(live, tokenizer, adapter, tmp_path):
    out = tmp_path / "reference.jsonl"
    with torch.no_grad():
        parameter = next(parameter for name, parameter in live.named_parameters() if "lora_B" in name)
        parameter[0, 0] += 1e-3
    with pytest.raises(VerificationError, match=r"lora_B\.weight differs from the live adapter by up to 0\.001"):
        record_reference(live, tokenizer, ROWS, out, adapter_dir=adapter)
    with pytest.raises(VerificationError, match="carries no PEFT adapter"):
        record_reference(make_model("llama"), tokenizer, ROWS, out, adapter_dir=adapter)
    with pytest.raises(VerificationError, match="no such file"):
        record_reference(live, tokenizer, ROWS, out, adapter_dir=tmp_path / "absent")
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lora_alpha": 5}, r"model\.layers\.0\.self_attn\.q_proj scaling 1\.25, in the live model it is 8\.0; save the adapter"),
        ({"use_rslora": True}, "q_proj scaling 16.0, in the live model it is 8.0"),
        ({"alpha_pattern": {"down_proj": 4}}, "down_proj scaling 1.0, in the live model it is 8.0"),
        ({"r": 8, "lora_alpha": 64}, "q_proj rank 8, in the live model it is 4"),
        ({"rank_pattern": {"layers.1.mlp.down_proj": 2}}, r"layers\.1\.mlp\.down_proj rank 2, in the live model it is 4"),
        ({"use_dora": True}, "q_proj use_dora True, in the live model it is False"),
        ({"lora_bias": True}, "q_proj lora_bias True, in the live model it is False"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', the live adapter is of type LORA"),
    ],
)
def test_a_configuration_that_makes_something_else_of_the_same_tensors_is_refused(
    changes, problem, live, tokenizer, adapter, tmp_path
):
    """Oracle of the scalings: LoRA's alpha / rank and rsLoRA's alpha / sqrt(rank), by hand."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(VerificationError, match=problem):
        record_reference(live, tokenizer, ROWS, tmp_path / "reference.jsonl", adapter_dir=adapter)


def test_a_live_layer_that_was_scaled_is_refused(live, tokenizer, adapter, tmp_path):
    live.get_base_model().model.layers[1].mlp.down_proj.scale_layer(0.5)
    with pytest.raises(VerificationError, match=r"layers\.1\.mlp\.down_proj scaling 8\.0, in the live model it is 4\.0"):
        record_reference(live, tokenizer, ROWS, tmp_path / "reference.jsonl", adapter_dir=adapter)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.mlp.down_proj": 3}},
        {"use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
)
def test_what_peft_saved_is_what_is_live(settings, tokenizer, tmp_path):
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **settings})
    model = get_peft_model(make_model("llama"), config)
    model.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "reference.jsonl"
    assert record_reference(model, tokenizer, ROWS[:2], out, adapter_dir=tmp_path / "adapter").adapter is not None


def test_layers_around_parameters_are_compared_by_the_names_that_patterns_have(tmp_path):
    """PEFT wraps two parameters of one module one around the other; oracle: the scalings it made of these patterns."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16, "vocab_size": 64}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4}
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"experts.gate_up_proj": 2},
        alpha_pattern={"experts.down_proj": 20},
        init_lora_weights=False,
    )
    model = get_peft_model(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **counts)), config)
    outer = model.get_base_model().model.layers[0].mlp.experts
    assert {layer.parameter_name: layer.scaling["default"] for layer in (outer, outer.base_layer)} == {
        "gate_up_proj": 8 / 2,
        "down_proj": 20 / 4,
    }
    model.save_pretrained(tmp_path)
    check_live_adapter(model, tmp_path)
    outer.base_layer.scale_layer(2)
    with pytest.raises(VerificationError, match=r"mlp\.experts\.gate_up_proj scaling 4\.0, in the live model it is 8\.0"):
        check_live_adapter(model, tmp_path)


@pytest.mark.parametrize("named", [True, False])
def test_a_merged_adapter_is_refused(named, live, tokenizer, adapter, tmp_path):
    live.merge_adapter()
    with pytest.raises(VerificationError, match=r"is merged into the live model \(.*q_proj\).*; load base and adapter"):
        record_reference(live, tokenizer, ROWS, tmp_path / "a.jsonl", adapter_dir=adapter if named else None)


def test_an_adapter_with_other_tensors_is_refused(live, tokenizer, tmp_path):
    for targets, problem in ((["q_proj"], "lacks"), (["q_proj", "down_proj", "up_proj"], "the live model has no tensor")):
        other = get_peft_model(make_model("llama"), LoraConfig(r=4, target_modules=targets))
        other.load_state_dict(live.state_dict(), strict=False)
        other.save_pretrained(tmp_path / "other")
        with pytest.raises(VerificationError, match=problem):
            record_reference(live, tokenizer, ROWS, tmp_path / "reference.jsonl", adapter_dir=tmp_path / "other")


def test_an_adapter_shipped_in_bfloat16_is_accepted_once_it_is_loaded_back(live, tokenizer, adapter, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter, tmp_path / "shipped")
    file = tmp_path / "shipped" / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    with pytest.raises(VerificationError, match="differs from the live adapter"):
        record_reference(live, tokenizer, ROWS, tmp_path / "a.jsonl", adapter_dir=tmp_path / "shipped")
    loaded = PeftModel.from_pretrained(make_model("llama"), tmp_path / "shipped")
    reference = record_reference(loaded, tokenizer, ROWS, tmp_path / "b.jsonl", adapter_dir=tmp_path / "shipped")
    assert reference.dtypes["adapter"] == "float32"  # PEFT widens it


def test_nothing_is_written_when_the_model_overflows(live, tokenizer, tmp_path):
    with torch.no_grad():
        live.get_base_model().model.norm.weight[0] = math.inf
    with pytest.raises(NonFiniteScore):
        record_reference(live, tokenizer, ROWS, tmp_path / "reference.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_splits_a_label_is_refused(live, tmp_path):
    with pytest.raises(EngineError, match="'write' is"):
        record_reference(live, make_tokenizer(answers=("skip", "go")), ROWS, tmp_path / "reference.jsonl")


def change(path: Path, line: int, **changes) -> None:
    """Rewrite keys of one line; a value of None takes the key out."""
    lines = path.read_text().splitlines()
    value = json.loads(lines[line])
    for name, item in changes.items():
        if item is None:
            value.pop(name)
        else:
            value[name] = item
    lines[line] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def _with_floor(**changes):
    return {"noise_floors": {"batch_shape": None, "dequantized": {**FLOOR, **changes}}}


@pytest.mark.parametrize(
    ("line", "changes", "problem"),
    [
        (0, {"format": "other"}, "line 1: format 'other'"),
        (0, {"version": 4}, "version 4.*expected 'lora-merge/reference' version 1 to 3"),
        (0, {"version": True}, "version True.*expected 'lora-merge/reference' version 1 to 3"),
        (0, {"version": [1]}, "expected 'lora-merge/reference' version 1 to 3"),
        (0, {"version": 2}, "'recipe_origin' is not known"),
        (0, {"recipe_origin": "hearsay"}, "recipe_origin is 'hearsay'; expected one of reference, adapter"),
        (0, {"version": 1}, "'noise_floor' is missing and 'noise_floors' is not known"),
        (0, {"labels": None}, "'labels' is missing"),
        (0, {"surprise": 1}, "'surprise' is not known"),
        (0, {"labels": {"skip": {"text": "skip", "token_id": 1}}}, "label 'write'"),
        (0, {"prompts": {"count": 21, "token_ids_sha256": "x"}}, "holds 20 prompts.*says 21"),
        (0, {"prompts": {"count": 20, "token_ids_sha256": "x"}}, "do not add up"),
        (0, {"recipe": {"quant_type": "int4"}}, "quant_type is 'int4'"),
        (0, {"adapter": {"files": {"a": "0" * 64}, "root": "0" * 64}}, "root is not that of its files"),
        (0, {"adapter": {"files": {"a": "0" * 64}, "root": "0" * 64, "identity": "x"}}, "identity is no SHA-256"),
        (0, {"noise_floors": {"batch_shape": None}}, "noise_floors: 'dequantized' is missing"),
        (
            0,
            _with_floor(mean_abs_delta=-1),
            "line 1: noise_floors: dequantized: mean_abs_delta is -1, expected a number",
        ),
        (0, _with_floor(prompts=0), "line 1: noise_floors: dequantized: prompts is 0, expected a whole number from 1"),
        (0, _with_floor(flips=101), "line 1: noise_floors: dequantized: 101 of 100 prompts flip"),
        (3, {"id": None}, "line 4: 'id' is missing"),
        (3, {"id": "p0"}, "20 prompts with 19 different ids"),
        (3, {"log_p_skip": "x"}, "line 4: expected log-probabilities"),
        (3, {"log_p_skip": 0.5}, "line 4: expected log-probabilities"),
        (3, {"skip_probability": 0.123}, "line 4: skip_probability is 0.123"),
        (3, {"label_mass": 0.123}, "line 4: label_mass is 0.123"),
        (3, {"argmax": 1.0}, "line 4"),
        (3, {"token_ids_sha256": "abc"}, "line 4: expected an id and the SHA-256"),
        (3, {"token_ids_sha256": "0" * 64}, "do not add up"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(recorded, line, changes, problem):
    change(recorded, line, **changes)
    with pytest.raises(VerificationError, match=problem):
        read_reference(recorded)


def test_a_file_that_is_cut_short_is_refused(recorded, tmp_path):
    whole = recorded.read_text()
    recorded.write_text(whole[:-20])
    with pytest.raises(VerificationError, match="cut short"):
        read_reference(recorded)
    recorded.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(VerificationError, match="holds 19 prompts"):
        read_reference(recorded)
    recorded.write_text(whole.replace(whole.splitlines()[5], "", 1))
    with pytest.raises(VerificationError, match="line 6"):
        read_reference(recorded)
    recorded.write_text("")
    with pytest.raises(VerificationError, match="empty"):
        read_reference(recorded)
    with pytest.raises(VerificationError, match="cannot be read"):
        read_reference(tmp_path / "absent.jsonl")


def test_a_nan_is_no_number_in_a_file(recorded):
    text = recorded.read_text().splitlines()
    row = json.loads(text[2])
    row["log_p_skip"] = float("nan")
    text[2] = json.dumps(row)
    recorded.write_text("\n".join(text) + "\n")
    with pytest.raises(VerificationError, match=r"line 3.*NaN"):
        read_reference(recorded)


@pytest.mark.parametrize(
    ("change", "saved", "warned"),
    [
        ("nothing", False, None),
        ("template", False, "the chat template of this one is not that of"),
        ("template", True, None),
        ("tokens", False, "the vocabulary of this one is not that of"),
    ],
)
def test_a_tokenizer_of_the_training_s_own_is_missed_beside_the_adapter(change, saved, warned, live, adapter, tmp_path):
    """A merge takes the base's where the adapter has none: prompts would be other ids on both sides of a live verification."""
    make_tokenizer().save_pretrained(tmp_path / "base")
    own = AutoTokenizer.from_pretrained(tmp_path / "base")
    if change == "template":
        own.chat_template = "{% for message in messages %}{{ bos_token }}[{{ message['content'] }}]{% endfor %}"
    if change == "tokens":
        own.add_tokens(["<x>"])
    if saved:
        own.save_pretrained(adapter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record_reference(live, own, ROWS[:4], tmp_path / "reference.jsonl", adapter_dir=adapter, second_batch_size=None)
    said = [str(item.message) for item in caught if "holds no tokenizer" in str(item.message)]
    assert len(said) == (warned is not None) and all(warned in text for text in said)


@pytest.mark.parametrize("kind", ["added to a model of transformers", "compiled"])
def test_an_adapter_is_compared_however_the_live_model_carries_it(kind, tokenizer, tmp_path):
    """Oracle: the adapter as it was saved, of which one number is changed then."""
    if kind == "compiled":
        inner = make_live()
        live = torch.compile(inner)
    else:
        live = inner = make_model("llama")
        inner.add_adapter(LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    inner.save_pretrained(tmp_path / "adapter")
    check_live_adapter(live, tmp_path / "adapter")
    if kind != "compiled":
        out = tmp_path / "reference.jsonl"
        made = record_reference(live, tokenizer, ROWS[:4], out, adapter_dir=tmp_path / "adapter", second_batch_size=None)
        assert read_reference(out).adapter == made.adapter is not None
    weight = next(weight for name, weight in inner.named_parameters() if "lora_B" in name)
    with torch.no_grad():
        weight[0, 0] += 1
    with pytest.raises(VerificationError, match="differs from the live adapter"):
        check_live_adapter(live, tmp_path / "adapter")


def test_a_named_adapter_is_found_where_peft_saved_it(tmp_path):
    live = get_peft_model(make_model("llama"), LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="sql")
    live.save_pretrained(tmp_path)
    with pytest.raises(VerificationError, match=f"no such file; there is one in {tmp_path / 'sql'}"):
        check_live_adapter(live, tmp_path)
    check_live_adapter(live, tmp_path / "sql")
