"""A certified checkpoint stays certified however it is moved, and no longer than its files stay what an engine reads.

Oracle of the digests: hashlib over the files themselves. Oracle of what an engine reads: the names that Transformers, vLLM and
their tokenizers and processors look for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.verification.test_certificate import FILES, Case
from tests.verification.test_verify import certificate, outcomes, verify
from verification.checks import Outcome
from verification.errors import VerificationError
from verification.gate import check_certificate
from verification.merged_files import file_names, folder_files

UNREAD = (
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE-APACHE",
    "LICENSE_GEMMA.md",
    "NOTICE",
    "NOTICE.txt",
    ".gitattributes",
    ".gitignore",
    ".git/HEAD",
    ".git/lfs/objects/ab/model.safetensors",
    ".cache/huggingface/.gitignore",
    ".cache/huggingface/download/config.json.metadata",
    ".DS_Store",
    "Thumbs.db",
    ".nfs000000000203a4b100000001",
    "tokenizer/README.md",
    "tokenizer/.DS_Store",
)
READ = (
    "modeling_custom.py",
    "LICENSE.py",
    "NOTICE-1.py",
    "LICENSE.json",
    "README",
    "README.md.safetensors",
    "README.md/modeling.py",
    "LICENSE/modeling.py",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool.jinja",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "tekken.json",
    "pytorch_model.bin",
    "model-00002-of-00002.safetensors",
    "._model.safetensors",
    ".nfs.safetensors",
    "..model.safetensors",
    ".cache/modules/modeling.py",
    "tokenizer/.git/modeling.py",
    "tokenizer/.cache/huggingface/vocab.json",
    "tokenizer/..data/vocab.json",
    "1_Pooling/config.json",
)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    made = Case(tmp_path)
    made.certify()
    return made


def put(folder: Path, name: str, content: bytes) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", UNREAD)
def test_a_file_that_no_engine_reads_does_not_count(case: Case, name: str) -> None:
    """Neither when it appears nor when it changes or goes."""
    for content in (b"first", b"second"):
        put(case.folder, name, content)
        assert case.check().outcome is Outcome.PASSED
        assert folder_files(case.folder) == {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


@pytest.mark.parametrize("name", READ)
def test_a_file_that_an_engine_could_read_counts(case: Case, name: str) -> None:
    put(case.folder, name, b"")
    with pytest.raises(VerificationError, match=f"{name} was added since it was certified"):
        case.check()


def test_a_link_that_no_engine_follows_does_not_count(case: Case, tmp_path: Path) -> None:
    """Repositories of git-annex, and files that a network file system is about to drop."""
    (tmp_path / "repository").mkdir()
    os.symlink(tmp_path / "repository", case.folder / ".git")
    os.symlink(tmp_path / "gone", case.folder / "README.md")
    assert case.check().outcome is Outcome.PASSED


def test_a_certificate_that_names_such_a_file_is_still_read(case: Case) -> None:
    """Its root is over all that it names; of these, what an engine reads has to be there."""
    names = {**FILES, "README.md": b"the card as it was"}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in names.items()}
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[name]) for name in sorted(digests))).hexdigest()
    subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted({**digests, ".": root}.items())]
    case.edit(lambda value: value.update(subject=subjects))
    checked = case.check()
    case.certify()
    assert checked.root == case.check().root != root


def mount(case: Case, version: str = "..2026_11_30_10_00_00.123456789") -> Path:
    """Lay the files out as Kubernetes mounts a volume: a folder a version, ``..data`` to the present one, links through it."""
    volume = case.folder.with_name("volume")
    shutil.copytree(case.folder, volume / version)
    os.symlink(version, volume / "..data")
    for name in {name.split("/")[0] for name in FILES}:
        os.symlink(f"..data/{name}", volume / name)
    return volume


def test_a_kubernetes_volume_is_the_checkpoint(case: Case) -> None:
    volume = mount(case)
    assert (volume / "tokenizer").is_symlink()  # a folder, through ..data
    assert check_certificate(volume, case.certificate).root == case.check().root


def test_a_kubernetes_volume_that_moved_on_is_denied(case: Case) -> None:
    volume = mount(case)
    shutil.copytree(case.folder, volume / "..2026_12_01")
    (volume / "..2026_12_01" / "tokenizer" / "vocab.json").write_bytes(b"others")
    os.symlink("..2026_12_01", volume / "..data_tmp")
    (volume / "..data_tmp").rename(volume / "..data")
    with pytest.raises(VerificationError, match=r"tokenizer/vocab\.json was changed since it was certified"):
        check_certificate(volume, case.certificate)


def test_a_link_out_of_a_kubernetes_volume_is_denied(case: Case, tmp_path: Path) -> None:
    volume = mount(case)
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", volume / "original")
    with pytest.raises(VerificationError, match="original: is a link to a folder"):
        check_certificate(volume, case.certificate)


def test_a_folder_that_cannot_be_read_is_said(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def denied(path: str | os.PathLike[str]) -> object:
        if Path(path).name == "tokenizer":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(VerificationError, match="tokenizer: cannot be read: Permission denied"):
        case.check()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["config.json"], "config.json was changed since"),
        (["config.json", "tokenizer/vocab.json"], "config.json and 1 more were changed since"),
        (["a.json", "b.json", "c.json"], "a.json and 2 more were added since"),
    ],
)
def test_what_differs_is_said_in_the_right_number(case: Case, names: list[str], found: str) -> None:
    for name in names:
        put(case.folder, name, b"others")
    with pytest.raises(VerificationError, match=re.escape(found)):
        case.check()


INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors.index.fp16.json")


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize(
    "place",
    [
        *("../w.safetensors", ".cache/huggingface/download/w.safetensors", "..v/w.safetensors", ".git/w.safetensors"),
        *("sub/w.safetensors", "/w.safetensors", "./w.safetensors", "README.md", "", ["w.safetensors"], 5),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused_where_files_are_listed(case: Case, index: str, place: object) -> None:
    """Transformers would read the weights there, and no digest would be of them."""
    put(case.folder, index, json.dumps({"weight_map": {"a.weight": "model.safetensors", "b.weight": place}}).encode())
    found = re.escape(f"{case.folder / index}: tensor 'b.weight' lies in {place!r}; expected the plain name")
    for listing in (file_names, folder_files):
        with pytest.raises(VerificationError, match=found):
            listing(case.folder)


def test_an_index_beside_its_weights_is_listed_with_them(case: Case) -> None:
    for prefix in ("", "2_Dense/"):
        put(case.folder, f"{prefix}model-00001-of-00001.safetensors", b"weights")
        put(case.folder, f"{prefix}{INDEXES[0]}", b'{"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}')
    assert {f"2_Dense/{INDEXES[0]}", INDEXES[0], "2_Dense/model-00001-of-00001.safetensors"} < {*folder_files(case.folder)}


@pytest.mark.parametrize("content", [b"{", b'{"weight_map": "\xff"}', b"[" * 100_000])
def test_an_index_that_cannot_be_read_is_refused(case: Case, content: bytes) -> None:
    put(case.folder, INDEXES[0], content)
    with pytest.raises(VerificationError, match=r"index\.json: the index cannot be read"):
        folder_files(case.folder)


def test_what_is_missing_is_said_in_the_right_number(case: Case) -> None:
    for name in ("model.safetensors", "tokenizer/vocab.json"):
        (case.folder / name).unlink()
    with pytest.raises(VerificationError, match=r"model\.safetensors and 1 more are missing since"):
        case.check()


@pytest.mark.parametrize("other", ["another merge of the base", "nothing in common"])
def test_the_certificate_of_another_checkpoint_is_called_that(
    tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILES, "merge_manifest.json", b'{"output": 1}')
    case = Case(tmp_path)
    case.certify()
    for name in ("model.safetensors", "merge_manifest.json") if other == "another merge of the base" else FILES:
        (case.folder / name).write_bytes(b"of another")
    with pytest.raises(
        VerificationError, match=rf"^certificate {case.certificate}: is of another checkpoint than {case.folder}: .*verify it"
    ):
        case.check()


def test_a_manifest_alone_that_changed_is_an_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "merge_manifest.json", b'{"output": 1}')
    case = Case(tmp_path)
    case.certify()
    (case.folder / "merge_manifest.json").write_bytes(b"{}")
    with pytest.raises(VerificationError, match=r"merge_manifest\.json was changed since it was certified"):
        case.check()


def test_a_model_card_is_no_part_of_what_is_certified(place: Path) -> None:
    """The merge copies the base's card and lists it in its manifest; whoever uploads the checkpoint writes another."""
    (place / "merged" / "README.md").write_text("---\nlicense: gemma\n---\n")
    (place / "merged" / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    verdict = verify(place, "--no-control", exit_code=0)
    assert outcomes(verdict)["merged-files"] == "PASSED"
    header = json.loads((place / "merged-report" / "drift.jsonl").read_text().splitlines()[0])
    assert {"README.md", ".gitattributes"}.isdisjoint(header["merged"]["files"])
    statement = json.loads(certificate(place).read_text())
    assert {"README.md", ".gitattributes"}.isdisjoint(entry["name"] for entry in statement["subject"])
