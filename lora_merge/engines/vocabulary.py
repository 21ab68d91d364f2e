"""A vocabulary that an adapter was trained with in another size than the base's.

Tokens are added before training (``resize_token_embeddings``), and PEFT then stores embedding and head in full beside the
low-rank halves. It loads them only into a base that has their size, so the base gets it first, as in training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_merge.engines.errors import EngineError

# What PEFT's versions put into names around a layer, and name parts that classes and versions insert and drop.
_WRAPPED = re.compile(r"\.(?:modules_to_save|base_layer|token_adapter)(?:\.default)?(?=\.)")
_MOVING = re.compile(r"\b(?:base_model|language_model|model)\.")


@dataclass(frozen=True)
class Table:
    """The embedding or the head of a model: one row a token.

    Attributes:
        name: of the module in the model.
        weight: (tokens, hidden), of the type and on the device that the model has it.
        stored: the names under which an adapter's file has its values, those of before training left out.
    """

    name: str
    weight: Tensor
    stored: tuple[str, ...]


def tables(model: Any, stored: Mapping[str, object]) -> list[Table]:
    """Embedding and, where there is one, head of a Transformers ``model`` without an adapter; tied ones have one ``weight``.

    ``stored``: the tensors of an adapter's file by name.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for module in _modules(model):
        name = names[id(module)]
        wanted = f"{_MOVING.sub('', f'{name}.')}weight"
        keys = tuple(key for key in sorted(stored) if _MOVING.sub("", _WRAPPED.sub("", key)) == wanted)
        found.append(Table(name, module.weight, keys))
    return found


def fit_vocabulary(model: Any, shapes: Mapping[str, tuple[int, ...]], adapter: str | Path) -> None:
    """Give ``model``, before ``adapter`` is put on top, the vocabulary of the embedding and head that the adapter stores.

    ``shapes``: of the tensors in the adapter's file.

    Raises:
        EngineError: the sizes stored contradict each other; one of embedding and head is stored in another size than the base's
            and the other is not stored, so that its rows are lost; or the head is in 4 bit.
    """
    found = tables(model, shapes)
    sizes = {shapes[name][0] for table in found for name in table.stored}
    if all(shapes[name][0] == len(table.weight) for table in found for name in table.stored):
        return
    if len(sizes) > 1:
        raise EngineError(
            f"adapter {adapter}: stores vocabularies of {' and '.join(map(str, sorted(sizes)))} tokens; expected one"
        )
    (size,) = sizes
    for table in found:
        if not any(other.stored for other in found if other.weight is table.weight):
            raise EngineError(
                f"adapter {adapter}: was trained with a vocabulary of {size} tokens, the base has {len(table.weight)}, and the "
                f"{table.name} of that training is not stored; save the adapter with save_embedding_layers=True"
            )
    resize_vocabulary(model, size)


def resize_vocabulary(model: Any, size: int) -> None:
    """Give embedding and head of ``model`` ``size`` rows; tied ones stay tied.

    New rows are the mean of the others. In training there is noise on top, which would make what the bare model says of a new
    token differ from run to run.

    Raises:
        EngineError: the head is quantized, so that it has no rows to add to.
    """
    found = tables(model, {})
    quantized = next((table.name for table in found if not table.weight.is_floating_point()), None)
    if quantized is not None:
        raise EngineError(f"{quantized} is quantized, so that its vocabulary cannot become one of {size} tokens")
    known = len(found[0].weight)
    model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        for module in _modules(model):
            for values in module.parameters(recurse=False):
                values[known:] = values[:known].float().mean(dim=0).to(values.dtype)


def check_vocabulary(model: Any, found: Sequence[Table], stored: Mapping[str, Tensor], adapter: str | Path) -> None:
    """What ``adapter`` stores of the vocabulary must be what ``model``, the one inside the adapted one, calculates with.

    ``found``: :func:`tables` of the model before the adapter was put on top; ``stored``: their tensors in the file.

    Raises:
        EngineError: PEFT found no place for one and left it out, which it does without a word.
    """
    for table, module in zip(found, _modules(model), strict=True):
        live = _inside(module).weight
        for name in table.stored:
            if live.shape != stored[name].shape or not torch.equal(live, stored[name].to(live.device, live.dtype)):
                raise EngineError(f"adapter {adapter}: {name} has no place in the model; is this the base it was trained on?")


def _modules(model: Any) -> list[Any]:
    """Embedding and head; a class may have no head, or one that is no single table."""
    found = (model.get_input_embeddings(), model.get_output_embeddings())
    return [module for module in found if isinstance(getattr(module, "weight", None), Tensor)]


def _inside(module: nn.Module) -> Any:
    """The layer that calculates, inside PEFT's wrappers of whole modules, token rows and low-rank updates."""
    while True:
        inner = {
            name: child for name, child in module.named_children() if name in ("modules_to_save", "token_adapter", "base_layer")
        }
        if not inner:
            return module
        ((name, child),) = inner.items()
        module = next(iter(child.children())) if name == "modules_to_save" else child
