"""Tokenizers of one word a token, and a place with base, adapter and output to merge them in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers

from lora_merge.merging.cli import main
from tests.tiny import VOCABULARY

BASE_TEMPLATE = "{{ bos_token }}BASE {{ messages[0].content }}"
TRAINED_TEMPLATE = "{{ bos_token }}TRAINED {{ messages[0].content }}"


def tokenizer(extra: tuple[str, ...] = (), size: int = VOCABULARY - 2, **changes: Any) -> transformers.PreTrainedTokenizerFast:
    """One word a token: w4, w5, ... and four special ones; ``extra`` come after them."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, **{f"w{number}": number for number in range(4, size)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    made.add_tokens(list(extra))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def as_version_4(folder: Path) -> None:
    """Give a folder the files that ``save_pretrained`` of transformers 4 adds to those of version 5, with the same content."""
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    special = {name: str(value) for name, value in loaded.special_tokens_map.items() if isinstance(value, str)}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    added = loaded.get_added_vocab()
    (folder / "added_tokens.json").write_text(json.dumps(added))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {number: {"content": token, "special": True} for token, number in added.items()}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass
class Place:
    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def adapter(self) -> Path:
        return self.root / "adapter"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def run(self, *rest: object):
        arguments = ("--base", self.base, "--adapter", self.adapter, "--out", self.out, *rest)
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    def warnings(self) -> list[str]:
        result = self.run("--quiet")
        assert result.exit_code == 0, result.output
        return result.stderr.splitlines()
