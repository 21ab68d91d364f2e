"""Whether every token of the output's tokenizer has a row in its embedding.

A tokenizer that training extended, on an embedding that it did not, makes ids that no engine can look up. Fewer tokens than
rows are usual: embeddings are padded. More are usual too, where the base comes that way: Gemma's text models share a tokenizer
with a token for pictures, which the text never holds. So what the base's own tokenizer has beyond the base's embedding is
nobody's mistake.

Ids are read from the files' own JSON and text. A vocabulary inside a SentencePiece, tiktoken or Mistral file is not read, which
would need their libraries; what was added to it stands in ``added_tokens.json`` or ``tokenizer_config.json``, and is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import read_json
from lora_merge.merging.plan import MergePlan
from lora_merge.merging.tokenizer_files import TOKENIZER_CONFIG, choose_tokenizer, differences

# Of the tensors that are an input embedding, how their names end; the largest one counts.
_EMBEDDINGS = frozenset(
    "embed_tokens embed_in wte word_embeddings word_embedding tok_embeddings token_embedding tokens_embed shared embeddings "
    "embedding".split()
)

_SPECIAL_TOKENS = (TOKENIZER_CONFIG, "special_tokens_map.json")


@dataclass(frozen=True)
class Rowless:
    """Tokens of the output's tokenizer that its embedding has no row for, and that the base's tokenizer has not.

    Attributes:
        tokens: id -> token, in order.
        rows: of the embedding.
        source: the folder the tokenizer came from, as the user named it.
        only_padding: whether all of them are for padding, so that no engine need ever look one up.
        has_own: whether the base has a tokenizer; without one nothing says who added them.
    """

    tokens: Mapping[int, str]
    rows: int
    source: str
    only_padding: bool
    has_own: bool

    @property
    def refused(self) -> bool:
        """Whether a merge makes no sense."""
        return self.has_own and not self.only_padding

    @property
    def message(self) -> str:
        first = next(iter(self.tokens))
        more = f" and {len(self.tokens) - 1} more" if len(self.tokens) > 1 else ""
        found = f"the tokenizer from {self.source} has token {self.tokens[first]!r} ({first}){more}, but the embedding has "
        found += f"{self.rows} rows: "
        if self.only_padding:
            return found + "it is for padding alone, which vLLM never looks up; an engine that pads needs another pad token"
        return found + (
            "no engine can read a prompt with it; save the adapter with its resized embedding (save_embedding_layers=True), or "
            "put the tokenizer beside it that it was trained with"
        )


def check_token_ids(plan: MergePlan) -> None:
    """Raise :class:`MergeError` where the output's tokenizer has tokens that training cannot have used as the adapter is."""
    found = tokens_without_row(plan)
    if found is not None and found.refused:
        raise MergeError(found.message)


def tokens_without_row(plan: MergePlan) -> Rowless | None:
    """The tokens of the output's tokenizer beyond its embedding; None where there are none, or the embedding is not found."""
    base_rows = embedding_rows({name: tensor.shape for name, tensor in plan.base.tensors.items()})
    rows = embedding_rows({tensor.name: tensor.shape for tensor in plan.tensors})
    if rows is None or base_rows is None or base_rows < _stated_rows(plan.base.config):
        return None
    chosen = choose_tokenizer(plan.base.folder, [adapter.folder for adapter in plan.adapters])
    own = choose_tokenizer(plan.base.folder, ()).files
    # A file of the base's own tells of no token that the base has not; with fewer rows than the base's it may.
    names = differences(chosen.files, own) if rows >= base_rows else [*chosen.files]
    beyond = _beyond({name: chosen.files[name] for name in names if name in chosen.files}, chosen.files, rows)
    if beyond:
        known = set(_beyond(own, own, base_rows).items())
        beyond = {number: token for number, token in sorted(beyond.items()) if (number, token) not in known}
    if not beyond:
        return None
    only_padding = set(beyond.values()) <= _padding(chosen.files)
    source = (chosen.folder or plan.base.folder).source
    return Rowless(beyond, rows, source, only_padding, has_own=bool(own))


def _stated_rows(config: Mapping[str, Any]) -> int:
    """The vocabulary that the configuration tells, else 0. An embedding with fewer rows is one of something else than tokens."""
    text = config.get("text_config")
    stated = [place.get("vocab_size") for place in (config, text) if isinstance(place, Mapping)]
    return max((size for size in stated if isinstance(size, int)), default=0)


def embedding_rows(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The rows of the largest input embedding among tensors of these names and shapes; None where there is none."""
    found = [shape[0] for name, shape in shapes.items() if len(shape) == 2 and _is_embedding(name)]
    return max(found, default=None)


def _is_embedding(name: str) -> bool:
    return name.endswith(".weight") and name.removesuffix(".weight").rpartition(".")[2] in _EMBEDDINGS


def _beyond(files: Mapping[str, Path], together: Mapping[str, Path], rows: int) -> dict[int, str]:
    """The tokens with an id of ``rows`` or more in ``files``, which lie in a folder with the files ``together``."""
    found: dict[int, str] = {}
    for name, path in files.items():
        if name in ("vocab.json", "vocab.txt") and "tokenizer.json" in together:
            continue  # that one counts
        if name in _READERS:
            found |= _tokens_from(path, rows, path.stat().st_mtime_ns)
    return found


@lru_cache(maxsize=8)
def _tokens_from(path: Path, rows: int, changed: int) -> dict[int, str]:
    """Kept, because a merge asks twice, and a large vocabulary takes most of a second."""
    return {number: token for number, token in _READERS[path.name](path) if number >= rows}


def _tokenizer_json(path: Path) -> Iterator[tuple[int, str]]:
    content = read_json(path, "a tokenizer")
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from _of_mapping(vocabulary)
    elif isinstance(vocabulary, list):  # Unigram: pairs of piece and score
        yield from ((number, str(piece[0])) for number, piece in enumerate(vocabulary) if isinstance(piece, list) and piece)
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            yield token["id"], str(token.get("content"))


def _tokenizer_config(path: Path) -> Iterator[tuple[int, str]]:
    added = read_json(path, "a tokenizer's configuration").get("added_tokens_decoder")
    for number, token in added.items() if isinstance(added, dict) else ():
        if number.isdecimal():
            try:
                place = int(number)
            except ValueError as error:  # Python's limit of digits
                raise MergeError(
                    f"{path}: added_tokens_decoder has an id of {len(number)} digits; expected a token id"
                ) from error
            yield place, _text(token)


def _mapping(path: Path) -> Iterator[tuple[int, str]]:
    yield from _of_mapping(read_json(path, "a vocabulary"))


def _of_mapping(vocabulary: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    yield from ((number, token) for token, number in vocabulary.items() if isinstance(number, int))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from ((number, line.rstrip("\n")) for number, line in enumerate(lines))


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[int, str]]]] = {
    "tokenizer.json": _tokenizer_json,
    TOKENIZER_CONFIG: _tokenizer_config,
    "added_tokens.json": _mapping,
    "vocab.json": _mapping,
    "vocab.txt": _lines,
}


def _padding(files: Mapping[str, Path]) -> set[str]:
    """The padding token, by either file that tells it: early transformers 4 put an added one into the second alone."""
    found = (read_json(files[name], "a tokenizer's configuration") for name in _SPECIAL_TOKENS if name in files)
    return {_text(content["pad_token"]) for content in found if content.get("pad_token") is not None}


def _text(token: Any) -> str:
    """A token in a configuration: its text, or an object around it."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)
