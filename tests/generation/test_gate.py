"""Nothing runs without a certificate of these very files, used as it was measured. Every refusal comes before a model loads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess

import pytest

from lora_merge.engines.labels import DecisionLabels, Label
from lora_merge.engines.model_files import load_tokenizer
from lora_merge.engines.transformers_engine import TransformersEngine
from lora_merge.errors import UserError
from lora_merge.generation.api import check_gate, generate_gated
from lora_merge.generation.errors import GenerationError, NoCertificate
from lora_merge.generation.options import EngineOptions, GateOptions, GenerateOptions
from lora_merge.generation.record import read_record
from lora_merge.generation.sink import Sink
from tests.generation.builders import ENGINE, certify, make_checkpoint, read_rows
from tests.generation.fakes import FakeEngine, open_fake
from verification.checks import Check, Outcome
from verification.errors import VerificationError
from verification.gate import RECIPE_CHECK, certificate_path
from verification.limits import Limits

ASSUMED = Check(RECIPE_CHECK, Outcome.WARNED, "the recipe is assumed")
OTHER_WARNING = Check("control", Outcome.WARNED, "the bare base was not scored")


def run(checkpoint, prompts, *, open_engine=open_fake, say=lambda text: None, gate=None, engine=None, **options):
    settings = GenerateOptions(0.5, gate=gate or GateOptions(), engine=engine or EngineOptions(), **options)
    return generate_gated(checkpoint, prompts, prompts.with_name("out.jsonl"), settings, open_engine=open_engine, say=say)


def must_not_load(model, settled):
    raise AssertionError("a model was loaded")


def refused(checkpoint, prompts, match, error=UserError, exit_code=1, **options):
    before = sorted(path.name for path in prompts.parent.iterdir())
    with pytest.raises(error, match=match) as caught:
        run(checkpoint, prompts, open_engine=must_not_load, **options)
    assert caught.value.exit_code == exit_code
    assert sorted(path.name for path in prompts.parent.iterdir()) == before


def test_a_certified_checkpoint_runs_and_its_rows_say_so(checkpoint, prompts):
    said = []
    result = run(checkpoint, prompts, say=said.append)
    assert {row["gated"] for row in read_rows(result.out)} == {True}
    assert result.record.gate["outcome"] == "PASSED"
    assert "PASSED" in said[0] and "guards against mistakes, not against forgery" in said[0]


def test_without_a_certificate(checkpoint, prompts):
    shutil.rmtree(certificate_path(checkpoint).parent)
    refused(
        checkpoint,
        prompts,
        "has no certificate at .*gate.intoto.json; run: verify-skip-drift.*or --allow-ungated",
        GenerationError,
    )
    refused(checkpoint, prompts, "has no certificate at", gate=GateOptions(certificate=checkpoint / "elsewhere.json"))


@pytest.fixture
def link(checkpoint):
    """``current``, a link to a link to the checkpoint, as deployments switch versions."""
    (checkpoint.parent / "latest").symlink_to(checkpoint.name)
    (checkpoint.parent / "current").symlink_to("latest")
    return checkpoint.parent / "current"


def test_a_link_to_the_checkpoint_finds_the_certificate_beside_it(checkpoint, link, prompts):
    said = []
    result = run(link, prompts, say=said.append)
    assert result.record.gate["certificate"] == str(certificate_path(checkpoint))
    assert f"certificate {certificate_path(checkpoint)}: PASSED" in said[0]
    assert check_gate(f"{link}/").root == check_gate(checkpoint).root


def test_the_report_beside_the_links_own_name_comes_first(checkpoint, link, prompts):
    """verify-skip-drift --merged current writes there; what it found last counts."""
    own = certificate_path(link)
    shutil.copytree(certificate_path(checkpoint).parent, own.parent)
    assert check_gate(link).certificate.path == own
    certify(link, drift=0.05)
    beside = rf"{certificate_path(checkpoint)}, beside the folder that {link} leads to, was not looked at"
    refused(link, prompts, f"certificate {own}: its result is FAILED.*; {beside}", VerificationError)
    own.unlink()  # a run that came to no verdict leaves a report without a certificate
    refused(link, prompts, f"has no certificate at {own}; .*; {beside}", NoCertificate)
    assert check_gate(link, GateOptions(certificate=certificate_path(checkpoint))).is_gated


def test_a_link_without_a_certificate_says_where_none_lies(checkpoint, link, prompts):
    shutil.rmtree(certificate_path(checkpoint).parent)
    refused(
        link, prompts, f"has no certificate at {certificate_path(link)} or {certificate_path(checkpoint)}; run:", NoCertificate
    )


def test_a_checkpoint_below_a_linked_folder_has_one_place_for_its_certificate(checkpoint, prompts, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "models").symlink_to(checkpoint.parent)
    model = tmp_path / "elsewhere" / "models" / checkpoint.name
    assert check_gate(model).certificate.path == certificate_path(model)
    shutil.rmtree(certificate_path(checkpoint).parent)
    refused(model, prompts, f"has no certificate at {certificate_path(model)}; run:", NoCertificate)


def test_with_a_failed_certificate(checkpoint, prompts):
    certify(checkpoint, drift=0.05)
    refused(checkpoint, prompts, "its result is FAILED", VerificationError)


def test_with_the_certificate_of_another_checkpoint(checkpoint, prompts, tmp_path):
    other = make_checkpoint(tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    refused(checkpoint, prompts, "was changed since it was certified", gate=GateOptions(certificate=certify(other)))


@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_after_any_byte_of_the_weights_changed(checkpoint, prompts, place):
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[round(place * (len(content) - 1))] ^= 1
    weights.write_bytes(content)
    refused(checkpoint, prompts, r"model\.safetensors was changed since it was certified", VerificationError)


def test_after_files_came_went_or_were_renamed(checkpoint, prompts):
    stray = checkpoint / "adapter_model.safetensors"
    stray.write_bytes(b"stray")
    refused(checkpoint, prompts, "adapter_model.safetensors was added")
    stray.unlink()
    (checkpoint / "tokenizer_config.json").rename(checkpoint / "tokenizer_config.bak")
    refused(checkpoint, prompts, "tokenizer_config.json is missing")


def test_with_a_limit_that_is_looser_than_the_runs(checkpoint, prompts):
    certify(checkpoint, limits=Limits(0.05))
    refused(checkpoint, prompts, "judged by a mean .delta. of up to 0.05, this run allows 0.02")
    assert run(checkpoint, prompts, gate=GateOptions(max_delta=0.05)).record.gate["gated"]


def test_warnings_need_their_own_consent(checkpoint, prompts):
    certify(checkpoint, findings=[ASSUMED])
    refused(checkpoint, prompts, "--accept-assumed-recipe")
    refused(checkpoint, prompts, "--accept-assumed-recipe", gate=GateOptions(accept_warnings=True))
    certify(checkpoint, findings=[ASSUMED, OTHER_WARNING])
    refused(checkpoint, prompts, "--accept-warnings", gate=GateOptions(accept_assumed_recipe=True))
    said = []
    both = GateOptions(accept_assumed_recipe=True, accept_warnings=True)
    result = run(checkpoint, prompts, gate=both, say=said.append)
    assert result.record.gate["warnings"] == ["control", RECIPE_CHECK]
    assert "accepted warnings: control, recipe-provenance" in said[0]


def make_key(path):
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", path], check=True, capture_output=True)
    public = path.with_suffix(".pub")
    subprocess.run(["openssl", "pkey", "-in", path, "-pubout", "-out", public], check=True, capture_output=True)
    return path, public


def test_with_a_trusted_key_only_its_signature_opens(checkpoint, prompts, tmp_path):
    key, public = make_key(tmp_path / "gate.key")
    _, stranger = make_key(tmp_path / "stranger.key")
    refused(checkpoint, prompts, "is not signed", gate=GateOptions(trusted_key=public))
    certify(checkpoint, sign_key=key)
    refused(checkpoint, prompts, "none of its 1 signatures", gate=GateOptions(trusted_key=stranger))
    said = []
    assert run(checkpoint, prompts, gate=GateOptions(trusted_key=public), say=said.append).record.gate["signed"]
    assert "signed by the trusted key" in said[0]


def test_used_in_another_way_than_it_was_measured(checkpoint, prompts):
    refused(checkpoint, prompts, "measured with labels 'skip' and 'write', this run has 'no' and 'write'", skip_label="no")
    refused(checkpoint, prompts, "measured with prefill", prefill='{"answer": "')
    refused(checkpoint, prompts, "measured with dtype 'float32', this run has 'bfloat16'", engine=EngineOptions(dtype="bfloat16"))
    certify(checkpoint, engine={**ENGINE, "kind": "vllm"})
    refused(checkpoint, prompts, "measured with engine 'vllm', this run has 'transformers'", engine=EngineOptions("hf"))
    certify(checkpoint, engine={**ENGINE, "kind": "llama.cpp"})
    refused(checkpoint, prompts, "measured in engine 'llama.cpp'; this version runs transformers, vllm")


def test_with_labels_that_are_other_tokens_here(checkpoint, prompts):
    """The tokenizer's files are certified, but another library version may read them differently."""
    certify(checkpoint, labels=DecisionLabels(Label("skip", 7), Label("write", 8)))
    refused(checkpoint, prompts, r"measured with labels 'skip' \(7\) and 'write' \(8\), this run has 'skip' \(")


