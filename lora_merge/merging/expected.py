"""Checks that the base's class, under the configuration that is written, expects the tensors that are written.

Only an output that stops tying weights, or whose vocabulary was resized, can differ from the base there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_merge.merging.errors import MergeError
from lora_merge.merging.side_files import TIE_FLAG
from lora_merge.merging.tying import Ties


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
