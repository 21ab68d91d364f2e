"""Whose tokenizer the output has. Oracle: transformers, loading the output and the folder it should be like."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from lora_merge.merging.token_ids import embedding_rows
from lora_merge.merging.tokenizer_files import differences
from tests.merging.tokenizer_places import BASE_TEMPLATE, TRAINED_TEMPLATE, as_version_4, tokenizer
from tests.tiny import VOCABULARY

TEXT = "w5 <|end|> <old> w9 <pad>"
MESSAGES = [{"role": "user", "content": "w7"}]


def behaviour(folder: Path) -> dict[str, Any]:
    """What a tokenizer does, as transformers loads it."""
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    templates = loaded.chat_template if isinstance(loaded.chat_template, dict) else {"default": loaded.chat_template}
    return {
        "special": loaded.special_tokens_map,
        "vocabulary": loaded.get_vocab(),
        "ids": loaded(TEXT)["input_ids"],
        "eos": loaded.eos_token_id,
        "pad": loaded.pad_token_id,
        "templates": templates,
        "rendered": loaded.apply_chat_template(MESSAGES, tokenize=False) if templates.get("default") else None,
    }


def tokenizer_names(folder: Path) -> set[str]:
    known = ("token", "vocab", "merges", "special", "added", "chat_template", "additional")
    return {path.name for path in folder.iterdir() if path.name.startswith(known)}


def test_version_4_of_the_base_under_version_5_of_the_adapter(place):
    """The base's special_tokens_map.json would set eos and pad, and its added_tokens.json a token."""
    tokenizer(("<old>",)).save_pretrained(place.base)
    as_version_4(place.base)
    tokenizer(("<|end|>",), eos_token="<|end|>", pad_token="<unk>").save_pretrained(place.adapter)
    assert place.warnings() == []
    assert behaviour(place.out) == behaviour(place.adapter) != behaviour(place.base)
    assert behaviour(place.out)["eos"] == VOCABULARY - 2 and tokenizer_names(place.out) == tokenizer_names(place.adapter)


def test_version_5_of_the_base_under_version_4_of_the_adapter(place):
    tokenizer(("<old>",), chat_template=BASE_TEMPLATE).save_pretrained(place.base)
    tokenizer(("<|end|>",), eos_token="<|end|>", chat_template=TRAINED_TEMPLATE).save_pretrained(place.adapter)
    as_version_4(place.adapter)
    (place.adapter / "chat_template.jinja").unlink()
    config = json.loads((place.adapter / "tokenizer_config.json").read_text())
    (place.adapter / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TRAINED_TEMPLATE}))
    assert place.warnings() == []
    assert behaviour(place.out) == behaviour(place.adapter) and behaviour(place.out)["rendered"] == "<bos>TRAINED w7"
    assert not (place.out / "chat_template.jinja").exists(), "the base's would win over the one in tokenizer_config.json"


def test_named_templates_come_along(place):
    tokenizer(chat_template={"default": BASE_TEMPLATE, "rag": "BASE"}).save_pretrained(place.base)
    tokenizer(chat_template={"default": TRAINED_TEMPLATE, "tool_use": "TOOLS"}).save_pretrained(place.adapter)
    assert place.warnings() == []
    assert behaviour(place.out) == behaviour(place.adapter)
    assert set(behaviour(place.out)["templates"]) == {"default", "tool_use"}


def test_the_base_has_the_tokenizer(place):
    tokenizer(("<old>",), chat_template={"default": BASE_TEMPLATE, "rag": "BASE"}).save_pretrained(place.base)
    as_version_4(place.base)
    result = place.run()
    assert result.exit_code == 0 and "tokenizer" not in result.stderr
    assert behaviour(place.out) == behaviour(place.base)
    assert tokenizer_names(place.out) == tokenizer_names(place.base)