def test_an_engine_that_turns_out_to_be_another_writes_nothing(checkpoint, prompts):
    class Bfloat16(FakeEngine):
        def describe(self):
            return {**super().describe(), "dtype": "bfloat16"}

    opened = []
    with pytest.raises(VerificationError, match="measured with dtype 'float32', this run has 'bfloat16'"):
        run(checkpoint, prompts, open_engine=lambda model, settled: opened.append(Bfloat16()) or opened[0])
    assert opened[0].is_closed and not opened[0].scored
    assert not prompts.with_name("out.jsonl").exists()


@pytest.mark.parametrize("gate", [GateOptions(), GateOptions(allow_ungated=True)])
def test_an_engine_of_another_folder_runs_nothing(checkpoint, prompts, tmp_path, gate):
    """From Python, ``open_engine`` may load whatever it likes. Real engines, which say what they loaded."""
    other = make_checkpoint(tmp_path / "other")
    for elsewhere in (
        lambda model, settled: TransformersEngine.from_checkpoint(other, dtype="float32", device="cpu"),
        lambda model, settled: TransformersEngine.from_model(
            TransformersEngine.from_checkpoint(model, device="cpu")._live().module, load_tokenizer(model)
        ),
    ):
        with pytest.raises(GenerationError, match=rf"^{checkpoint}: the engine runs ({other}|in memory), which is not the"):
            run(checkpoint, prompts, open_engine=elsewhere, gate=gate, engine=EngineOptions("hf"))
    assert not prompts.with_name("out.jsonl").exists()


