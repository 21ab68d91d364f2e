"""Notices what an adapter's configuration names and its file does not hold: a save that lost part of the training.

The configuration names ends of paths, or a regular expression. Applied to the base as a whole that says little, since a base
can hold more than the class that was trained (a vision tower). Applied to the siblings of a module that the adapter does have,
the same place in another layer, it says exactly which must be there.

A base can also hold layers that its own class leaves alone (multi-token prediction, layers that share keys and values with
earlier ones), and PEFT names heads that only other classes have. So the class has the last word, where something is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from lora_merge.merging.adapter import Adapter, is_saved_module
from lora_merge.merging.architecture import Architecture
from lora_merge.merging.errors import MergeError
from lora_merge.merging.experts import is_expert_layer, layer_names, targeted_parameters
from lora_merge.merging.names import neutral
from lora_merge.merging.safetensors_file import TensorInfo

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def check_complete(adapter: Adapter, tensors: Mapping[str, TensorInfo], architecture: Architecture) -> None:
    """Raise :class:`MergeError` where a module of the base's class that the configuration names has nothing in the adapter.

    Args:
        tensors: the base's, by name.
    """
    saved = adapter.settings.names("modules_to_save")
    _check_saved_modules(adapter, saved, architecture)
    replaced = {f"{piece.module}.{piece.parameter}" for piece in adapter.replacements if is_saved_module(piece.module, saved)}
    lost = _missing_siblings(
        replaced, _with_class_names(replaced, tensors, architecture), lambda name: is_saved_module(name.rpartition(".")[0], saved)
    )
    _check_unused(lost, "modules_to_save", adapter, architecture)

    targets, excluded = adapter.config.get("target_modules"), adapter.config.get("exclude_modules")
    chosen = adapter.config.get("layers_to_transform") is not None
    if targets and not chosen and isinstance(targets, str | list):
        updated = {f"{pair.module}.weight" for pair in adapter.pairs}
        layers = [layer for name, tensor in tensors.items() for layer in layer_names(name, tensor.shape)]
        names = _with_class_names(updated, [*tensors, *layers], architecture)
        lost = _missing_siblings(updated, names, lambda name: _targeted(targets, name.rpartition(".")[0], excluded))
        _check_unused(lost, "target_modules", adapter, architecture)

    if parameters := targeted_parameters(adapter, architecture):
        updated = {f"{module}.{parameter}" for module, parameter in parameters.values()}
        every = [name for name, _ in architecture.model.named_parameters(remove_duplicate=False)]
        lost = _missing_siblings(updated, every, lambda name: _targeted(list(adapter.settings.names("target_parameters")), name))
        _check_unused(lost, "target_parameters", adapter, architecture)


def _check_saved_modules(adapter: Adapter, names: tuple[str, ...], architecture: Architecture) -> None:
    """Each name of ``modules_to_save`` has a tensor, or no module of the class is called so.

    For classifiers PEFT names the heads of all architectures, ``classifier`` and ``score``, of which a model has at most one.
    A file without any of the names is whole only where the base's class is a classifier itself, whose head has another name:
    a language model got its head in training.
    """
    modules = {piece.module for piece in adapter.replacements}
    missing = [name for name in names if not any(is_saved_module(module, (name,)) for module in modules)]
    for name in missing:
        if _has_module(architecture, name) or (len(missing) == len(names) and not _is_classifier(adapter, architecture)):
            raise MergeError(
                f"{adapter.settings.where}: modules_to_save names {name!r}, but the adapter holds no tensor of it; it is "
                "incomplete"
            )


def _is_classifier(adapter: Adapter, architecture: Architecture) -> bool:
    """Whether the base's class is one for the task that the adapter names."""
    return adapter.task_class is not None and type(architecture.model).__name__.endswith(adapter.task_class)


def _has_module(architecture: Architecture, ending: str) -> bool:
    """Whether the class has a module with tensors whose path ends so, which is how PEFT looks for it."""
    modules = architecture.model.named_modules(remove_duplicate=False)
    return any(path.endswith(ending) and module.state_dict() for path, module in modules)


def _with_class_names(held: Iterable[str], names: Iterable[str], architecture: Architecture) -> list[str]:
    """The base's ``names``, and those of its class where they alone do not explain all that is ``held``."""
    names = list(names)
    plain = {neutral(name) for name in names}
    if all(neutral(name) in plain for name in held):
        return names
    try:
        return [*names, *architecture.model.state_dict()]
    except MergeError:
        # What a class that cannot be built calls its tensors nobody knows; what names explain is still looked at.
        return names


def _missing_siblings(held: Iterable[str], names: Iterable[str], wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """The tensors that are not ``held`` though the same tensor of another layer is: with that one, as the adapter calls them.

    Args:
        held: the names of the tensors that the adapter changes.
        names: those of the base.
        wanted: whether the configuration names a tensor.
    """
    have = {neutral(name) for name in held}
    templates = {_NUMBER.sub("*", neutral(name)): name for name in held}
    for name in names:
        plain = neutral(name)
        sibling = templates.get(_NUMBER.sub("*", plain))
        if sibling is None or plain in have:
            continue
        numbers = iter(_NUMBER.findall(plain))
        lost = _NUMBER.sub(lambda _: next(numbers), sibling)  # noqa: B023
        if wanted(lost):
            yield lost, sibling


def _check_unused(lost: Iterable[tuple[str, str]], setting: str, adapter: Adapter, architecture: Architecture) -> None:
    """Raise unless the class has none of the ``lost`` modules, though it has their siblings.

    A class without the sibling calls them otherwise and tells nothing.
    """
    for name, sibling in lost:
        message = (
            f"{adapter.folder.path / adapter.weights_file}: holds nothing for {name!r}, which {setting} of "
            f"{adapter.settings.where} names; the adapter is incomplete"
        )
        try:
            module, known = (architecture.module(_module(path)) for path in (name, sibling))
        except MergeError as error:
            raise MergeError(
                f"{message}, unless the model leaves that module alone, which its class does not say: {error}"
            ) from error
        if module is not None or known is None:
            raise MergeError(f"{message}: train or save it again")


def _module(name: str) -> str:
    """The module of the tensor ``name``; of one expert's layer the block of experts, which is one module in transformers 5."""
    module = name.rpartition(".")[0]
    return module.rpartition(".experts.")[0] + ".experts" if is_expert_layer(module) else module


def _targeted(targets: str | list[str] | None, path: str, excluded: str | list[str] | None = None) -> bool:
    """Whether PEFT would adapt ``path``: a regular expression matches all of it, a name its end."""
    if not targets or _targeted(excluded, path):
        return False
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, path) is not None
        except re.error:
            return False
    return any(path == target or path.endswith(f".{target}") for target in targets)
