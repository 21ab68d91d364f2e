"""Tied weights of families that name and tie them in their own ways.

Oracles: the live, unmerged PEFT model's logits in float32; transformers, which has to find every tensor of the merge and no
other; and for what is taken for granted without building a class, the source of every model in transformers.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from lora_merge.merging.api import MergeOptions, merge, plan_merge
from lora_merge.merging.cautions import TIED_IN_VLLM, cautions
from lora_merge.merging.errors import MergeError
from lora_merge.merging.tying import SHARED_LAYERS
from tests.merging.kinds import PIXELS, TEXT, TOKENS, Kind, train
from tests.merging.live import assert_merge_is_live, save_class
from tests.merging.oracle import load_folder
from tests.tiny import VOCABULARY, save_tiny_adapter, save_tiny_base

BOTH: dict[str, Any] = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :8]}
SOUND: dict[str, Any] = {
    "input_features": torch.linspace(-1, 1, 2 * 8 * 40).reshape(2, 8, 40),
    "decoder_input_ids": TOKENS[:, :8],
}
PICTURE: dict[str, Any] = {"pixel_values": PIXELS, "decoder_input_ids": TOKENS[:, :8]}
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
OPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
OPT |= {"max_position_embeddings": 64, "word_embed_proj_dim": 64}
TWO: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 128}
TWO |= {"decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
MEL: dict[str, Any] = {
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 30,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
MEL |= {"bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None}
T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
ZAMBA: dict[str, Any] = {
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "num_hidden_layers": 4,
    "num_mem_blocks": 1,
    "use_mem_rope": True,
}
ZAMBA |= {"mamba_d_state": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "n_mamba_heads": 8}


def described_pictures() -> Any:
    """GPT-2 under a vision tower: only the decoder's own configuration ties, and only its layers are stored transposed."""
    gpt2 = {"n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 4, "add_cross_attention": True, "is_decoder": True}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**vision, patch_size=14), transformers.GPT2Config(vocab_size=VOCABULARY, **gpt2)
    )
    config.decoder_start_token_id = config.pad_token_id = 0
    return transformers.VisionEncoderDecoderModel(config)


def liquid() -> Any:
    """Checkpoints of LFM2 have a flag of their own."""
    config = transformers.Lfm2Config(**TEXT, layer_types=["conv", "full_attention"])
    config.tie_embedding = True
    return transformers.Lfm2ForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**OPT)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**TWO)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZE)),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8)
    ),
    "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZE, tie_word_embeddings=True)),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{**TWO, **MEL})),
    "zamba2": lambda: transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**{**SIZE, **ZAMBA})),
    "gpt2-under-vit": described_pictures,
    "lfm2": liquid,
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**TEXT, head_dim=16, sliding_window=16, tie_word_embeddings=True)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "switch": lambda: transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**T5, num_decoder_layers=2, num_experts=2, num_sparse_encoder_layers=0)
    ),
}
INPUTS: dict[str, Any] = {"bart": BOTH, "t5": BOTH, "switch": BOTH, "whisper": SOUND, "gpt2-under-vit": PICTURE}
RESIZED: dict[str, Any] = {"before": lambda model: model.resize_token_embeddings(170)}