def test_an_engine_with_an_adapter_on_top_runs_nothing(checkpoint, prompts, tmp_path):
    from peft import LoraConfig, get_peft_model

    bare = TransformersEngine.from_checkpoint(checkpoint, device="cpu")._live().module
    get_peft_model(bare, LoraConfig(target_modules=["q_proj"], r=2)).save_pretrained(tmp_path / "adapter")

    def with_adapter(model, settled):
        return TransformersEngine.from_checkpoint(model, adapter=tmp_path / "adapter", device="cpu")

    with pytest.raises(VerificationError, match=f"measured with adapter None, the engine has '{tmp_path / 'adapter'}'"):
        run(checkpoint, prompts, open_engine=with_adapter)
    assert not prompts.with_name("out.jsonl").exists()


def test_the_engine_of_the_folder_runs_under_any_of_its_names(checkpoint, prompts, monkeypatch):
    monkeypatch.chdir(checkpoint.parent)
    opened = run(
        checkpoint,
        prompts,
        open_engine=lambda model, settled: TransformersEngine.from_checkpoint(model.name, dtype="float32", device="cpu"),
    )
    assert opened.record.engine["settings"]["model"] == checkpoint.name


def test_lesser_differences_are_said(checkpoint, prompts):
    certify(checkpoint, engine={**ENGINE, "versions": {"fake": "0"}, "device": "NVIDIA H200"})
    said = []
    run(checkpoint, prompts, say=said.append)
    assert any("fake was '0', is '1'" in text and "device was 'NVIDIA H200', is 'cpu'" in text for text in said)


