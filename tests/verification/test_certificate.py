"""The certificate and the gate that reads it: every edit of every part is refused, signed and unsigned told apart.

Oracle of the digests: hashlib over the files themselves. Oracle of the signatures: the cryptography library's own verification.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as generate_ec_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)

from lora_merge.engines.labels import DecisionLabels, Label
from lora_merge.merging.digests import root_digest
from tests.verification.builders import ENGINE as MEASURED_IN
from tests.verification.builders import LABELS, ordinary
from verification.certificate import make_statement, read_statement, write_certificate
from verification.checks import Check, Outcome
from verification.drift_file import write_measurements
from verification.errors import VerificationError
from verification.gate import CheckedCertificate, Policy, certificate_path, check_certificate
from verification.limits import Limits
from verification.measurement import Measurements
from verification.merged_files import folder_files
from verification.strict_json import canonical
from verification.verdict import judge

FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights", "tokenizer/vocab.json": b"{}"}


class Case:
    """A merged checkpoint, its report folder and its certificate, made without any model."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "merged"
        for name, content in FILES.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        self.certificate = certificate_path(self.folder)
        self.certificate.parent.mkdir()
        self.measurements = self.certificate.with_name("drift.jsonl")

    def certify(
        self, limits: Limits | None = None, sign_key: Path | None = None, findings: tuple[Check, ...] = (), drift: float = 0.008
    ) -> None:
        files = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
        source = ordinary(drift=drift)
        about = dataclasses.replace(source.conditions, merged_files=files, merged_root=root_digest(files), findings=findings)
        self.source: Measurements = dataclasses.replace(source, conditions=about)
        write_measurements(self.source, self.measurements)
        digest = hashlib.sha256(self.measurements.read_bytes()).hexdigest()
        self.verdict = judge(self.source, limits or Limits(0.02))
        write_certificate(make_statement(self.verdict, about, digest), self.certificate, sign_key)

    def check(self, **policy: Any) -> CheckedCertificate:
        return check_certificate(self.folder, self.certificate, Policy(**policy))

    def edit(self, change: Callable[[Any], object]) -> None:
        value = json.loads(self.certificate.read_text())
        change(value)
        self.certificate.write_text(json.dumps(value))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    made = Case(tmp_path)
    made.certify()
    return made


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("keys")
    paths = {}
    for name in ("ours", "theirs"):
        key = Ed25519PrivateKey.generate()
        paths[f"{name}.key"], paths[f"{name}.pub"] = place / f"{name}.key", place / f"{name}.pub"
        paths[f"{name}.key"].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        paths[f"{name}.pub"].write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return paths


def test_a_passing_certificate_allows_the_run(case: Case) -> None:
    checked = case.check()
    assert (checked.outcome, checked.signed, checked.warnings) == (Outcome.PASSED, False, ())
    assert checked.limits == Limits(0.02)
    assert (checked.labels, checked.prefill) == (LABELS, '{"decision": "')


def test_it_is_an_in_toto_test_result(case: Case) -> None:
    statement = json.loads(case.certificate.read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert statement["predicate"]["result"] == "PASSED"
    assert {"mean-delta", "label-mass-loss", "control", "noise-floor"} <= set(statement["predicate"]["passedTests"])
    subjects = {entry["name"]: entry["digest"]["sha256"] for entry in statement["subject"]}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[name]) for name in sorted(digests))).hexdigest()
    assert subjects == {**digests, ".": root}
    drift = {entry["name"]: entry for entry in statement["predicate"]["configuration"]}["drift.jsonl"]
    assert drift["digest"]["sha256"] == hashlib.sha256(case.measurements.read_bytes()).hexdigest()


def test_the_same_verdict_gives_the_same_bytes(case: Case) -> None:
    before = case.certificate.read_bytes()
    case.certify()
    assert case.certificate.read_bytes() == before


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_changed_file_is_denied(case: Case, name: str) -> None:
    (case.folder / name).write_bytes(FILES[name][:-1] + b"~")
    with pytest.raises(VerificationError, match=f"{name} was changed since it was certified"):
        case.check()


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_removed_file_is_denied(case: Case, name: str) -> None:
    (case.folder / name).unlink()
    with pytest.raises(VerificationError, match=f"{name} is missing|holds no {name}"):
        case.check()


@pytest.mark.parametrize(
    "name",
    ["model-00002-of-00002.safetensors", "sub/model.safetensors", ".hidden", "sub/modeling.py", "adapter_model.safetensors"],
)
def test_an_added_file_is_denied(case: Case, name: str) -> None:
    (case.folder / name).parent.mkdir(exist_ok=True)
    (case.folder / name).write_bytes(b"")
    with pytest.raises(VerificationError, match=f"{name} was added"):
        case.check()