@pytest.mark.parametrize("where", ["jinja", "config", "named"])
def test_training_without_a_template(where, place):
    """The base's template would make prompts that the adapter has not seen; it goes, and that is said."""
    template = {"default": BASE_TEMPLATE, "rag": "BASE"} if where == "named" else BASE_TEMPLATE
    tokenizer(chat_template=template).save_pretrained(place.base, save_jinja_files=where != "config")
    tokenizer(eos_token="w4").save_pretrained(place.adapter)
    (warning,) = place.warnings()
    assert "has no chat template, so the output has none" in warning and "chat_template.jinja" in warning
    assert behaviour(place.out) == behaviour(place.adapter) and behaviour(place.out)["templates"] == {"default": None}


def test_a_template_alone_is_put_on_the_tokenizer_of_the_base(place):
    made = tokenizer(
        ("<old>",), chat_template=[{"name": "default", "template": BASE_TEMPLATE}, {"name": "rag", "template": "BASE"}]
    )
    made.save_pretrained(place.base, save_jinja_files=False)
    tokenizer(("<old>",), chat_template={"default": BASE_TEMPLATE, "tool_use": "BASE"}).save_chat_templates(
        place.base, {}, None, True
    )
    (place.base / "chat_template.json").write_text(json.dumps({"chat_template": BASE_TEMPLATE}))
    (place.adapter / "chat_template.jinja").write_text(TRAINED_TEMPLATE)
    result = place.run()
    assert f"chat template (on the base's tokenizer): from {place.adapter}" in result.stderr
    expected = {**behaviour(place.base), "templates": {"default": TRAINED_TEMPLATE}, "rendered": "<bos>TRAINED w7"}
    assert behaviour(place.out) == expected
    assert tokenizer_names(place.out) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


PARTS = ["tokenizer_config.json", "tokenizer.json", "added_tokens.json", "special_tokens_map.json", "chat_template.json"]


@pytest.mark.parametrize("name", [*PARTS, "additional_chat_templates/tool_use.jinja"])
@pytest.mark.parametrize("template", [False, True])
def test_a_part_of_a_tokenizer(name, template, place):
    """Refused, unless it is the base's own."""
    tokenizer(("<old>",), chat_template={"default": BASE_TEMPLATE, "tool_use": "TOOLS"}).save_pretrained(place.base)
    as_version_4(place.base)
    (place.base / "chat_template.json").write_text(json.dumps({"chat_template": BASE_TEMPLATE}))
    (place.adapter / "additional_chat_templates").mkdir()
    shutil.copy(place.base / name, place.adapter / name)
    if template:
        (place.adapter / "chat_template.jinja").write_text(TRAINED_TEMPLATE)
    is_template = "chat_template" in name
    assert place.run("--dry-run").exit_code == 0
    (place.adapter / name).write_text((place.base / name).read_text() + " ")
    result = place.run()
    if template and is_template:
        assert result.exit_code == 0, "a template's files are a whole, with chat_template.jinja among them"
        return
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    assert f"{place.adapter}: holds {name}, a part of a tokenizer that is not the base's" in result.stderr
    assert f"or remove {name} to use the base's" in result.stderr and not place.out.exists()


def test_half_of_a_vocabulary(place):
    """vocab.json is half of a BPE vocabulary where the base has merges.txt, and the whole of another elsewhere."""
    for folder in (place.base, place.adapter):
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    assert place.run("--dry-run").exit_code == 0
    (place.base / "merges.txt").write_text("a b\n")
    (place.adapter / "vocab.json").write_text(json.dumps({"a": 1, "b": 0}))
    assert "holds vocab.json, a part of a tokenizer" in place.run("--dry-run").stderr