def test_another_threshold_than_the_certified_one_is_said(checkpoint, prompts):
    said = []
    run(checkpoint, prompts, say=said.append)
    assert not any("at a skip threshold" in text for text in said)
    settings = GenerateOptions(0.25)
    generate_gated(checkpoint, prompts, prompts.with_name("other.jsonl"), settings, open_engine=open_fake, say=said.append)
    assert any("at a skip threshold of 0.5, this run has 0.25" in text for text in said)


def test_results_inside_the_checkpoint_are_refused(checkpoint, prompts):
    with pytest.raises(GenerationError, match="lies in the checkpoint's folder"):
        generate_gated(checkpoint, prompts, checkpoint / "r.jsonl", GenerateOptions(0.5), open_engine=must_not_load)
    assert check_gate(checkpoint).is_gated


def test_the_certified_settings_are_the_default(checkpoint, prompts):
    settled = []

    def look(model, choice):
        settled.append(choice)
        return FakeEngine()

    run(checkpoint, prompts, open_engine=look)
    assert (settled[0].kind, settled[0].dtype) == ("hf", "float32")
    assert (settled[0].prefill, settled[0].skip_label, settled[0].write_label) == ('{"decision": "', "skip", "write")


@pytest.mark.parametrize("change", ["touched", "added", "edited and set back"])
def test_a_file_that_changes_while_the_model_loads_stops_the_run(checkpoint, prompts, change):
    def swapping(model, settled):
        if change == "touched":
            os.utime(model / "model.safetensors", ns=(1, 1))
        elif change == "edited and set back":
            weights = model / "model.safetensors"
            before = weights.stat()
            data = weights.read_bytes()
            with weights.open("r+b") as file:
                file.write(data[:-1] + bytes([data[-1] ^ 1]))
            os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        else:
            (model / "model-00002.safetensors").touch()
        return FakeEngine()

    with pytest.raises(GenerationError, match="changed while the run was starting"):
        run(checkpoint, prompts, open_engine=swapping)
    assert not prompts.with_name("out.jsonl").exists()


def test_another_folder_in_its_place_while_the_model_loads_stops_the_run(checkpoint, prompts):
    """Afterwards every file is the one that was hashed, with the times that it had."""

    def swapping(model, settled):
        model.rename(model.parent / "aside")
        shutil.copytree(model.parent / "aside", model)
        engine = open_fake(model, settled)
        model.rename(model.parent / "other")
        (model.parent / "aside").rename(model)
        return engine

    with pytest.raises(GenerationError, match=f"^{checkpoint}: the folder was moved, or something in it came or went, while"):
        run(checkpoint, prompts, open_engine=swapping)
    assert not prompts.with_name("out.jsonl").exists()


def test_a_link_that_is_switched_while_the_model_loads_leads_nobody_elsewhere(checkpoint, link, prompts):
    """As a deployment does it; back again, nothing would tell of it."""
    opened = []

    def switching(model, settled):
        (checkpoint.parent / "latest").unlink()
        (checkpoint.parent / "latest").symlink_to("elsewhere")
        opened.append(model)
        return open_fake(model, settled)

    result = run(link, prompts, open_engine=switching)
    assert opened == [checkpoint]
    assert result.record.model["path"] == str(checkpoint)


@pytest.mark.parametrize("change", ["written into", "replaced", "removed", "added", "folder removed"])
def test_a_file_that_changes_during_the_run_ends_it_before_the_next_rows_are_saved(checkpoint, prompts, change):
    """In Transformers on a CPU the weights stay memory-mapped: what is written into the file decides from then on."""
    weights = checkpoint / "model.safetensors"

    class Meanwhile(FakeEngine):
        def score(self, prompts, labels, *, progress):
            scores = super().score(prompts, labels, progress=progress)
            if len(self.scored) == 32:
                if change == "written into":
                    with weights.open("r+b") as file:
                        file.seek(-1, os.SEEK_END)
                        file.write(b"?")
                elif change == "replaced":
                    shutil.copy(weights, checkpoint.parent / "new")
                    (checkpoint.parent / "new").rename(weights)
                elif change == "added":
                    (checkpoint / "model-00002.safetensors").touch()
                elif change == "removed":
                    weights.unlink()
                else:
                    checkpoint.rename(checkpoint.parent / "aside")
            return scores

    name = {"added": "model-00002.safetensors", "folder removed": ""}.get(change, "model.safetensors")
    match = f"^{checkpoint / name}: changed during the run.*saved rows stay: bring the certified file back"
    with pytest.raises(GenerationError, match=match) as caught:
        run(checkpoint, prompts, open_engine=lambda model, settled: Meanwhile(), chunk_size=16)
    assert "\n" not in str(caught.value)
    rows = read_rows(prompts.with_name("out.jsonl"))
    assert [row["id"] for row in rows] == [f"p{index}" for index in range(16)]


