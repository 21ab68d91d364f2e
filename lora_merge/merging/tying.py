"""Tied embeddings: one tensor that is the input embedding and the output head, until an adapter changes only one of the two.

PEFT trains each side by itself (a LoRA on the embedding leaves the head as it was), unless it says that it keeps them tied.
Its own merge adds the update to the shared tensor, and so to both. Here the two become two tensors as soon as they stop being
equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.errors import MergeError
from lora_merge.merging.factors import Factor
from lora_merge.merging.names import neutral
from lora_merge.merging.operations import AddLowRank, Operation
from lora_merge.merging.safetensors_file import TensorInfo, read_tensor
from lora_merge.merging.updates import ReplaceRows

if TYPE_CHECKING:
    from lora_merge.merging.placement import Change

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")


def is_vocabulary(name: str) -> bool:
    """Whether the tensor has a row for every token: an input embedding or an output head."""
    return neutral(name) in (*EMBEDDINGS, *HEADS)


@dataclass(frozen=True)
class Tie:
    """A base whose output head is its input embedding.

    Attributes:
        embedding: the base's tensor.
        head: the name of the head's tensor, if it had one of its own.
        head_stored: whether the base stores it all the same, as a copy.
    """

    embedding: str
    head: str
    head_stored: bool


def find_tie(base: Checkpoint) -> Tie | None:
    """How the base ties its head, or None where it does not.

    Raises:
        MergeError: the configuration ties the two, but the base stores them with different values.
    """
    tensors = base.tensors
    embeddings = [name for name in tensors if neutral(name) in EMBEDDINGS]
    heads = [name for name in tensors if neutral(name) in HEADS]
    if len(embeddings) != 1 or len(heads) > 1 or not _ties(base.config, base):
        return None
    if not heads:
        # The old names of vision-language models put the head beside the decoder inside language_model.
        inside = embeddings[0].startswith("language_model.model.")
        return Tie(embeddings[0], "language_model.lm_head.weight" if inside else "lm_head.weight", False)
    if not _same_bytes(tensors[embeddings[0]], tensors[heads[0]]):
        raise MergeError(
            f"base {base.folder.source}: config.json ties the head to the embedding, but {heads[0]} differs from "
            f"{embeddings[0]}; engines disagree about which counts; set tie_word_embeddings to what it was trained with"
        )
    return Tie(embeddings[0], heads[0], True)


def _ties(config: Mapping[str, Any], base: Checkpoint) -> bool:
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        if "tie_word_embeddings" in place:
            return bool(place["tie_word_embeddings"])
    # What the file leaves out is the class's default.
    import transformers

    try:
        found = transformers.AutoConfig.from_pretrained(base.folder.path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError):
        # A configuration that transformers does not know: a base without a head of its own can then only be tied.
        return True
    return bool(getattr(found.get_text_config(), "tie_word_embeddings", True))


def settle_tie(tie: Tie, changes: dict[str, Change], make: type[Change]) -> bool:
    """Complete the changes of both sides. Whether they stop being equal, so that both have to be written and untied.

    Args:
        changes: by name; gets or loses the head's.
        make: the class of a change.
    """
    embedding, head = changes.get(tie.embedding), changes.get(tie.head)
    if embedding is None and head is None:
        return False
    embedding = embedding or make()
    head = head or make()
    _share(embedding, head)
    if not any(isinstance(operation, ReplaceRows) for operation in head.operations):
        # PEFT ties the trained rows of a tied embedding to the head.
        head.operations += [operation for operation in embedding.operations if isinstance(operation, ReplaceRows)]
    apart = not _equal(embedding, head)
    changes[tie.embedding] = embedding
    if apart or tie.head_stored:
        changes[tie.head] = head
    else:
        changes.pop(tie.head, None)
    if not apart and tie.head_stored:
        changes[tie.head] = embedding
    return apart


def _share(embedding: Change, head: Change) -> None:
    """What is stored for safety is the shared tensor, and so belongs to both sides: a resized embedding under an adapter."""
    for one, other in ((embedding, head), (head, embedding)):
        if one.replacement is not None and not one.replacement.trained and other.replacement is None:
            other.replacement = one.replacement


def _equal(embedding: Change, head: Change) -> bool:
    first, second = embedding.replacement, head.replacement
    if (first is None) != (second is None):
        return False
    if first is not None and second is not None and not _same_bytes(first.tensor, second.tensor):
        return False
    return len(embedding.operations) == len(head.operations) and all(
        _same_operation(one, other) for one, other in zip(embedding.operations, head.operations, strict=True)
    )


def _same_operation(one: Operation, other: Operation) -> bool:
    if isinstance(one, AddLowRank) and isinstance(other, AddLowRank):
        left = _oriented(one)
        right = _oriented(other)
        return one.scaling == other.scaling and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
    return one == other


def _oriented(update: AddLowRank) -> tuple[Any, Any]:
    """The update's halves as they multiply into a stored (rows, columns) tensor."""
    a: Factor = update.a
    return (a.read().T, update.b.read().T) if update.transposed else (update.b.read(), a.read())


def _same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    if one == other:
        return True
    return one.shape == other.shape and one.dtype == other.dtype and bool(np.array_equal(read_tensor(one), read_tensor(other)))
