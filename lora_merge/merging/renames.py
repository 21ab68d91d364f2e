"""What the base's class calls a tensor that a file, of the base or of an adapter, calls otherwise: by transformers' own rules.

transformers renames the parts of its models from one version to the next, keeps the old names in files, and puts the name of
the headless model in front of its parts or leaves it out. The rules by which it loads such files are asked, not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lora_merge.merging.architecture import Architecture
from lora_merge.merging.errors import MergeError


@dataclass(frozen=True)
class ClassNames:
    """The names that the base's class has. It is built on the first question."""

    architecture: Architecture

    def of(self, name: str) -> str | None:
        """The class's name of the tensor that a file calls ``name``.

        None where the class has none, cannot be built (then names explain nothing, and the one that was not found is the error
        to tell), or loads the tensor by more than another name: then its values in a file are others than those in the model.
        """
        if self._rules is None:
            return None
        from transformers.core_model_loading import rename_source_key

        model, renamings, converters, known = self._rules
        if name in known:
            return name  # a rule for older names can fit it as well, and make another of it
        found, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        return found if converted is None and found in known else None

    def of_all(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """The class's name -> those of ``names`` that mean it."""
        found: dict[str, tuple[str, ...]] = {}
        # In order, as transformers reads a file: some of its rules wait for a first tensor.
        for name in sorted(names):
            if (known := self.of(name)) is not None:
                found[known] = (*found.get(known, ()), name)
        return found

    @cached_property
    def _rules(self) -> tuple[Any, list[Any], list[Any], Mapping[str, Any]] | None:
        """The model, its rules of renaming, those that change values, and its tensors by name."""
        try:
            model = self.architecture.model
        except MergeError:
            return None
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        return (
            model,
            [rule for rule in rules if isinstance(rule, WeightRenaming)],
            [rule for rule in rules if isinstance(rule, WeightConverter)],
            model.state_dict(),
        )
