"""What can be known to be impossible before anything is read or written, one sentence each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lora_merge.engines.errors import EngineError
from lora_merge.engines.opening import expect_engine
from lora_merge.errors import no_file, no_folder
from verification.reference_file import no_target

if TYPE_CHECKING:
    from verification.measure import MeasureOptions


def impossible(merged: str | os.PathLike[str], prompts: str | os.PathLike[str], options: MeasureOptions) -> Iterator[str]:
    """Why the measurement cannot be: an engine or a device that is not there, a name that is no file or no checkpoint."""
    try:
        expect_engine(options.engine.engine)
        if options.engine.device != "auto":
            from lora_merge.engines.loading import resolve_device

            resolve_device(options.engine.device)
    except EngineError as error:
        yield str(error)
    found = [no_checkpoint(merged), no_file(prompts, "a JSON Lines prompt file")]
    if options.reference is not None:
        found.append(no_file(options.reference, "a recorded reference"))
    if options.record_reference is not None:
        found += [no_target(options.record_reference, prompts), _inside(options.record_reference, merged)]
        if options.decision.num_prompts is not None:
            found.append(
                "--record-reference with --num-prompts: a recorded reference is of every prompt in its file, so that nobody "
                "picks them; record it without --num-prompts, and give --num-prompts with --reference"
            )
    yield from (reason for reason in found if reason is not None)


def no_checkpoint(merged: str | os.PathLike[str]) -> str | None:
    """Why ``merged`` is no merged checkpoint, as far as its names tell; None where it can be one."""
    expected = "a merged checkpoint, as lora-merge --out makes it"
    if reason := no_folder(merged, expected):
        return reason
    folder = Path(merged)
    has_config = (folder / "config.json").is_file()
    if (folder / "adapter_config.json").is_file() and not (has_config and _has_weights(folder)):
        return f"{merged}: is an adapter; expected {expected}"
    return None if has_config else f"{merged}: holds no config.json; expected {expected}"


def _has_weights(folder: Path) -> bool:
    """Whether anything but an adapter's own tensors lies there."""
    files = (path.name for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    return any(not name.startswith("adapter_model.") for name in files)


def _inside(target: str | os.PathLike[str], merged: str | os.PathLike[str]) -> str | None:
    if Path(merged).resolve() not in Path(target).resolve().parents:
        return None
    return f"{target}: lies in the merged checkpoint, which it would change; choose a place outside it"
