"""``merge_manifest.json``: what was merged, how, and the digests that prove it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lora_merge
from lora_merge.merging.digests import is_digest, root_digest
from lora_merge.merging.errors import MergeError
from lora_merge.merging.factors import PACKINGS, PEFT_PACKING
from lora_merge.merging.folders import ModelFolder, read_json
from lora_merge.merging.plan import METHODS
from lora_merge.merging.quantization import QuantRecipe
from lora_merge.merging.side_files import MANIFEST_FILE
from lora_merge.readable import json_text, readable

FORMAT = "lora-merge/manifest"
VERSION = 1


@dataclass(frozen=True)
class Artifact:
    """A folder that took part: how it was named and what it held.

    Attributes:
        source: what the user gave: a path or a hub id.
        commit: the hub commit, or None for a folder.
        path: the absolute folder where it lay, or None for a hub id.
        files: file name -> hexadecimal SHA-256.
        identity: of an adapter, what it stays known by when it is only saved again
            (:func:`~lora_merge.merging.digests.adapter_identity`); None for a base, and in a manifest from before there was one.
    """

    source: str
    commit: str | None
    path: str | None
    files: Mapping[str, str]
    identity: str | None = None

    @property
    def root(self) -> str:
        """The root digest over ``files``."""
        return root_digest(self.files)

    @property
    def location(self) -> tuple[str, str | None]:
        """What to give as base or adapter to find it again, and its revision."""
        return (self.path or self.source, self.commit if self.path is None else None)

    @classmethod
    def of(cls, folder: ModelFolder, files: Mapping[str, str], identity: str | None = None) -> Artifact:
        path = None if folder.commit else str(folder.path.resolve())
        return cls(folder.source, folder.commit, path, dict(files), identity)

    def to_json(self) -> dict[str, Any]:
        files = {name: self.files[name] for name in sorted(self.files)}
        found = {"source": self.source, "commit": self.commit, "path": self.path, "files": files, "root": self.root}
        return found if self.identity is None else {**found, "identity": self.identity}

    @classmethod
    def from_json(cls, value: Any, where: str) -> Artifact:
        if not isinstance(value, dict) or set(value) - {"identity"} != {"source", "commit", "path", "files", "root"}:
            raise MergeError(f"{where}: expected source, commit, path, files and root")
        files, identity = value["files"], value.get("identity")
        named = isinstance(value["source"], str) and all(isinstance(value[name], str | None) for name in ("commit", "path"))
        if not named:
            raise MergeError(f"{where}: source, commit and path must be text, or null where there is no commit or path")
        if not isinstance(files, dict) or not all(map(is_digest, files.values())):
            raise MergeError(f"{where}: files must map names to hexadecimal SHA-256 digests")
        if identity is not None and not is_digest(identity):
            raise MergeError(f"{where}: identity must be a hexadecimal SHA-256 digest")
        artifact = cls(value["source"], value["commit"], value["path"], files, identity)
        if artifact.root != value["root"]:
            raise MergeError(f"{where}: root {value['root']} is not the root of its files; the manifest was edited")
        return artifact


@dataclass(frozen=True)
class MergeManifest:
    """The record of one merge; ``output.files`` lists every file of the folder but the manifest itself.

    Attributes:
        adapter: the first adapter, and the only one unless ``more_adapters`` has others.
        weights: the factor of each adapter's deltas.
        base_is_residual: the user's word that the base is the residual one which the adapter was trained with.
        packing: how lora_B of fused experts was read; see :data:`~lora_merge.merging.factors.PACKINGS`.
    """

    method: str
    base: Artifact
    adapter: Artifact
    recipe: QuantRecipe | None
    dtype: str | None
    output: Mapping[str, str]
    environment: Mapping[str, str]
    more_adapters: tuple[Artifact, ...] = ()
    weights: tuple[float, ...] = (1.0,)
    base_is_residual: bool = False
    packing: str = PEFT_PACKING

    @property
    def adapters(self) -> tuple[Artifact, ...]:
        """Every adapter, in the order of ``weights``."""
        return (self.adapter, *self.more_adapters)

    def to_json(self) -> dict[str, Any]:
        """The manifest as it is written."""
        output = readable(self.output)
        return {
            "format": FORMAT,
            "version": VERSION,
            "tool": f"lora-merge {lora_merge.__version__}",
            "method": self.method,
            "base": self.base.to_json(),
            "adapter": self.adapter.to_json(),
            "more_adapters": [adapter.to_json() for adapter in self.more_adapters],
            "weights": list(self.weights),
            "base_is_residual": self.base_is_residual,
            "expert_packing": self.packing,
            "recipe": self.recipe.to_json() if self.recipe else None,
            "dtype": self.dtype,
            "output": {"files": {name: output[name] for name in sorted(output)}, "root": root_digest(output)},
            "environment": dict(self.environment),
        }

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        return (json_text(self.to_json(), indent=2, ensure_ascii=False) + "\n").encode()


def read_manifest(folder: str | Path) -> MergeManifest:
    """Read the manifest of a merged checkpoint.

    Raises:
        MergeError: there is none, or it is not one that this version understands.
    """
    path = Path(folder) / MANIFEST_FILE
    value = read_json(path, "a merge manifest (is this a checkpoint that lora-merge wrote?)")
    if value.get("format") != FORMAT or value.get("version") != VERSION:
        raise MergeError(
            f"{path}: format {value.get('format')!r} version {value.get('version')!r}; expected {FORMAT!r} version {VERSION}"
        )
    if value.get("method") not in METHODS:
        raise MergeError(f"{path}: method {value.get('method')!r}; expected one of {', '.join(METHODS)}")
    output = value.get("output")
    files = output.get("files") if isinstance(output, dict) else None
    if not isinstance(files, dict) or not all(map(is_digest, files.values())):
        raise MergeError(f"{path}: output: files must map names to hexadecimal SHA-256 digests")
    if not isinstance(output, dict) or output.get("root") != root_digest(files):
        raise MergeError(f"{path}: the output's root is not the root of its files; the manifest was edited")
    _check_settings(value, path)
    recipe = value.get("recipe")
    return MergeManifest(
        value["method"],
        Artifact.from_json(value.get("base"), f"{path}: base"),
        Artifact.from_json(value.get("adapter"), f"{path}: adapter"),
        _recipe(recipe, path) if recipe is not None else None,
        value.get("dtype"),
        files,
        value.get("environment") or {},
        tuple(Artifact.from_json(adapter, f"{path}: more_adapters") for adapter in value.get("more_adapters") or ()),
        tuple(float(weight) for weight in value.get("weights") or (1.0,)),
        bool(value.get("base_is_residual", False)),
        value.get("expert_packing") or PEFT_PACKING,
    )


def _recipe(value: Any, path: Path) -> QuantRecipe:
    try:
        return QuantRecipe.from_json(value)
    except MergeError as error:
        raise MergeError(f"{path}: {error}") from error


def _check_settings(value: Mapping[str, Any], path: Path) -> None:
    """Raise where one of the plain settings is not what :meth:`MergeManifest.to_json` writes; null is as left out."""
    kinds: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "weights": ("a list of finite numbers", lambda weights: isinstance(weights, list) and all(map(_is_finite, weights))),
        "more_adapters": ("a list", lambda adapters: isinstance(adapters, list)),
        "environment": ("an object", lambda versions: isinstance(versions, dict)),
        "dtype": ("text", lambda dtype: isinstance(dtype, str)),
        "base_is_residual": ("true or false", lambda residual: isinstance(residual, bool)),
        "expert_packing": (f"one of {', '.join(PACKINGS)}", lambda packing: isinstance(packing, str) and packing in PACKINGS),
    }
    for name, (expected, is_right) in kinds.items():
        if value.get(name) is not None and not is_right(value[name]):
            raise MergeError(f"{path}: {name} {value[name]!r}; expected {expected}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def environment() -> dict[str, str]:
    """Versions of the libraries that a merge's result can depend on, where installed."""
    found = {}
    for name in ("bitsandbytes", "numba", "numpy", "safetensors", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
