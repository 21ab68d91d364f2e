"""The folders of a base that belong to the model: the further modules that sentence-transformers lists in ``modules.json``.

An embedding model is a transformer and what comes after it (``1_Pooling``, ``2_Dense``); without them the output would not load.
An adapter is of the transformer, so they are copied as they are. Of other folders nothing says that the model needs them; they
are left behind, and named.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import check_link
from lora_merge.merging.tokenizer_files import TEMPLATES_FOLDER

MODULES_FILE = "modules.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".index.json")
# The weights of a module (a dense layer); its other formats repeat them, or could run code.
_MODULE_WEIGHTS = "model.safetensors"


def module_files(base: Path) -> dict[str, Path]:
    """The files of the base's modules, by name with ``/``; links are checked as for every file beside the weights.

    Raises:
        MergeError: a module's folder is outside the base, a link leads elsewhere, or a module's weights are no safetensors.
    """
    found: dict[str, Path] = {}
    for folder in _module_folders(base):
        for path in _walk(base / folder):
            name = path.relative_to(base).as_posix()
            if not path.name.endswith(WEIGHT_SUFFIXES) or path.name == _MODULE_WEIGHTS:
                found[name] = path
            elif path.name == "pytorch_model.bin" and not path.with_name(_MODULE_WEIGHTS).is_file():
                raise MergeError(
                    f"{path}: the weights of a module in {MODULES_FILE}, and no {_MODULE_WEIGHTS}; expected safetensors, since "
                    "other formats execute code; save the base once with sentence-transformers' save_pretrained"
                )
    return found


def folders_left_behind(base: Path) -> list[str]:
    """The names of the base's folders that are no part of the output and hold something; hidden ones do not count."""
    taken = {PurePosixPath(name).parts[0] for name in module_files(base)} | {TEMPLATES_FOLDER}
    return sorted(
        path.name
        for path in base.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name not in taken and any(path.iterdir())
    )


def _module_folders(base: Path) -> list[str]:
    """The folders that ``modules.json`` names, and which exist; the transformer itself lies in the base's own folder."""
    path = base / MODULES_FILE
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MergeError(f"{path}: the list of modules cannot be read: {getattr(error, 'strerror', None) or error}") from error
    entries = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    names = [name for name in entries if isinstance(name, str)]
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise MergeError(f"{path}: module path {name!r}; expected the name of a folder beside it")
    try:
        # "." and "" are the base's folder.
        return [name for name in names if PurePosixPath(name).parts and (base / name).is_dir()]
    except OSError as error:
        raise MergeError(f"{path}: a module path that cannot be looked at: {error.strerror or error}") from error


def _walk(folder: Path) -> list[Path]:
    """The files below a folder; a link to a folder inside it is not followed."""
    check_link(folder)
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        check_link(path)
        if path.is_file():
            found.append(path)
        elif path.is_dir() and not path.is_symlink():
            found += _walk(path)
    return found