def test_a_file_that_changes_after_the_last_rows_leaves_the_run_unfinished(checkpoint, prompts, monkeypatch):
    """What is written through a mapping may show in the file's times only later."""
    append = Sink.append

    def late(sink, lines):
        append(sink, lines)
        os.utime(checkpoint / "model.safetensors", ns=(1, 1))

    monkeypatch.setattr(Sink, "append", late)
    with pytest.raises(GenerationError, match="changed during the run"):
        run(checkpoint, prompts)
    out = prompts.with_name("out.jsonl")
    assert len(read_rows(out)) == 40 and not read_record(out).is_complete


@pytest.mark.parametrize("fate", ["removed", "replaced"])
def test_the_record_names_the_certificate_that_allowed_the_run(checkpoint, prompts, fate):
    """Whoever verifies again meanwhile clears the report folder. Oracle: hashlib over the file before the run."""
    path = certificate_path(checkpoint)
    before = hashlib.sha256(path.read_bytes()).hexdigest()

    def meanwhile(model, settled):
        path.unlink() if fate == "removed" else path.write_text("hello")
        return open_fake(model, settled)

    assert run(checkpoint, prompts, open_engine=meanwhile).record.gate["certificate_sha256"] == before


def test_ungated_is_possible_loud_and_marked(checkpoint, prompts):
    shutil.rmtree(certificate_path(checkpoint).parent)
    said = []
    result = run(checkpoint, prompts, gate=GateOptions(allow_ungated=True), say=said.append, engine=EngineOptions("hf"))
    assert said[0].startswith("warning: NOT GATED")
    assert {row["gated"] for row in read_rows(result.out)} == {False}
    assert result.record.gate == {"gated": False}
    assert len(result.record.model["root"]) == 64


def test_ungated_stays_ungated_beside_a_good_certificate(checkpoint, prompts):
    result = run(checkpoint, prompts, gate=GateOptions(allow_ungated=True), engine=EngineOptions("hf"))
    assert {row["gated"] for row in read_rows(result.out)} == {False}


def test_the_ungated_root_is_the_certified_one(checkpoint):
    """Oracle: the certificate, whose root comes from the merging room."""
    assert check_gate(checkpoint, GateOptions(allow_ungated=True)).root == check_gate(checkpoint).root


def test_options_that_contradict_each_other_or_have_no_effect(checkpoint, prompts):
    with pytest.raises(GenerationError, match="--allow-ungated reads no certificate") as caught:
        GateOptions(certificate="c.json", allow_ungated=True)
    assert caught.value.exit_code == 2
    with pytest.raises(GenerationError, match="between 0 and 1"):
        GateOptions(max_delta=0)
    refused(checkpoint, prompts, "--max-num-seqs has no effect on engine hf", exit_code=2, engine=EngineOptions(max_num_seqs=4))
    certify(checkpoint, engine={**ENGINE, "kind": "vllm"})
    refused(checkpoint, prompts, "--batch-size has no effect on engine vllm", exit_code=2, engine=EngineOptions(batch_size=4))


def test_a_checkpoint_that_is_not_there(tmp_path, prompts):
    refused(tmp_path / "nowhere", prompts, "no such folder; expected a merged checkpoint")


def test_the_gate_alone_tells_what_a_server_may_load(checkpoint):
    gate = check_gate(checkpoint)
    assert gate.is_gated and gate.engine == "hf" and gate.dtype == "float32"
    assert json.loads(json.dumps(gate.to_json()))["gated"] is True
    (checkpoint / "model.safetensors").write_bytes(b"other")
    with pytest.raises(VerificationError, match="was changed"):
        check_gate(checkpoint)
