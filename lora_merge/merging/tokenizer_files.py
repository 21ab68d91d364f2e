"""Whose tokenizer and whose processor the merged checkpoint gets: the adapter's or the base's, each as one thing.

A tokenizer is a vocabulary, its settings and its chat template, in up to a dozen files that were saved together. transformers
reads whatever lies in the folder, and its versions 4 and 5 save different files: beside a ``tokenizer.json`` of version 5 a
``special_tokens_map.json`` of version 4 decides what ends a text, and ``chat_template.jinja`` wins over a template in
``tokenizer_config.json``. So a set of files is taken whole from one folder, or not at all:

- An adapter's folder with a whole tokenizer gives all of it, and nothing of the base's stays beside it, its chat template
  included: what training saved is what it used, and a template that it did not have would make prompts which the adapter has
  never seen.
- ``chat_template.jinja`` alone is a template on the base's tokenizer and takes the place of the base's templates. (One in the
  base's ``tokenizer_config.json`` stays there, unread.)
- Any other part of a tokenizer is refused, unless it is the base's own, byte by byte: no training has seen what it would be
  together with the base's files.

A processor (images, video, audio) is another set, by the same rule.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import ModelFolder, check_link, read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
_OLD_TEMPLATE = "chat_template.json"
# Patterns of files that hold a vocabulary of their own: of transformers' tokenizers, and of Mistral's, tiktoken and Marian.
_VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer.model.v*", "vocab.json", "vocab.txt", "vocab-*.json", "tekken.json"),
    *(
        "spiece.model",
        "sentencepiece.model",
        "sentencepiece.bpe.model",
        "spm.model",
        "spm_char.model",
        "source.spm",
        "target.spm",
    ),
    *("tiktoken.model", "*.tiktoken", "bpe.codes", "dict.txt", "prophetnet.tokenizer", "byte_maps.json"),
)
_PARTS = (
    *("added_tokens.json", "special_tokens_map.json", "merges.txt", "tokenizer.*.json", "normalizer.json"),
    *("entity_vocab.json", "target_vocab.json", "emoji.json", "word_shape.json", "word_pronunciation.json"),
)
_TOKENIZER = (*_VOCABULARIES, *_PARTS, TOKENIZER_CONFIG, TEMPLATE, _OLD_TEMPLATE, f"{TEMPLATES_FOLDER}/*.jinja")
_PROCESSOR_CONFIG = "processor_config.json"
_PREPROCESSOR = "preprocessor_config.json"
_VIDEO = "video_preprocessor_config.json"
_PROCESSOR = (_PROCESSOR_CONFIG, _PREPROCESSOR, _VIDEO)


@dataclass(frozen=True)
class FileSet:
    """Files that mean something only together.

    Attributes:
        what: ``"tokenizer"``, ``"chat template"`` or ``"processor"``: what of the set the folder gives.
        folder: the folder that gives it, or None for the base.
        files: name in the output, with ``/`` -> the file; with a ``"chat template"`` the base's tokenizer is among them.
        origins: name -> ``"base"`` or ``"adapter"``.
        passed_over: adapters that bring another one.
    """

    what: str
    folder: ModelFolder | None
    files: Mapping[str, Path]
    origins: Mapping[str, str]
    passed_over: tuple[ModelFolder, ...] = ()


def is_of_a_set(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer or a processor, and so is not copied by itself."""
    return any(fnmatchcase(name, pattern) for pattern in (*_TOKENIZER, *_PROCESSOR))


def choose_tokenizer(base: ModelFolder, adapters: Sequence[ModelFolder]) -> FileSet:
    """The tokenizer of the output: the first adapter's that brings one or a template, else the base's.

    Raises:
        MergeError: an adapter's folder holds a part of a tokenizer only, or a link that leads elsewhere.
    """
    return _choose(base, adapters, _TOKENIZER, _tokenizer_of)