def test_a_renamed_file_is_denied_although_the_root_digest_may_stay(case: Case) -> None:
    before = root_digest(folder_files(case.folder))
    (case.folder / "model.safetensors").rename(case.folder / "model2.safetensors")
    assert root_digest(folder_files(case.folder)) == before  # the root binds no names: the subjects must
    with pytest.raises(VerificationError, match=r"model\.safetensors is missing"):
        case.check()


def test_two_files_that_changed_names_are_denied(case: Case) -> None:
    contents = {"config.json": FILES["model.safetensors"], "model.safetensors": FILES["config.json"]}
    for name, content in contents.items():
        (case.folder / name).write_bytes(content)
    with pytest.raises(VerificationError, match=r"config\.json and 1 more were changed"):
        case.check()


def test_a_link_to_other_bytes_is_denied_and_one_to_the_same_bytes_is_not(case: Case, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.write_bytes(FILES["model.safetensors"])
    (case.folder / "model.safetensors").unlink()
    os.symlink(other, case.folder / "model.safetensors")
    assert case.check().outcome is Outcome.PASSED
    other.write_bytes(b"swapped")
    with pytest.raises(VerificationError, match=r"model\.safetensors was changed"):
        case.check()
    other.unlink()
    with pytest.raises(VerificationError, match="dangling"):
        case.check()


def test_a_linked_folder_is_denied(case: Case, tmp_path: Path) -> None:
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "model.safetensors").write_bytes(b"x")
    os.symlink(tmp_path / "extra", case.folder / "original")
    with pytest.raises(VerificationError, match="original: is a link to a folder"):
        case.check()


def test_without_a_certificate_nothing_runs(case: Case) -> None:
    case.certificate.unlink()
    with pytest.raises(VerificationError, match="cannot be read: No such file"):
        case.check()


def test_a_folder_as_certificate_is_told_what_to_give(case: Case) -> None:
    with pytest.raises(
        VerificationError, match=r"report: is a folder; give the file in it, such as .*report/gate\.intoto\.json$"
    ):
        check_certificate(case.folder, case.certificate.parent)


@pytest.mark.parametrize(("name", "what"), [("none.pub", "no such file"), ("merged", "is a folder")])
def test_a_trusted_key_that_is_no_file_is_said_before_anything_about_the_certificate(case: Case, name: str, what: str) -> None:
    """This one is not signed, which would be the next thing to say."""
    key = case.folder.parent / name
    with pytest.raises(VerificationError, match=f"^trusted key {key}: {what}; expected an Ed25519 public key in PEM$"):
        case.check(trusted_key=key)


