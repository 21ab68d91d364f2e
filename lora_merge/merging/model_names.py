"""Do two names mean one base? Hub ids, snapshot folders of the hub's cache and plain folders, compared as far as names can be."""

from __future__ import annotations

import re

_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SEPARATOR = re.compile(r"[\\/]+")
_QUANTIZED = re.compile(r"(-unsloth)?-bnb-4bit$")
"""What Unsloth's uploads in 4 bit have behind the name of the model that they quantize."""
_ANYBODYS = re.compile(
    r"(base|pretrained|original|init|orig|raw|hf|bf16|fp16|main|latest|best|last|final|new|old|tmp|temp|out|output|outputs|result|"
    r"results|save|saved|export|exported|merged|merge|sft|cpt|dpo|llm|lm|weights|ckpts?|checkpoints?|models?)"
    r"([-_]?(base|model|ckpt|checkpoint|weights|hf|final|merged))?|((ckpt|checkpoint|model|step|epoch|run|v)?[-_]?\d+)"
)
"""Names that training scripts and people give to any folder of weights."""


def model_name(source: str) -> str:
    """The last part of a hub id, of a folder, or of the hub id in a snapshot folder of the hub's cache; lower case."""
    found = _SNAPSHOT.search(source)
    name = found["name"] if found else _SEPARATOR.split(source.rstrip("\\/"))[-1]
    return name.lower().replace("___", ".")  # ModelScope's cache writes its dots so


def same_model(first: str, second: str) -> bool:
    """Whether the names can be of one model: equal, or alike in :func:`model_name`; one may be of its quantized upload."""
    return first == second or _QUANTIZED.sub("", model_name(first)) == _QUANTIZED.sub("", model_name(second))


def says_little(source: str) -> bool:
    """Whether the name is one that anybody gives to a folder of weights, such as ``base`` or ``checkpoint-500``."""
    return _SNAPSHOT.search(source) is None and _ANYBODYS.fullmatch(model_name(source)) is not None


def commit_of(source: str, revision: str | None) -> str | None:
    """The commit that ``source`` at ``revision`` is known to be, or None: a branch can have moved."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    found = _SNAPSHOT.search(source)
    return found["commit"] if found else None
