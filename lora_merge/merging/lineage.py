"""Is this the base that the adapter was trained on, and is the adapter not in it already? As far as files and names can tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lora_merge.merging.adapter import Adapter
from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.digests import adapter_digests, adapter_identity
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import ModelFolder
from lora_merge.merging.manifest import MergeManifest, read_manifest
from lora_merge.merging.model_names import same_model
from lora_merge.merging.recipes import resemblance
from lora_merge.merging.side_files import MANIFEST_FILE


def check_lineage(base: Checkpoint, adapters: Sequence[Adapter]) -> None:
    """Raise :class:`MergeError` where an adapter would be added twice."""
    folders = [adapter.folder.path.resolve() for adapter in adapters]
    twice = next((adapter for place, adapter in enumerate(adapters) if folders[place] in folders[:place]), None)
    if twice is not None:
        raise MergeError(f"adapter {twice.folder.source}: was given twice; give it once, with a weight where it shall count more")
    manifest = _manifest(base.folder)
    if manifest is None:
        return
    inside = {artifact.identity for artifact in manifest.adapters}
    for adapter in adapters:
        path = adapter.folder.path
        if adapter_identity(path, adapter_digests(path)) in inside:
            raise MergeError(
                f"base {base.folder.source}: holds adapter {adapter.folder.source} already, by its {MANIFEST_FILE}; "
                f"give the base that the adapter was trained on ({manifest.base.source})"
            )


def lineage_cautions(base: Checkpoint, adapters: Sequence[Adapter]) -> Iterator[str]:
    """One line for each thing about where base and adapters come from that may not be meant."""
    manifest = _manifest(base.folder)
    if manifest is not None:
        merged = ", ".join(artifact.source for artifact in manifest.adapters)
        yield (
            f"base {base.folder.source} is a merge itself, of {merged} into {manifest.base.source}; that is right only for an "
            "adapter that was trained on this merge"
        )
    here = (base.folder.source, str(base.folder.path.resolve()))
    for adapter in adapters:
        named, alike = adapter.named_base, resemblance(adapter.folder.path, base)
        if alike is not None and not alike.is_same:
            if named is None or not any(same_model(named, source) for source in here):
                way_out = f"give the base of the training{f', {named}' if named is not None else ''}"
            else:
                way_out = (
                    "its weights have changed since, or the training's base was a residual one, which PiSSA, OLoRA and LoftQ "
                    "make of this one: give that"
                )
            yield f"{adapter.folder.source} was not trained on base {base.folder.source}, which holds {alike}; {way_out}"
        elif alike is None and named is not None and not any(same_model(named, source) for source in here):
            yield (
                f"{adapter.folder.source} was trained on {named} by its configuration, and base {base.folder.source} has another "
                "name; make sure that it is the same model: the shapes of another one can fit as well"
            )


def _manifest(folder: ModelFolder) -> MergeManifest | None:
    return read_manifest(folder.path) if (folder.path / MANIFEST_FILE).is_file() else None
