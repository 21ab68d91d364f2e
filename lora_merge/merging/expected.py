"""Checks that the base's class, under the configuration that is written, expects the tensors that are written.

Only an output that stops tying weights, or whose vocabulary was resized, can differ from the base there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_merge.merging.adapter import Adapter
from lora_merge.merging.errors import MergeError
from lora_merge.merging.side_files import TIE_FLAG
from lora_merge.merging.tying import Ties
from lora_merge.merging.updates import ReplaceRows

if TYPE_CHECKING:
    from lora_merge.merging.placement import Change

_WITH_HEAD = ("CAUSAL_LM", "SEQ_2_SEQ_LM")


def check_head(ties: Ties, adapters: Sequence[Adapter], changes: Mapping[str, Change]) -> None:
    """Raise where the base was saved without a head that training tied to its embedding, and the embedding changes alone.

    The class that was trained would load the output and tie its head to the new embedding.
    """
    if not ties.concern(changes) or ties.architecture.head is not None:
        return
    change, model = changes.get(ties.embedding or ""), ties.architecture.model
    # Of a model of text and pictures either part can tell; a class that no head belongs to, such as CLIP's, has no such setting.
    configs = (model.config, getattr(model.config, "text_config", None))
    if change is None or not (_is_moved(change) and any(getattr(config, TIE_FLAG, False) for config in configs)):
        return
    modules = {name for name, _ in model.named_modules()}
    for adapter in adapters:
        task = adapter.config.get("task_type")
        if task in _WITH_HEAD or (task is None and any(pair.module not in modules for pair in adapter.pairs)):
            raise MergeError(
                f"base {ties.base.folder.source}: is saved as {type(model).__name__}, without the output head that is tied to "
                f"its embedding, which {adapter.folder.source} changes without the head; save the base with the class that was "
                "trained and merge into that"
            )


def _is_moved(change: Change) -> bool:
    """Whether a tensor becomes another than what is tied to it: rows and a resize are shared."""
    if change.replacement is not None and change.replacement.trained:
        return True
    return not all(isinstance(operation, ReplaceRows) for operation in change.operations)


def new_vocabulary(resized: Mapping[str, int]) -> int | None:
    """The new size of the vocabulary, where it was ``resized``: tensor -> its rows."""
    if len(set(resized.values())) > 1:
        raise _not_everywhere(resized)
    return next(iter(resized.values()), None)


def check_expected(
    ties: Ties, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], resized: Mapping[str, int], *, untied: bool
) -> None:
    """Raise :class:`MergeError` unless a model of the written ``config`` has room for the tensors.

    Args:
        shapes: of every tensor of the output.
        resized: tensors whose number of rows is not the base's.
        untied: whether nothing may be tied any more.
    """
    before, after = ties.architecture.model, ties.architecture.model_under(config)
    if untied and (after.all_tied_weights_keys or ties.architecture.computes_with(TIE_FLAG)):
        reason = "ties them whatever it says" if after.all_tied_weights_keys else "computes otherwise under false"
        target, source = next(iter(ties.architecture.ties.items()))
        raise MergeError(
            f"base {ties.base.folder.source}: the adapter changes one of {source}, {target} and not all that are tied to it, "
            f"so that {TIE_FLAG} had to become false, but {type(before).__name__} {reason}: train the adapter "
            "without these modules; trained rows of the input embedding (trainable_token_indices) stay tied and can be merged"
        )
    wanted = {name: tuple(tensor.shape) for name, tensor in after.state_dict().items()}
    follows = {
        ties.name(name): wanted[name] for name, tensor in before.state_dict().items() if tuple(tensor.shape) != wanted.get(name)
    }
    if resized and not resized.keys() <= follows.keys():
        raise _not_everywhere(resized)
    for name, shape in follows.items():
        group = ties.group_of(name)
        # Of tied tensors that stay tied one may stand for all.
        found = next((shapes[other] for other in (name, *(group.names if group else ())) if other in shapes), None)
        if found is not None and found != shape:
            raise _not_everywhere({**resized, name: found[0] if found[0] != shape[0] else list(found)})


def _not_everywhere(sizes: Mapping[str, object]) -> MergeError:
    found = ", ".join(f"{name} {size}" for name, size in sorted(sizes.items()))
    return MergeError(
        f"the vocabulary was resized, but not everywhere: {found}; save the adapter with save_embedding_layers=True"
    )