def choose_processor(base: ModelFolder, adapters: Sequence[ModelFolder]) -> FileSet:
    """The processor's settings in the output: the first adapter's that has them, else the base's; raises as the other."""
    return _choose(base, adapters, _PROCESSOR, _processor_of)


def _choose(
    base: ModelFolder,
    adapters: Sequence[ModelFolder],
    patterns: Sequence[str],
    given_by: Callable[[ModelFolder, Mapping[str, Path], Mapping[str, Path]], FileSet | None],
) -> FileSet:
    own = _files_of(base, patterns)
    found = [chosen for folder in adapters if (chosen := given_by(folder, _files_of(folder, patterns), own)) is not None]
    if not found:
        return FileSet("tokenizer" if patterns is _TOKENIZER else "processor", None, own, dict.fromkeys(own, "base"))
    first = found[0]
    others = tuple(other.folder for other in found[1:] if other.folder is not None and differences(first.files, other.files))
    return FileSet(first.what, first.folder, first.files, first.origins, others)


def _tokenizer_of(folder: ModelFolder, files: Mapping[str, Path], base: Mapping[str, Path]) -> FileSet | None:
    if _is_whole_tokenizer(files, base):
        return FileSet("tokenizer", folder, files, dict.fromkeys(files, "adapter"))
    templates = {name: path for name, path in files.items() if _is_template(name)} if TEMPLATE in files else {}
    _refuse_parts(
        folder,
        "tokenizer",
        {name: path for name, path in files.items() if name not in templates},
        base,
        f"{TOKENIZER_CONFIG} and a vocabulary such as tokenizer.json",
    )
    if not templates:
        return None
    kept = {name: path for name, path in base.items() if not _is_template(name)}
    origins = {**dict.fromkeys(kept, "base"), **dict.fromkeys(templates, "adapter")}
    return FileSet("chat template", folder, {**kept, **templates}, origins)


def _is_whole_tokenizer(files: Mapping[str, Path], base: Mapping[str, Path]) -> bool:
    """Whether the files load by themselves: a vocabulary and the settings that every ``save_pretrained`` writes."""
    if "tekken.json" in files:  # Mistral's, which holds its settings
        return True
    vocabularies = [name for name in files if any(fnmatchcase(name, pattern) for pattern in _VOCABULARIES)]
    # vocab.json is half of a BPE vocabulary or the whole of another; the base tells which.
    if vocabularies == ["vocab.json"] and "merges.txt" in base and "merges.txt" not in files:
        return False
    return TOKENIZER_CONFIG in files and bool(vocabularies)


def _is_template(name: str) -> bool:
    return name in (TEMPLATE, _OLD_TEMPLATE) or name.startswith(f"{TEMPLATES_FOLDER}/")


def _processor_of(folder: ModelFolder, files: Mapping[str, Path], base: Mapping[str, Path]) -> FileSet | None:
    """transformers 4 saves a file for each kind of input, 5 one for all, which wins over the others where both are there."""
    if not files:
        return None
    given = _processor_parts(files) | ({"processor"} if _PROCESSOR_CONFIG in files else set())
    if _processor_parts(base) - given:
        _refuse_parts(folder, "processor", files, base, f"what {', '.join(sorted(base))} of the base say")
        return None
    return FileSet("processor", folder, files, dict.fromkeys(files, "adapter"))


def _processor_parts(files: Mapping[str, Path]) -> set[str]:
    """What the files settle: ``"inputs"`` (images, audio), ``"video"``, and ``"processor"`` where it has settings of its own."""
    parts = {part for name, part in ((_PREPROCESSOR, "inputs"), (_VIDEO, "video")) if name in files}
    if _PROCESSOR_CONFIG in files:
        settings = read_json(files[_PROCESSOR_CONFIG], "a processor's configuration")
        nested = {
            name for name, value in settings.items() if isinstance(value, dict) and name.endswith(("_processor", "_extractor"))
        }
        parts |= {"video" if name == "video_processor" else "inputs" for name in nested}
        if set(settings) - nested - {"processor_class", "auto_map"}:
            parts.add("processor")
    return parts


