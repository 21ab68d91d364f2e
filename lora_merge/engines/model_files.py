"""What an engine reads of a checkpoint without loading it: tokenizer, positions, embedding rows, end ids, library versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_merge.engines.errors import EngineError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_MESSAGE_LIMIT = 400
_EMBEDDINGS = (
    "embed_tokens.weight",  # most
    "wte.weight",  # GPT-2, MPT
    "word_embeddings.weight",  # Bloom, Falcon
    "embed_in.weight",  # GPT-NeoX
    "tok_embeddings.weight",  # InternLM2
)
"""Last parts of the input embedding's name in a checkpoint's files."""


def load_tokenizer(path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder or hub repository ``path``; :class:`EngineError` when there is none that loads."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=trust_remote_code)
    # A class of a tokenizer or a configuration runs its own code on what stands in the files, which can fail in any way.
    except Exception as error:
        raise EngineError(f"no tokenizer loads from {path}: {brief(error)}") from error
    if not isinstance(tokenizer("a")["input_ids"], list):
        raise EngineError(f"the tokenizer of {path} returns {type(tokenizer('a')['input_ids']).__name__}; expected lists of ids")
    return tokenizer


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration in the folder ``path`` as its class reads it.

    The class gives what config.json leaves out a value of its own.

    Raises:
        EngineError: there is none that transformers takes.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    # The class runs its own code on values from outside, which can fail in any way.
    except Exception as error:
        raise EngineError(f"{path}: its config.json is none that transformers can load: {brief(error)}") from error


def brief(error: Exception) -> str:
    """The beginning of a library's message, in one line: it can run to one line a tensor."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MESSAGE_LIMIT else f"{text[:_MESSAGE_LIMIT]} ..."


def max_positions(folder: str | Path) -> int | None:
    """Most tokens, prompt and answer together, that the checkpoint in ``folder`` has positions for; None when it does not say."""
    return _stated(folder, "max_position_embeddings", "n_positions", "max_sequence_length")


def vocabulary_rows(folder: str | Path) -> int | None:
    """Rows of the input embedding of the checkpoint in ``folder``: token ids from this number on mean nothing to the model.

    A tokenizer may know more tokens than that (and most know fewer). Of the embedding tensor in the safetensors files, read from
    their headers; where there is none, or several of different sizes, what config.json says of the text model; None when it says
    nothing.
    """
    sizes = {shape[0] for name, shape in _shapes(Path(folder)) if name.endswith(_EMBEDDINGS) and len(shape) == 2}
    return sizes.pop() if len(sizes) == 1 else _stated(folder, "vocab_size")


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the safetensors files, by name with its shape; a file that cannot be read is for whoever loads it."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, no dictionary
                yield name, tuple(file.get_slice(name).get_shape())


def _stated(folder: str | Path, *names: str) -> int | None:
    """The first of ``names`` that config.json gives a number, for the text model before the whole; None where it gives none."""
    config = _read_json(Path(folder) / "config.json")
    text_config = config.get("text_config")
    for part in (text_config if isinstance(text_config, dict) else {}, config):
        for name in names:
            if isinstance(part.get(name), int):
                return int(part[name])
    return None


def sliding_window(folder: str | Path, *, trust_remote_code: bool = False) -> int | None:
    """The window, in tokens, of a model whose layers have a sliding window or full attention, some each; None for any other.

    Which layers have one is transformers' knowledge: the configurations of Gemma 2 and of most Gemma 3 do not say.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code).get_text_config()
    except (OSError, ValueError, ImportError, KeyError):
        return None
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    return window if set(kinds or ()) == {"full_attention", "sliding_attention"} and isinstance(window, int) else None


def end_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end a text, ascending: those of ``generation_config.json`` (else of ``config.json``) and the tokenizer's EOS.

    Both engines get this one list, because each has its own habit of where to look.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config")
    candidates: list[Any] = [config.get("eos_token_id")]
    candidates += [text_config.get("eos_token_id")] if isinstance(text_config, dict) else []
    if (folder / "generation_config.json").is_file():
        stated = _read_json(folder / "generation_config.json").get("eos_token_id")
        candidates = [stated] if stated is not None else candidates
    return id_union(*candidates, tokenizer.eos_token_id)


def id_union(*values: Any) -> tuple[int, ...]:
    """Ids, lists of ids and Nones as one ascending tuple without twins."""
    ids: set[int] = set()
    for value in values:
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, Iterable):
            ids.update(int(item) for item in value)
    return tuple(sorted(ids))


def library_versions(*names: str) -> dict[str, str]:
    """``{distribution: version}`` of those of ``names`` that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"{path}: {error.strerror or error}; expected a checkpoint folder") from error
    except ValueError as error:
        raise EngineError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{path} holds no JSON object")
    return value