def test_sentencepiece(place):
    """A vocabulary that is no tokenizer.json, as older trainers save it: the base's tokenizer.json would win over it."""
    sentencepiece = pytest.importorskip("sentencepiece")

    words = [" ".join(f"w{(7 * line + word) % 90}" for word in range(12)) for line in range(200)]
    settings = {"vocab_size": 60, "model_type": "bpe", "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "minloglevel": 2}
    pieces = {"pad_piece": "<pad>", "eos_piece": "</s>", "bos_piece": "<s>", "unk_piece": "<unk>"}
    with open(place.adapter / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(words), model_writer=file, **settings, **pieces)
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (place.adapter / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer(("<old>",)).save_pretrained(place.base)
    assert place.warnings() == []
    assert tokenizer_names(place.out) == {"tokenizer.model", "tokenizer_config.json"}
    assert behaviour(place.out) == behaviour(place.adapter) and len(behaviour(place.out)["vocabulary"]) == 60


def test_where_the_tokenizer_came_from_is_said(place):
    tokenizer(chat_template=BASE_TEMPLATE).save_pretrained(place.base)
    tokenizer(chat_template=TRAINED_TEMPLATE).save_pretrained(place.adapter)
    line = f"tokenizer: from {place.adapter}; differs from the base's in chat_template.jinja"
    assert line in place.run("--dry-run").stderr.splitlines() and line in place.run().stderr.splitlines()
    assert place.run("--overwrite", "--quiet").stderr == ""
    (place.adapter / "chat_template.jinja").write_text(BASE_TEMPLATE)
    assert "tokenizer" not in place.run("--overwrite").stderr, "the same files from either side"


def test_tokenizers_of_several_adapters(place):
    tokenizer().save_pretrained(place.base)
    other = place.root / "other"
    shutil.copytree(place.adapter, other)
    tokenizer(eos_token="w4").save_pretrained(other)
    both = ("--adapter", other, "--quiet", "--overwrite")
    assert place.run(*both).stderr == "" and behaviour(place.out) == behaviour(other), "one of them brings a tokenizer"
    tokenizer(eos_token="w5").save_pretrained(place.adapter)
    result = place.run(*both)
    assert result.stderr == f"warning: tokenizer: from {place.adapter}; {other} brings another one, which is not used\n"
    assert behaviour(place.out) == behaviour(place.adapter)
    tokenizer(eos_token="w5").save_pretrained(other)
    assert place.run(*both).stderr == ""


def test_tokens_without_a_row(place):
    """Oracle: the embedding of transformers, which cannot look the token up."""
    tokenizer().save_pretrained(place.base)
    trained = tokenizer(("<a>", "<b>", "<c>", "<d>"))
    trained.save_pretrained(place.adapter)
    result = place.run("--dry-run")
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    assert (
        f"from {place.adapter} has token '<c>' ({VOCABULARY}) and 1 more, but the embedding has {VOCABULARY} rows"
        in result.stderr
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(place.base)
    with pytest.raises(IndexError):
        model(torch.tensor([trained("<c>")["input_ids"]]))
    model(torch.tensor([trained("<b>")["input_ids"]]))
    tokenizer(("<a>", "<b>")).save_pretrained(place.adapter)
    assert place.warnings() == [], "the last row is a row"


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "unigram"])
def test_where_tokens_are_read(file, place):
    """A vocabulary inside a SentencePiece model is not read; what was added to it stands beside it."""
    tokenizer().save_pretrained(place.base)
    config: dict[str, Any] = {}
    if file == "added_tokens.json":
        (place.adapter / file).write_text(json.dumps({"<new>": VOCABULARY}))
    elif file == "vocab.json":
        (place.adapter / file).write_text(json.dumps({"a": 0, "<new>": VOCABULARY}))
    elif file == "vocab.txt":
        (place.adapter / file).write_text("\n".join([*(f"w{row}" for row in range(VOCABULARY)), "<new>"]) + "\n")
    elif file == "unigram":
        pieces = [[f"w{row}", 0.0] for row in range(VOCABULARY)]
        (place.adapter / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [*pieces, ["<new>", 0.0]]}}))
    else:
        config["added_tokens_decoder"] = {str(VOCABULARY): {"content": "<new>"}}
    (place.adapter / "tokenizer_config.json").write_text(json.dumps(config))
    (place.adapter / "tokenizer.model").write_text("a SentencePiece model")
    assert f"has token '<new>' ({VOCABULARY}), but the embedding has {VOCABULARY} rows" in place.run("--dry-run").stderr