def test_a_certificate_of_another_checkpoint_is_denied(case: Case, tmp_path: Path) -> None:
    other = Case(tmp_path / "second")
    (other.folder / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(VerificationError, match=r"model\.safetensors was changed"):
        check_certificate(other.folder, case.certificate)


def test_a_failed_verdict_is_denied(tmp_path: Path) -> None:
    failed = Case(tmp_path)
    failed.certify(drift=0.14)
    assert json.loads(failed.certificate.read_text())["predicate"]["result"] == "FAILED"
    with pytest.raises(VerificationError, match=r"its result is FAILED \(mean-delta\)"):
        failed.check(accept_warnings=True, accept_assumed_recipe=True, max_delta=0.9)


def test_an_inconclusive_verdict_certifies_nothing(case: Case) -> None:
    verdict = judge(ordinary(20), Limits(0.02))
    with pytest.raises(ValueError, match="certifies nothing"):
        make_statement(verdict, case.source.conditions, "ab" * 32)


def test_an_assumed_recipe_needs_its_own_consent(tmp_path: Path) -> None:
    warned = Case(tmp_path)
    warned.certify(findings=(Check("recipe-provenance", Outcome.WARNED, "assumed"),))
    for policy in ({}, {"accept_warnings": True}):
        with pytest.raises(VerificationError, match=r"WARNED \(recipe-provenance\).*--accept-assumed-recipe"):
            warned.check(**policy)
    assert warned.check(accept_assumed_recipe=True).warnings == ("recipe-provenance",)


def test_other_warnings_need_the_other_consent(tmp_path: Path) -> None:
    warned = Case(tmp_path)
    warned.certify(
        findings=(Check("base-identity", Outcome.WARNED, "other name"), Check("recipe-provenance", Outcome.WARNED, "assumed"))
    )
    with pytest.raises(VerificationError, match=r"WARNED \(base-identity\).*--accept-warnings"):
        warned.check(accept_assumed_recipe=True)
    assert warned.check(accept_assumed_recipe=True, accept_warnings=True).outcome is Outcome.WARNED


def test_a_looser_limit_than_the_policys_is_denied(tmp_path: Path) -> None:
    loose = Case(tmp_path)
    loose.certify(Limits(0.05))
    with pytest.raises(VerificationError, match=r"of up to 0\.05, this run allows 0\.02"):
        loose.check()
    assert loose.check(max_delta=0.05).limits.max_delta == 0.05


def test_edited_measurements_beside_it_are_denied(case: Case) -> None:
    case.measurements.write_bytes(case.measurements.read_bytes() + b"\n")
    with pytest.raises(VerificationError, match="is not the file it was judged from"):
        case.check()
    case.measurements.unlink()  # a certificate may travel without them
    assert case.check().outcome is Outcome.PASSED


def configured(value: Any, name: str) -> Any:
    return next(entry for entry in value["predicate"]["configuration"] if entry["name"] == name)


def with_digest(entry: Any) -> None:
    text = json.dumps(entry["annotations"], sort_keys=True, separators=(",", ":"))
    entry["digest"] = {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def set_annotation(name: str, key: str, content: Any, *, repair: bool) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        configured(value, name)["annotations"][key] = content
        if repair:
            with_digest(configured(value, name))

    return change


EDITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "statement type": (lambda v: v.update(_type="https://in-toto.io/Statement/v2"), "_type is"),
    "predicate type": (lambda v: v.update(predicateType="https://slsa.dev/provenance/v1"), "predicateType is"),
    "unknown key": (lambda v: v.update(extra=1), "'extra' is not known"),
    "missing key": (lambda v: v.pop("subject"), "'subject' is missing"),
    "unknown predicate key": (lambda v: v["predicate"].update(url="https://x"), "'url' is not known"),
    "no subjects": (lambda v: v.update(subject=[]), "names 0 subjects"),
    "only the root": (lambda v: v.update(subject=[e for e in v["subject"] if e["name"] == "."]), "names 1 subjects"),
    "no root": (lambda v: v.update(subject=[e for e in v["subject"] if e["name"] != "."]), "expected every file and the root"),
    "twin subject": (lambda v: v["subject"].append(v["subject"][0]), "occurs twice"),
    "other root": (lambda v: v["subject"][0]["digest"].update(sha256="00" * 32), "root digest is not the one of its files"),
    "other digest": (lambda v: v["subject"][1]["digest"].update(sha256="00" * 32), r"config\.json was changed"),
    "weak digest": (lambda v: v["subject"][1].update(digest={"md5": "00" * 16}), "'sha256' is missing"),
    "no hexadecimal": (lambda v: v["subject"][1]["digest"].update(sha256="zz" * 32), "no hexadecimal"),
    "dropped subject": (lambda v: v["subject"].pop(1), r"config\.json was added"),
    "result only": (lambda v: v["predicate"].update(result="WARNED"), "tests that amount to PASSED"),
    "unknown result": (lambda v: v["predicate"].update(result="SKIPPED"), "tests that amount to PASSED"),
    "no tests": (lambda v: v["predicate"].update(passedTests=[]), "no test at all"),
    "tests of another type": (lambda v: v["predicate"].update(failedTests="none"), "expected a list of names"),
    "failed test": (lambda v: v["predicate"].update(failedTests=["mean-delta"]), "amount to FAILED"),
    "limit loosened": (set_annotation("limits", "max_delta", 0.5, repair=False), "limits is not what its digest says"),
    "limit tightened with its digest": (set_annotation("limits", "max_delta", 1.5, repair=True), "expected a number between"),
    "unknown limit": (set_annotation("limits", "max_p95_delta", 0.5, repair=True), "is no limit"),
    "engine": (set_annotation("engine", "dtype", "float32", repair=False), "engine is not what its digest says"),
    "labels": (set_annotation("decision", "labels", {"skip": 1}, repair=True), "label 'skip'"),
    "prefill": (set_annotation("decision", "prefill", 5, repair=True), "prefill is 5"),
    "recipe": (set_annotation("recipe", "origin", "hearsay", repair=True), "origin 'hearsay' is not known"),
    "version": (set_annotation("certificate", "version", 2, repair=True), "this version reads 1"),
    "dropped configuration": (lambda v: v["predicate"]["configuration"].pop(), "expected exactly"),
    "added configuration": (
        lambda v: v["predicate"]["configuration"].append({"name": "x", "digest": {"sha256": "00" * 32}}),
        "exactly",
    ),
    "configuration of another type": (lambda v: v["predicate"].update(configuration={}), "is no list"),
    "other measurements": (
        lambda v: configured(v, "drift.jsonl")["digest"].update(sha256="00" * 32),
        "is not the file it was judged",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_certificate_is_denied(case: Case, name: str) -> None:
    change, message = EDITS[name]
    case.edit(change)
    with pytest.raises(VerificationError, match=message):
        case.check()


@pytest.mark.parametrize("text", ["", "{", "[]", '"PASSED"', '{"_type": 1, "_type": 2}', "\xff"])
def test_a_certificate_that_is_no_statement_is_denied(case: Case, text: str) -> None:
    case.certificate.write_bytes(text.encode("latin-1"))
    with pytest.raises(VerificationError, match=r"is not valid JSON|expected an object"):
        case.check()


def test_a_signed_certificate_is_known_as_signed(case: Case, keys: dict[str, Path]) -> None:
    case.certify(sign_key=keys["ours.key"])
    assert case.check(trusted_key=keys["ours.pub"]).signed
    assert not case.check().signed  # without a key to trust, a signature proves nothing


def test_the_signature_is_dsse_over_ed25519(case: Case, keys: dict[str, Path]) -> None:
    case.certify(sign_key=keys["ours.key"])
    envelope = json.loads(case.certificate.read_text())
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"]
    message = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    load_pem_public_key(keys["ours.pub"].read_bytes()).verify(base64.b64decode(envelope["signatures"][0]["sig"]), message)  # type: ignore[union-attr, call-arg]
    assert kind == "application/vnd.in-toto+json"


def test_another_signer_is_denied(case: Case, keys: dict[str, Path]) -> None:
    case.certify(sign_key=keys["theirs.key"])
    with pytest.raises(VerificationError, match="none of its 1 signatures is by the trusted key"):
        case.check(trusted_key=keys["ours.pub"])


def test_another_signer_under_our_key_id_is_denied(case: Case, keys: dict[str, Path]) -> None:
    case.certify(sign_key=keys["ours.key"])
    key_id = json.loads(case.certificate.read_text())["signatures"][0]["keyid"]
    case.certify(sign_key=keys["theirs.key"])
    case.edit(lambda value: value["signatures"][0].update(keyid=key_id))
    with pytest.raises(VerificationError, match="none of its 1 signatures"):
        case.check(trusted_key=keys["ours.pub"])


def test_an_unsigned_certificate_is_denied_where_a_key_is_trusted(case: Case, keys: dict[str, Path]) -> None:
    with pytest.raises(VerificationError, match="is not signed, but a trusted key is given"):
        case.check(trusted_key=keys["ours.pub"])


@pytest.mark.parametrize("name", EDITS)
def test_every_edit_of_a_signed_certificate_is_denied(case: Case, keys: dict[str, Path], name: str) -> None:
    case.certify(sign_key=keys["ours.key"])

    def change(envelope: Any) -> None:
        statement = json.loads(base64.b64decode(envelope["payload"]))
        EDITS[name][0](statement)
        envelope["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()

    case.edit(change)
    with pytest.raises(VerificationError, match="none of its 1 signatures"):
        case.check(trusted_key=keys["ours.pub"])


@pytest.mark.parametrize(
    "change",
    [
        lambda envelope: envelope.update(payloadType="application/json"),
        lambda envelope: envelope.update(signatures=[]),
        lambda envelope: envelope.update(signatures=[{"sig": "AA"}]),
        lambda envelope: envelope.update(extra=1),
        lambda envelope: envelope.update(payload="!"),
        lambda envelope: envelope.pop("signatures"),
    ],
)
def test_a_broken_envelope_is_denied(case: Case, keys: dict[str, Path], change: Callable[[Any], None]) -> None:
    case.certify(sign_key=keys["ours.key"])
    case.edit(change)
    with pytest.raises(VerificationError, match="certificate"):
        case.check(trusted_key=keys["ours.pub"])


def test_keys_that_are_no_ed25519_keys_are_refused(case: Case, keys: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "ec.key"
    other.write_bytes(generate_ec_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    )
    for path, message in (
        (other, "expected an Ed25519 key"),
        (locked, "no unencrypted PEM"),
        (keys["ours.pub"], "no unencrypted PEM"),
    ):
        with pytest.raises(VerificationError, match=message):
            case.certify(sign_key=path)
    with pytest.raises(VerificationError, match="no such file; expected an Ed25519 private key"):
        case.certify(sign_key=tmp_path / "none")
    case.certify(sign_key=keys["ours.key"])
    with pytest.raises(VerificationError, match="is no PEM public key"):
        case.check(trusted_key=keys["ours.key"])


def test_the_digest_is_of_the_bytes_that_were_checked(case: Case) -> None:
    """A pipe gives them once; oracle: hashlib."""
    content = case.certificate.read_bytes()
    read, write = os.pipe()
    try:
        os.write(write, content)
        os.close(write)
        checked = check_certificate(case.folder, f"/dev/fd/{read}")
    finally:
        os.close(read)
    assert checked.sha256 == case.check().sha256 == hashlib.sha256(content).hexdigest()


def test_reading_a_statement_gives_what_was_bound(case: Case) -> None:
    statement, signed = read_statement(case.certificate)
    assert not signed
    assert statement.bound["engine"] == dict(case.source.conditions.arms["merged"])
    assert statement.bound["recipe"] == {"recipe": {"quant_type": "nf4"}, "origin": "adapter"}


ENGINE = MEASURED_IN | {"kind": "vllm"}


def test_a_run_like_the_measurement_is_allowed(case: Case) -> None:
    assert case.check().check_use(engine=ENGINE, labels=LABELS, prefill='{"decision": "') == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": {**ENGINE, "kind": "transformers"}}, "engine 'vllm', this run has 'transformers'"),
        ({"engine": {**ENGINE, "dtype": "float16"}}, "dtype 'bfloat16', this run has 'float16'"),
        ({"labels": DecisionLabels(Label("skip", 11), Label("keep", 23))}, r"labels 'skip' \(11\) and 'write' \(22\)"),
        ({"prefill": ""}, "prefill"),
        (
            {"engine": {**ENGINE, "settings": {"adapter": "/tmp/adapter"}}},
            "adapter None, the engine has '/tmp/adapter', which makes it",
        ),
        ({"engine": {**ENGINE, "settings": {"quantization": {"load_in_4bit": True}}}}, "measured with quantization None"),
        ({"engine": {**ENGINE, "settings": {"quantization": "fp8"}}}, "quantization None, the engine has 'fp8'"),
        ({"engine": {**ENGINE, "settings": {"kv_cache_dtype": "fp8"}}}, "kv_cache_dtype 'auto', the engine has 'fp8'"),
        ({"engine": {**ENGINE, "settings": {"hf_overrides": "{'num_hidden_layers': 1}"}}}, "hf_overrides None"),
    ],
)
def test_a_run_unlike_the_measurement_is_denied(case: Case, change: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"engine": ENGINE, "labels": LABELS, "prefill": '{"decision": "'}
    with pytest.raises(VerificationError, match=message):
        case.check().check_use(**{**usual, **change})


@pytest.mark.parametrize("part", ["versions", "settings"])
def test_an_engine_that_is_described_otherwise_is_denied(case: Case, part: str) -> None:
    statement = json.loads(case.certificate.read_text())
    bound = next(item for item in statement["predicate"]["configuration"] if item["name"] == "engine")
    bound["annotations"][part] = ["a list"]
    bound["digest"]["sha256"] = hashlib.sha256(canonical(bound["annotations"]).encode()).hexdigest()
    case.certificate.write_text(json.dumps(statement))
    with pytest.raises(VerificationError, match=rf"{part} of the engine is \['a list'\], expected names and values"):
        case.check()


def test_what_was_asked_for_is_no_difference_where_the_same_is_used(case: Case) -> None:
    """A dtype of auto, of a bfloat16 checkpoint, is bfloat16."""
    certified = dataclasses.replace(case.check(), engine={**ENGINE, "settings": {"dtype": "auto", "seed": 0}})
    for settings in ({"seed": 0}, {"dtype": "bfloat16", "seed": 0, "adapter": None, "environment": None}):
        assert certified.check_use(engine={**ENGINE, "settings": settings}, labels=LABELS, prefill='{"decision": "') == ()
    moved = {"seed": 0, "environment": {"VLLM_CPU_ATTN_SPLIT_KV": False}}
    told = certified.check_use(engine={**ENGINE, "settings": moved}, labels=LABELS, prefill='{"decision": "')
    assert told == ("environment was None, is {'VLLM_CPU_ATTN_SPLIT_KV': False}",)


def test_smaller_differences_are_told(case: Case) -> None:
    engine = {**ENGINE, "versions": {"fake": "2"}, "device": "cuda", "settings": {"max_num_seqs": 8, "model": "elsewhere"}}
    told = case.check().check_use(engine=engine, labels=LABELS, prefill='{"decision": "')
    assert told == (
        "fake was '1', is '2'",
        "batch_size was 8, is None",
        "max_num_seqs was None, is 8",
        "device was 'cpu', is 'cuda'",
    )