def _refuse_parts(folder: ModelFolder, what: str, files: Mapping[str, Path], base: Mapping[str, Path], expected: str) -> None:
    """Raise unless every file is the base's own."""
    for name, path in files.items():
        if name not in base or not filecmp.cmp(path, base[name], shallow=False):
            raise MergeError(
                f"{folder.source}: holds {name}, a part of a {what} that is not the base's; expected the whole {what} that "
                f"training used ({expected}): put it there, or remove {name} to use the base's"
            )


def _files_of(folder: ModelFolder, patterns: Sequence[str]) -> dict[str, Path]:
    """The files of the set in a folder, by name, in order; links are checked, other things than files are passed over."""
    found = {}
    extra = folder.path / TEMPLATES_FOLDER
    check_link(extra)
    paths = [*folder.path.iterdir(), *(extra.iterdir() if extra.is_dir() else ())]
    for path in sorted(paths):
        name = path.relative_to(folder.path).as_posix()
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            check_link(path)
            if path.is_file():
                found[name] = path
    return found


def differences(one: Mapping[str, Path], other: Mapping[str, Path]) -> list[str]:
    """The names of the files that only one set has, or that differ."""
    return [
        name
        for name in sorted({*one, *other})
        if name not in one
        or name not in other
        # A file is not read to be compared with itself: vocabularies have tens of megabytes.
        or (one[name] != other[name] and not filecmp.cmp(one[name], other[name], shallow=False))
    ]


def has_template(files: Mapping[str, Path]) -> bool:
    """Whether a tokenizer has a chat template, in whichever place."""
    if _has_template_file(files):
        return True
    path = files.get(TOKENIZER_CONFIG)
    return path is not None and bool(read_json(path, "a tokenizer's configuration").get("chat_template"))


def _has_template_file(files: Mapping[str, Path]) -> bool:
    """Whether it has one where a processor looks for its own, too; Mistral's have one built in."""
    return "tekken.json" in files or any(_is_template(name) for name in files)


def notes_on_sets(base: ModelFolder, adapters: Sequence[ModelFolder]) -> Iterator[str]:
    """A line for the tokenizer and for the processor, where the adapter's is used and differs from the base's."""
    sets = ((choose_tokenizer(base, adapters), _TOKENIZER), (choose_processor(base, adapters), _PROCESSOR))
    for chosen, patterns in sets:
        own = _files_of(base, patterns)
        if chosen.folder is None or not (differing := differences(chosen.files, own)):
            continue
        compared = f"differs from the base's in {', '.join(differing)}" if own else "the base has none"
        on = " (on the base's tokenizer)" if chosen.what == "chat template" else ""
        yield f"{chosen.what}{on}: from {chosen.folder.source}; {compared}"


def cautions_on_sets(base: ModelFolder, adapters: Sequence[ModelFolder]) -> Iterator[str]:
    """A line for what is lost with the sets that were chosen."""
    tokenizer, processor = choose_tokenizer(base, adapters), choose_processor(base, adapters)
    own = _files_of(base, _TOKENIZER)
    if tokenizer.what == "tokenizer" and tokenizer.folder is not None:
        if not has_template(tokenizer.files) and has_template(own):
            yield (
                f"the tokenizer beside {tokenizer.folder.source} has no chat template, so the output has none, although the base "
                f"does; if training used one, put it beside the adapter as {TEMPLATE}"
            )
        elif processor.files and _has_template_file(own) and not _has_template_file(tokenizer.files):
            yield (
                f"the tokenizer beside {tokenizer.folder.source} has its chat template in {TOKENIZER_CONFIG}, where a processor "
                f"does not look, so that the output's has none, although the base's does; put it beside the adapter as {TEMPLATE}"
            )
    for chosen in (tokenizer, processor):
        for other in chosen.passed_over:
            assert chosen.folder is not None, "the base passes nobody over"
            yield f"{chosen.what}: from {chosen.folder.source}; {other.source} brings another one, which is not used"