@pytest.mark.parametrize("added", [5, True, "text", {"id": 999}, [5, {"id": "5"}, {}]])
def test_tokens_of_another_type_are_none(added, place):
    tokenizer().save_pretrained(place.base)
    tokenizer(eos_token="w4").save_pretrained(place.adapter)
    content = json.loads((place.adapter / "tokenizer.json").read_text())
    (place.adapter / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": added}))
    assert place.warnings() == []


def test_an_id_that_no_number_can_be(place):
    """Oracle: Python's limit of digits."""
    tokenizer().save_pretrained(place.base)
    tokenizer().save_pretrained(place.adapter)
    config = json.loads((place.adapter / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"9" * 5000: {"content": "<new>"}}
    (place.adapter / "tokenizer_config.json").write_text(json.dumps(config))
    result = place.run("--dry-run")
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    assert f"{place.adapter / 'tokenizer_config.json'}: added_tokens_decoder has an id of 5000 digits" in result.stderr


def test_a_file_is_not_read_to_be_compared_with_itself(tmp_path):
    one, other = tmp_path / "not" / "there", tmp_path / "file"
    other.write_text("x")
    assert differences({"tokenizer.json": one}, {"tokenizer.json": one}) == []
    with pytest.raises(FileNotFoundError):
        differences({"tokenizer.json": one}, {"tokenizer.json": other})


def test_tokens_without_a_row_that_need_none(place):
    """A padding token that was only added for batches, and what the base's own tokenizer has beyond its embedding."""
    tokenizer().save_pretrained(place.base)
    tokenizer(("<a>", "<b>", "<padding>"), pad_token="<padding>").save_pretrained(place.adapter)
    (warning,) = place.warnings()
    assert f"has token '<padding>' ({VOCABULARY}), but the embedding has {VOCABULARY} rows" in warning
    shutil.rmtree(place.out)
    as_version_4(place.adapter)
    config = json.loads((place.adapter / "tokenizer_config.json").read_text())
    (place.adapter / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": None}))
    assert place.warnings() == [warning], "special_tokens_map.json says that it is for padding"
    shutil.rmtree(place.out)
    (place.adapter / "special_tokens_map.json").unlink()
    assert place.run("--dry-run").exit_code == 1, "nothing says so"
    (place.adapter / "added_tokens.json").unlink()
    for folder, eos in ((place.base, "<eos>"), (place.adapter, "w4")):
        tokenizer(("<a>", "<b>", "<picture>"), eos_token=eos).save_pretrained(folder)
    assert place.warnings() == [], "as Gemma's text models come"


def test_tokens_without_a_row_and_no_tokenizer_to_compare_with(place):
    tokenizer(("<a>", "<b>", "<c>")).save_pretrained(place.adapter)
    (warning,) = place.warnings()
    assert "has token '<c>'" in warning


def test_tokens_of_a_resized_embedding(place):
    """More rows, trained with the tokens; and fewer than the base's tokenizer has tokens."""
    tokenizer().save_pretrained(place.base)
    for rows, tokens in ((VOCABULARY + 2, ("<a>", "<b>", "<c>", "<d>")), (VOCABULARY - 8, None)):
        model = transformers.AutoModelForCausalLM.from_pretrained(place.base)
        model.resize_token_embeddings(rows)
        shutil.rmtree(place.adapter)
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
            place.adapter, save_embedding_layers=True
        )
        if tokens is not None:
            tokenizer(tokens).save_pretrained(place.adapter)
            assert place.warnings() == []
            tokens_out = transformers.AutoTokenizer.from_pretrained(place.out)("<d>")["input_ids"]
            transformers.AutoModelForCausalLM.from_pretrained(place.out)(torch.tensor([tokens_out]))
        else:
            assert f"from {place.base} has token 'w{rows}' ({rows}) and" in place.run("--dry-run").stderr


FAMILIES = ["llama", "gpt2", "gpt_neox", "bloom", "opt", "mamba", "t5", "bert", "xlnet", "openai-gpt", "clip_text_model"]


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_by_their_names(family):
    """Oracle: transformers' own idea of the input embedding, in a model that has others, of positions or segments, too."""
    config = transformers.AutoConfig.for_model(family, vocab_size=7777)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    assert model.get_input_embeddings().weight.shape[0] == embedding_rows(shapes) == 7777
