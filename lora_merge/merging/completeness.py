"""Notices modules that an adapter's configuration targets and its file does not hold: a save that lost part of the training.

The configuration names ends of paths, or a regular expression. Applied to the base as a whole that says little, since a base
can hold more than the class that was trained (a vision tower). Applied to the siblings of a module that the adapter does have,
the same place in another layer, it says exactly which must be there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lora_merge.merging.adapter import Adapter
from lora_merge.merging.errors import MergeError
from lora_merge.merging.names import neutral
from lora_merge.merging.safetensors_file import TensorInfo

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def check_no_module_missing(adapter: Adapter, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise :class:`MergeError` where a targeted module of the base has no update though its siblings in other layers have."""
    config = adapter.config
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if not targets or config.get("layers_to_transform") is not None or not isinstance(targets, str | list):
        return
    have = {neutral(f"{pair.module}.weight") for pair in adapter.pairs}
    templates = {_NUMBER.sub("*", neutral(f"{pair.module}.weight")): pair.module for pair in adapter.pairs}
    for name in tensors:
        plain = neutral(name)
        sibling = templates.get(_NUMBER.sub("*", plain))
        if sibling is None or plain in have:
            continue
        numbers = iter(_NUMBER.findall(plain))
        trained = _NUMBER.sub(lambda _: next(numbers), f"{sibling}.").removesuffix(".")  # noqa: B023
        if _targeted(targets, trained) and not _targeted(excluded, trained):
            raise MergeError(
                f"{adapter.folder.path / adapter.weights_file}: holds no update of {trained!r}, which {adapter.settings.where} "
                "targets; the adapter is incomplete: train or save it again"
            )


def _targeted(targets: str | list[str] | None, module: str) -> bool:
    """Whether PEFT would adapt ``module``: a regular expression matches all of a path, a name its end."""
    if not targets:
        return False
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, module) is not None
        except re.error:
            return False
    return any(module == target or module.endswith(f".{target}") for target in targets)
