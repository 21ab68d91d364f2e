"""Where the reference comes from, and whether it is independent of the merge that it judges.

What the merge manifest says may be used to find base and adapter. It may not be the witness of how the adapter was trained: a
recipe that was wrong at merging would then be wrong on both sides, and cancel out.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_merge.merging.api import MergeOptions
from lora_merge.merging.architecture import Architecture
from lora_merge.merging.checkpoint import read_checkpoint
from lora_merge.merging.digests import adapter_digests, adapter_identity, file_digest
from lora_merge.merging.folders import ModelFolder, read_json, resolve_folder
from lora_merge.merging.manifest import MergeManifest, read_manifest
from lora_merge.merging.model_names import commit_of, model_name, same_model, says_little
from lora_merge.merging.modules import has_patterns, quantized_modules
from lora_merge.merging.names import neutral
from lora_merge.merging.quantization import RECIPE_FIELDS, WEIGHT_SETTINGS, QuantRecipe
from lora_merge.merging.recipes import resemblance
from lora_merge.merging.side_files import MANIFEST_FILE
from verification.checks import Check, Outcome
from verification.errors import Inconclusive
from verification.recipe_checks import given_finding, live_recipe, recipe_findings, recorded_recipe
from verification.reference_file import Reference

PASSED, WARNED, INCONCLUSIVE = Outcome.PASSED, Outcome.WARNED, Outcome.INCONCLUSIVE


_MARKERS = {"base": "config.json", "adapter": "adapter_config.json"}
"""The file by which a folder is known to be what it is taken for."""


@dataclass(frozen=True)
class SourceOptions:
    """What the user says about the reference; everything else is found.

    Attributes:
        base, adapter: folders or hub ids; None for those that the merge manifest names.
        revision: of a base on the hub.
        recipe: quantization settings given explicitly, by name.
        quant_config: a JSON file with the recipe.
        other_base_name: the base is the one the adapter was trained on, although the adapter names it differently.
    """

    base: str | None = None
    adapter: str | None = None
    revision: str | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    quant_config: str | os.PathLike[str] | None = None
    other_base_name: bool = False


@dataclass(frozen=True)
class Sources:
    """What the reference is made of.

    Attributes:
        manifest: of the merge; None for a checkpoint that another tool merged.
        base, adapter: where they lie; None where a recorded reference makes them needless and they cannot be found.
        recipe: how the base is quantized in the reference; None where neither a recorded reference nor anything else knows.
        recipe_origin: who says so, as in :class:`~verification.measurement.Conditions`.
        prequantized: whether the base is a bitsandbytes checkpoint itself, whose stored state is the recipe.
        findings: what was checked about all this.
    """

    manifest: MergeManifest | None
    base: ModelFolder | None
    adapter: ModelFolder | None
    recipe: QuantRecipe | None
    recipe_origin: str
    prequantized: bool
    findings: tuple[Check, ...]

    def bnb_config(self, trust_remote_code: bool = False) -> dict[str, Any] | None:
        """What loads the base as the reference has it; None for a base that is quantized already.

        A recipe that names the quantized modules has just these quantized, whatever transformers would leave out by itself.
        """
        if self.prequantized:
            return None
        if self.recipe is None:
            raise Inconclusive("the reference has no quantization recipe: nothing to load the base by")
        config, named = self.recipe.bnb_config(), self.recipe.quantized_modules
        if named is None or has_patterns(named) or self.base is None:
            return config
        architecture, wanted = Architecture(read_checkpoint(self.base), trust_remote_code), {neutral(name) for name in named}
        usual = {neutral(name) for name in quantized_modules(architecture, self.recipe.skip_modules)}
        if usual != wanted:
            left_out = [name for name in quantized_modules(architecture, ()) if neutral(name) not in wanted]
            config["llm_int8_skip_modules"] = [f"{re.escape(name)}$" for name in left_out]  # or gate would be gate_proj as well
        return config

    @property
    def live_dtype(self) -> str:
        """The type in which the base is loaded: the one it was quantized in, which its other weights had in training too."""
        return "bfloat16" if self.recipe is None else self.recipe.quant_dtype

    @property
    def base_is_residual(self) -> bool:
        """Whether the base is the residual one that the adapter was trained with, on the word of who merged."""
        return self.manifest is not None and self.manifest.base_is_residual

    def merge_options(self, *, dtype: str | None, trust_remote_code: bool) -> MergeOptions:
        """What merges base and adapter into the very function that the reference is, in ``dtype``."""
        recipe = {}
        if self.recipe is not None and not self.prequantized:
            settings = {name: getattr(self.recipe, name) for name in RECIPE_FIELDS}
            recipe = {name: value for name, value in settings.items() if value is not None}
        return MergeOptions(
            from_4bit=self.recipe is not None or self.prequantized,
            recipe=recipe,
            base_is_residual=self.base_is_residual,
            packing=self.manifest.packing if self.manifest is not None else MergeOptions().packing,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )


def find_sources(merged: Path, options: SourceOptions, reference: Reference | None, *, several_adapters: bool = False) -> Sources:
    """Find base, adapter and recipe, and check what can be checked of them before anything is loaded.

    ``reference``: a recorded one; None for a live one, which needs base and adapter. ``several_adapters``: whether the purpose
    allows for a merge of more than one; the sources name the first.

    Raises:
        Inconclusive: base or adapter of a live reference is not named anywhere.
        MergeError: one of them cannot be found or read.
    """
    manifest = read_manifest(merged) if (merged / MANIFEST_FILE).is_file() else None
    base = _folder("base", options.base, options.revision, manifest, needed=reference is None)
    adapter = _folder("adapter", options.adapter, None, manifest, needed=reference is None)
    base_config = read_json(base.path / "config.json", "the base's configuration") if base is not None else {}
    named_base = None if adapter is None else _adapter_config(adapter).get("base_model_name_or_path")
    settled = reference is not None or options.quant_config is not None or set(WEIGHT_SETTINGS) <= set(options.recipe)
    recorded = None if adapter is None else recorded_recipe(adapter.path, named_base, base_config, settled=settled)
    if reference is not None:
        recipe, origin = reference.recipe, reference.recipe_origin
    else:
        if not several_adapters:
            _expect_one_adapter(manifest)
        assert adapter is not None  # a live reference needs one
        recipe, origin = live_recipe(options.recipe, options.quant_config, base_config, adapter.path, named_base, manifest)
    given = () if reference is None else given_finding(options.recipe, options.quant_config, reference.recipe)
    findings = (
        *recipe_findings(recipe, origin, recorded, manifest),
        *given,
        *_base_findings(options, base, adapter, manifest, reference),
        *_adapter_findings(adapter, manifest, reference),
    )
    return Sources(manifest, base, adapter, recipe, origin, bool(base_config.get("quantization_config")), findings)


def _folder(
    role: str, given: str | None, revision: str | None, manifest: MergeManifest | None, *, needed: bool
) -> ModelFolder | None:
    """The folder of ``role``. One that is not needed and only named by the manifest may be absent."""
    if given is not None:
        return resolve_folder(given, role, revision)
    if manifest is None:
        if needed:
            raise Inconclusive(f"nothing says which {role} was merged: the checkpoint has no {MANIFEST_FILE}; give --{role}")
        return None
    location, commit = getattr(manifest, role).location
    if commit is None and not (Path(location) / _MARKERS[role]).is_file():
        if not needed:
            return None
        raise Inconclusive(
            f"{role} {location}: no {_MARKERS[role]} is there, where {MANIFEST_FILE} says that it was; give --{role} where it "
            "lies now"
        )
    return resolve_folder(location, role, commit)


def _expect_one_adapter(manifest: MergeManifest | None) -> None:
    if manifest is not None and (len(manifest.adapters) > 1 or manifest.weights != (1.0,)):
        weights = ", ".join(f"{weight:g}" for weight in manifest.weights)
        raise Inconclusive(
            f"merged from {len(manifest.adapters)} adapters with weights {weights}; a live reference knows one adapter with "
            "weight 1: record one with the adapters as they were, and give --reference"
        )


def _adapter_config(adapter: ModelFolder) -> dict[str, Any]:
    return read_json(adapter.path / "adapter_config.json", "the adapter's configuration")


def _base_findings(
    options: SourceOptions,
    base: ModelFolder | None,
    adapter: ModelFolder | None,
    manifest: MergeManifest | None,
    reference: Reference | None,
) -> Iterator[Check]:
    """The base that was merged must be the one that the adapter, and a recorded reference, were made with."""
    used = _named_base(base, manifest)
    if used is None:
        return
    source = used[0]
    alike = resemblance(adapter.path, read_checkpoint(base)) if base is not None and adapter is not None else None
    if alike is not None:
        found = f"the base {source} has {alike}"
        merged_into_it = manifest is not None and options.base in (None, manifest.base.source)
        way_out = "merge again into that" if merged_into_it else "give that as --base"
        advice = "" if alike.is_same else f": the adapter was trained on another; {way_out}"
        yield Check("base-weights", PASSED if alike.is_same else INCONCLUSIVE, f"{found}{advice}")
    known_again = alike is not None and alike.is_same
    named = None
    if adapter is not None:
        config = _adapter_config(adapter)
        named = config.get("base_model_name_or_path")
        yield _same_base("the adapter", named, config.get("revision"), used, options, known_again, recorded=reference is not None)
    if reference is not None:
        name = reference.model["name"]
        yield _same_base(
            "the reference", name, reference.model["revision"], used, options, known_again and name == named, recorded=True
        )
    if base is not None and manifest is not None:
        yield _same_files(base, manifest)


def _named_base(base: ModelFolder | None, manifest: MergeManifest | None) -> tuple[str, str | None] | None:
    if base is not None:
        path = str(base.path.resolve())
        source = base.source if model_name(base.source).strip(".") else path  # "." has no name of its own
        return source, base.commit or commit_of(path, None)
    return None if manifest is None else (manifest.base.source, manifest.base.commit)


def _same_base(
    who: str,
    name: Any,
    revision: Any,
    used: tuple[str, str | None],
    options: SourceOptions,
    known_again: bool,
    *,
    recorded: bool,
) -> Check:
    """Whether ``who`` means the base in ``used``, by name and commit.

    Args:
        known_again: whether its weights are known to be those that ``who`` means; then its name does not matter.
        recorded: whether the reference is recorded, and so shows what another base would do.
    """
    title, (source, commit) = "base-identity", used
    named = f"{who} names {f'the base {name}' if isinstance(name, str) and name else 'no base'}"
    trained = commit_of(name, revision if isinstance(revision, str) else None) if isinstance(name, str) else None
    if trained is not None and commit is not None and trained != commit:
        return Check(title, INCONCLUSIVE, f"{who} was made with commit {trained[:12]} of {name}, the base here is {commit[:12]}")
    if known_again:
        return Check(title, PASSED, f"{named}; the base here is {source}, with the weights of the training")
    if not isinstance(name, str) or not name:
        return Check(title, WARNED, f"{named}, so it cannot be compared with {source}")
    found = f"{named}; the base here is {source}"
    if same_model(name, source) and (name == source or recorded or not says_little(name)):
        return Check(title, PASSED, found)
    if options.other_base_name:
        return Check(title, WARNED, f"{found}; they were declared the same (--other-base-name)")
    if same_model(name, source):
        return Check(title, WARNED, f"{found}: a name that many have, and no record of its weights (record_recipe)")
    return Check(
        title,
        INCONCLUSIVE,
        f"{found}: {model_name(name)} and {model_name(source)} are different names; give the right --base, or --other-base-name "
        "if it is the same under another name",
    )


def _same_files(base: ModelFolder, manifest: MergeManifest) -> Check:
    """Every file of the base that went into the merge must still be what it was."""
    for name, digest in sorted(manifest.base.files.items()):
        path = base.path / name
        if not path.is_file() or file_digest(path) != digest:
            return Check("base-files", INCONCLUSIVE, f"{path}: is not the file that was merged; give the base of the merge")
    return Check("base-files", PASSED, f"all {len(manifest.base.files)} files of the base are those that were merged")


@dataclass(frozen=True)
class _Known:
    """What somebody knows an adapter by: the bytes of its files and, unless recorded before there was one, its identity."""

    files: Mapping[str, str]
    identity: str | None

    def is_same(self, other: _Known) -> bool:
        return dict(self.files) == dict(other.files) or (self.identity is not None and self.identity == other.identity)

    def difference(self, other: _Known) -> str:
        """Which of the files differ, in words."""
        files = sorted({*self.files, *other.files})
        return f"by {' and '.join(name for name in files if self.files.get(name) != other.files.get(name))}"


def _adapter_findings(
    adapter: ModelFolder | None, manifest: MergeManifest | None, reference: Reference | None
) -> Iterator[Check]:
    """The adapter of the reference must be the one that was merged; one that was only saved again is."""
    title = "adapter-identity"
    known: dict[str, _Known] = {}
    if manifest is not None and len(manifest.adapters) == 1:
        known["the merge"] = _Known(manifest.adapter.files, manifest.adapter.identity)
        if manifest.weights != (1.0,):
            yield Check(title, WARNED, f"merged with the adapter {manifest.weights[0]:g} times as strong as it was trained")
    elif manifest is not None:
        yield Check(title, WARNED, f"merged from {len(manifest.adapters)} adapters; no reference can say that it had just these")
        return
    if adapter is not None:
        files = adapter_digests(adapter.path)
        known[f"the adapter {adapter.source}"] = _Known(files, adapter_identity(adapter.path, files))
    if reference is not None:
        if reference.adapter is None:
            yield Check(title, WARNED, "the reference does not say which adapter it was recorded with")
        else:
            known["the reference"] = _Known(reference.adapter["files"], reference.adapter.get("identity"))
    names = list(known)
    for first, second in itertools.pairwise(names):
        if not known[first].is_same(known[second]):
            what = known[first].difference(known[second])
            yield Check(title, INCONCLUSIVE, f"{first} and {second} have different adapters ({what}); both sides must be of one")
            return
    if len(names) > 1:
        yield Check(title, PASSED, f"{' and '.join(names)} have the same adapter")