MERGED: list[tuple[str, Kind]] = [
    ("opt", Kind({"target_modules": ["q_proj", "embed_tokens"]})),
    ("opt", Kind({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})),
    ("opt", Kind({"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]})),
    ("opt", Kind({"target_modules": ["q_proj"]}, **RESIZED)),
    ("bart", Kind({"target_modules": ["q_proj"], "modules_to_save": ["shared"]})),
    ("bart", Kind({"target_modules": ["q_proj", "embed_tokens"]})),
    ("bart", Kind({"target_modules": ["q_proj", "lm_head"]})),
    ("bart", Kind({"target_modules": ["q_proj"], "trainable_token_indices": {"shared": [3, 7]}})),
    ("bert", Kind({"target_modules": ["query", "word_embeddings"]})),
    ("bert", Kind({"target_modules": ["query"], "modules_to_save": ["decoder"]})),
    ("bert", Kind({"target_modules": ["query"], "bias": "all"})),
    ("mamba", Kind({"target_modules": ["in_proj", "embeddings"]})),
    ("mamba", Kind({"target_modules": ["in_proj"]}, **RESIZED)),
    ("neox", Kind({"target_modules": ["query_key_value", "embed_in"]})),
    ("neox", Kind({"target_modules": ["query_key_value", "lm_head"]})),
    ("lfm2", Kind({"target_modules": ["q_proj", "embed_tokens"]})),
    ("whisper", Kind({"target_modules": ["q_proj", "proj_out"]})),
    ("zamba2", Kind({"target_modules": ["in_proj", "embed_tokens"]})),
    ("zamba2", Kind({"target_modules": ["q_proj"]})),
    ("zamba2", Kind({"target_modules": r".*layers\.1\.shared_transformer.*q_proj"})),
    ("gpt2-under-vit", Kind({"target_modules": ["attn.c_proj"]}, scale=0.3)),
    ("gpt2-under-vit", Kind({"target_modules": ["attn.c_attn", "wte"]})),
    ("gpt2-under-vit", Kind({"target_modules": ["attn.c_attn"], "trainable_token_indices": {"wte": [3, 7]}})),
    ("gemma3", Kind({"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [3, 9]})),
    ("gemma3", Kind({"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 9], "lm_head": [3, 9]}})),
    ("gemma3", Kind({"target_modules": ["q_proj"], "target_parameters": ["lm_head.weight"]})),
    ("gemma3", Kind({"target_modules": ["q_proj"], "target_parameters": ["embed_tokens.weight"]})),
    ("t5", Kind({"target_modules": ["q"], "trainable_token_indices": {"shared": [3, 7]}})),
    ("t5", Kind({"target_modules": ["q"]}, **RESIZED)),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("ties")

    def make(family: str) -> Path:
        return root / family if (root / family).exists() else save_class(root / family, MODELS[family]())

    return make


def trained(base: Path, family: str, kind: Kind, adapter: Path) -> tuple[Any, type]:
    """The live PEFT model, saved as ``adapter``, and the base's class."""
    chosen = type(MODELS[family]())
    live = train(chosen.from_pretrained(base, dtype=torch.float32), kind)
    live.save_pretrained(adapter)
    return live, chosen


def assert_loads(merged: Path, chosen: Any) -> None:
    _, found = chosen.from_pretrained(merged, output_loading_info=True)
    assert not any(found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), found


@pytest.mark.parametrize(("family", "kind"), MERGED, ids=lambda value: value if isinstance(value, str) else "")
def test_logits_are_the_unmerged_models(family: str, kind: Kind, base: Callable[[str], Path], tmp_path: Path) -> None:
    live, chosen = trained(base(family), family, kind, tmp_path / "adapter")
    merged = assert_merge_is_live(base(family), tmp_path / "adapter", live, chosen, tmp_path / "out", INPUTS.get(family, TOKENS))
    assert_loads(merged, chosen)


@pytest.mark.parametrize(
    ("family", "kind", "message"),
    [
        ("t5", Kind({"target_modules": ["q", "lm_head"]}), "ties them whatever it says"),
        ("t5", Kind({"target_modules": ["q"], "modules_to_save": ["shared"]}), "ties them whatever it says"),
        ("switch", Kind({"target_modules": ["q", "lm_head"]}), "computes otherwise under false"),
        ("bert", Kind({"target_modules": ["query"], "trainable_token_indices": [3, 7]}), "whose layer has a bias"),
        ("bart", Kind({"target_modules": ["q_proj"]}, **RESIZED), "resized, but not everywhere.*final_logits_bias"),
    ],
)
def test_what_no_checkpoint_of_the_class_holds_is_refused(
    family: str, kind: Kind, message: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    trained(base(family), family, kind, tmp_path / "adapter")
    with pytest.raises(MergeError, match=message) as refused:
        merge(base(family), tmp_path / "adapter", tmp_path / "out")
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


def test_a_base_that_was_saved_without_its_tied_head(base: Callable[[str], Path], tmp_path: Path) -> None:
    """The headed class would tie its head to the changed embedding. What leaves the tie alone merges as ever."""
    chosen = transformers.Gemma3ForCausalLM
    chosen.from_pretrained(base("gemma3"), dtype=torch.bfloat16).model.save_pretrained(tmp_path / "headless")
    for name, settings in (("moved", ["q_proj", "embed_tokens"]), ("left", ["q_proj"])):
        trained(base("gemma3"), "gemma3", Kind({"target_modules": settings}), tmp_path / name)
    with pytest.raises(MergeError, match="saved as Gemma3TextModel, without the output head"):
        merge(tmp_path / "headless", tmp_path / "moved", tmp_path / "out")
    merge(tmp_path / "headless", tmp_path / "left", tmp_path / "out")
    rows = Kind({"target_modules": ["q_proj"], "trainable_token_indices": [3, 9]})
    live, _ = trained(base("gemma3"), "gemma3", rows, tmp_path / "rows")
    assert_merge_is_live(tmp_path / "headless", tmp_path / "rows", live, chosen, tmp_path / "second")


def test_an_embedding_of_a_class_that_no_head_belongs_to(tmp_path: Path) -> None:
    """Its configuration knows no tied weights. Oracle: the live model's hidden states."""
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=VOCABULARY, **size))
    model.save_pretrained(tmp_path / "base")
    live = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "token_embedding"], init_lora_weights=False)).eval()
    live.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    merged = transformers.CLIPTextModel.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = live(TOKENS[:, :8]).last_hidden_state
        torch.testing.assert_close(merged(TOKENS[:, :8]).last_hidden_state, expected, atol=1e-5, rtol=1e-4)
    start = transformers.CLIPTextModel.from_pretrained(tmp_path / "base").eval()
    assert (start(TOKENS[:, :8]).last_hidden_state - expected).abs().max() > 0.01


@pytest.mark.parametrize("names", [{"embed_tokens": [3, 9], "lm_head": [9]}, {"embed_tokens": [3, 9], "q_proj": [3, 9]}])
def test_rows_that_are_not_those_of_a_tied_module_are_missed(
    names: dict[str, list[int]], base: Callable[[str], Path], tmp_path: Path
) -> None:
    trained(base("gemma3"), "gemma3", Kind({"target_modules": ["v_proj"], "trainable_token_indices": [3, 9]}), tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "trainable_token_indices": names}))
    with pytest.raises(MergeError, match=f"names rows of '{list(names)[1]}'.*incomplete"):
        merge(base("gemma3"), tmp_path / "a", tmp_path / "out")


@pytest.mark.parametrize("family", ["opt", "bart"])
def test_stored_copies_follow_their_tie(family: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    """A base that stores the head as a copy: token rows change both, an embedding's update only the embedding."""
    head, source = "lm_head.weight", "model.shared.weight" if family == "bart" else "model.decoder.embed_tokens.weight"
    name = source.split(".")[-2]
    copied = tmp_path / "base"
    copied.mkdir()
    (copied / "config.json").write_bytes((base(family) / "config.json").read_bytes())
    tensors = load_file(base(family) / "model.safetensors")
    save_file({**tensors, head: tensors[source].clone()}, copied / "model.safetensors", {"format": "pt"})
    cases: dict[str, dict[str, Any]] = {
        "rows": {"trainable_token_indices": {name: [3, 7]}, "target_modules": ["q_proj"]},
        "lora": {"target_modules": ["q_proj", "lm_head"]},
    }
    for case, settings in cases.items():
        live, chosen = trained(copied, family, Kind(settings), tmp_path / case)
        inputs = INPUTS.get(family, TOKENS)
        merged = assert_merge_is_live(copied, tmp_path / case, live, chosen, tmp_path / f"{case}-out", inputs)
        assert_loads(merged, chosen)
        after = load_folder(merged)
        assert torch.equal(after[head], after[source]) == (case == "rows")


def test_a_head_of_its_own_under_a_class_that_always_ties(base: Callable[[str], Path], tmp_path: Path) -> None:
    """T5 1.1: the configuration says false, the class ties all the same and leaves apart what differs in the file."""
    own = tmp_path / "base"
    own.mkdir()
    config = json.loads((base("t5") / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(base("t5") / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["shared.weight"].flip(0)}, own / "model.safetensors", {"format": "pt"})
    live, chosen = trained(own, "t5", Kind({"target_modules": ["q", "lm_head"]}), tmp_path / "adapter")
    merged = assert_merge_is_live(own, tmp_path / "adapter", live, chosen, tmp_path / "out", BOTH)
    assert_loads(merged, chosen)


def test_vllm_is_said_to_keep_tied_what_it_keeps_tied(base: Callable[[str], Path], tmp_path: Path) -> None:
    """Oracle: the source of vLLM's models, of which those that tie by the configuration read the flag.

    BLOOM reads it too, and then looks for the head inside the transformer.
    """
    for family, settings, said in (
        ("whisper", {"target_modules": ["q_proj", "proj_out"]}, True),
        ("whisper", {"target_modules": ["q_proj"]}, False),
        ("gemma3", {"target_modules": ["q_proj", "lm_head"]}, False),
    ):
        adapter = tmp_path / f"{family}-{len(settings['target_modules'])}"
        trained(base(family), family, Kind(settings), adapter)
        found = [line for line in cautions(plan_merge(base(family), adapter), MergeOptions()) if "vLLM" in line]
        assert bool(found) == said
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    models = Path(spec.origin).parent / "model_executor" / "models"
    files = {"cohere": "commandr", "cohere2": "commandr", "gemma3n_text": "gemma3n", "gemma3": "gemma3", "opt": "opt"}
    assert "bloom" in TIED_IN_VLLM
    for kind in [*TIED_IN_VLLM - {"bloom"}, "gemma3", "opt", "llama", "qwen2", "gpt2"]:
        source = (models / f"{files.get(kind, kind)}.py").read_text(encoding="utf-8")
        assert ("tie_word_embeddings" not in source) == (kind in TIED_IN_VLLM), kind


def test_only_known_classes_tie_inside_numbered_layers() -> None:
    """What lets an adapter on numbered layers go without the class. Oracle: the source of every model in transformers."""
    plain = re.compile(r"(?!.*\.\d+\.)[A-Za-z0-9_.]+\.(weight|bias)\$?")
    mention = re.compile(r"_tied_weights_keys(?:: [^=\n]+)?(?: = (?P<value>\{[^{}]*\}|[^\n]*)|\.\w+\()")
    found = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for match in mention.finditer(file.read_text(encoding="utf-8")):
            try:
                ties = ast.literal_eval(match["value"] or "") or {}
            except (SyntaxError, ValueError):
                ties = {"what is computed": "not known from here"}
            if not all(plain.fullmatch(name) for pair in ties.items() for name in pair):
                found.add(file.parent.name)
    assert found == set(SHARED_LAYERS)


def test_an_adapter_on_the_layers_of_a_usual_model_builds_nothing(tmp_path: Path) -> None:
    """Gemma's configuration leaves its tie to the class, which an adapter without a share in it does not ask."""
    save_tiny_base(tmp_path / "base", "gemma3", torch.bfloat16)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    adapter = save_tiny_adapter(tmp_path / "adapter", tmp_path / "base")
    arguments = ["--base", str(tmp_path / "base"), "--adapter", str(adapter), "--out", str(tmp_path / "out")]
    code = "import sys; from lora_merge.merging.cli import main\n"
    code += f"try: main({arguments!r})\nexcept SystemExit as done: assert not done.code\n"
    code += "sys.exit(' '.join(sorted({'torch', 'transformers'} & set(sys.modules))) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "merge_manifest.json").is_file()
