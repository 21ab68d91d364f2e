"""Finds a base tensor by the name that another version or class of the same model gives it.

transformers has renamed the parts of vision-language models (``language_model.model.`` became ``model.language_model.``),
saves some checkpoints without the prefix of the headless model, and trains text-only classes on full checkpoints. A merge
keeps the base's own names; the adapter's are brought to one neutral form, and so are the base's. An exact match comes first,
and a neutral form that two tensors share is no match. What that does not explain, the class may (:mod:`.renames`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_merge.merging.renames import ClassNames

# What can stand in front of the decoder's own names ("layers.0...", "embed_tokens"), longest first.
_DECODER_PREFIXES = (
    "model.language_model.model.",
    "language_model.model.",
    "model.language_model.",
    "model.text_model.",
    "language_model.",
    "text_model.",
    "transformer.",
    "model.",
)
# A vision tower's inner model lost its own name on the way to transformers 5.
_INNER = re.compile(r"(?<=\.)vision_model\.")
# Towers beside the decoder, whose names are kept in the neutral form.
_TOWER = re.compile(r"(model\.)?((vision|image|audio|speech|video|visual|vpm|apm)(_(tower|model|encoder))?(\.vision_model)?)\.")
# Parts of layers that only changed their name.
_RENAMED = ((re.compile(r"(?<=\.)block_sparse_moe\."), "mlp."),)


def neutral(name: str) -> str:
    """``name`` without what differs between versions and classes of one architecture."""
    for prefix in _DECODER_PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    name = _INNER.sub("", name)
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


@dataclass(frozen=True)
class NameMap:
    """The names of a base's tensors, to be found by other names of theirs.

    Attributes:
        classes: what the base's class calls them, asked for names that explain themselves in no other way.
    """

    names: frozenset[str]
    by_neutral: Mapping[str, tuple[str, ...]]
    classes: ClassNames | None = None

    @classmethod
    def of(cls, names: Iterable[str], classes: ClassNames | None = None) -> NameMap:
        by_neutral: dict[str, tuple[str, ...]] = {}
        for name in names:
            key = neutral(name)
            by_neutral[key] = (*by_neutral.get(key, ()), name)
        return cls(frozenset(name for group in by_neutral.values() for name in group), by_neutral, classes)

    def find(self, name: str, tower: str | None = None) -> str | None:
        """The base's name of the tensor called ``name`` elsewhere; None where there is none, or more than one.

        ``tower``: where the base keeps the tower that the name is of, if that was a model of its own elsewhere.
        """
        found = self.find_alone(name)
        if found is None and tower is not None:
            found = self.find_alone(f"{tower}.{name}")
        if found is not None or self.classes is None:
            return found
        known = self.classes.of(name)
        meant = self._by_class.get(known, ()) if known is not None else ()
        return meant[0] if len(meant) == 1 else None

    def find_alone(self, name: str) -> str | None:
        """The same from names alone, without asking the class."""
        if name in self.names:
            return name
        found = self._meant(name)
        return found[0] if len(found) == 1 else None

    def _meant(self, name: str) -> tuple[str, ...]:
        """The tensors that ``name`` can mean: of one neutral form and, where it begins with no decoder's prefix itself, of any
        other tower: a model of one tower alone is trained under such names."""
        key = neutral(name)
        found = self.by_neutral.get(key, ())
        return found if key != name else (*found, *(other for other in self._by_rest.get(name, ()) if other not in found))

    @cached_property
    def _by_rest(self) -> Mapping[str, tuple[str, ...]]:
        """The names of towers' tensors by what follows the tower's own name."""
        by_rest: dict[str, tuple[str, ...]] = {}
        for name in self.names:
            if match := _TOWER.match(name):
                rest = name[match.end() :]
                by_rest[rest] = (*by_rest.get(rest, ()), name)
        return by_rest

    def nearest(self, name: str) -> str:
        """A hint for an error: which of the base's names comes closest."""
        shared = self._meant(name)
        if len(shared) > 1:
            return f"it could be {shared[0]} or {shared[1]}"
        near = difflib.get_close_matches(name, sorted(self.names), n=1)
        return f"the nearest name is {near[0]}" if near else "no name of the base resembles it"

    @cached_property
    def _by_class(self) -> Mapping[str, tuple[str, ...]]:
        return self.classes.of_all(self.names) if self.classes is not None else {}
