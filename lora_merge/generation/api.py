"""The public functions of the batch job; the command line is a thin shell over them."""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_merge.engines.labels import resolve_labels
from lora_merge.engines.model_files import load_tokenizer, max_positions, vocabulary_rows
from lora_merge.engines.protocol import Engine, GenerationLimits
from lora_merge.errors import no_file
from lora_merge.generation.chunk import Job
from lora_merge.generation.errors import GenerationError, NoCertificate
from lora_merge.generation.files import PendingFile, scan
from lora_merge.generation.gate import Gate, folder_bytes, open_gate
from lora_merge.generation.intake import Intake, take_in
from lora_merge.generation.options import GateOptions, GenerateOptions
from lora_merge.generation.phases import Phases
from lora_merge.generation.record import RunRecord, check_same_prompts, quarantine_path, read_record, record_path
from lora_merge.generation.run import EngineOpener, GenerateResult, Run, Say, silent
from lora_merge.generation.selection import Selection
from lora_merge.generation.settle import Settled, settle
from lora_merge.generation.sink import Sink
from lora_merge.generation.spool import PromptSpool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_checkpoint(model: Path, settled: Settled) -> Engine:
    """Load the checkpoint in the engine that was settled."""
    from lora_merge.engines.opening import open_engine

    return open_engine(
        settled.kind,
        model,
        dtype=settled.dtype,
        device=settled.engine.device,
        hf_options=settled.hf_options(),
        vllm_options=settled.vllm_options(),
    )


def check_gate(model: str | os.PathLike[str], options: GateOptions | None = None, phases: Phases | None = None) -> Gate:
    """Whether the checkpoint in ``model`` may be used: what stands before a run, and before a server.

    Raises:
        VerificationError, GenerationError: it may not; the message says why.
    """
    phases = phases or Phases()
    folder = Path(model)
    phases.check.expect(folder_bytes(folder))
    with phases.check.running():
        return open_gate(folder, options or GateOptions(), phases.check.advance)


def generate_gated(
    model: str | os.PathLike[str],
    prompts: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: GenerateOptions,
    *,
    phases: Phases | None = None,
    say: Say = silent,
    open_engine: EngineOpener = open_checkpoint,
) -> GenerateResult:
    """Decide every prompt, write a text for those the rule selects, and append one row a prompt to ``out``.

    The certificate is checked first, then every prompt is tokenized and checked, and only then is the model loaded. Rows come
    in the order of the prompts (docs/generation-format.md). Beside ``out`` lie the record of the run and the rows set aside.

    Args:
        model: the merged checkpoint's folder.
        prompts: JSON Lines; see :mod:`lora_merge.engines.prompt_file`.
        out: the results file to create, or with ``options.resume`` to go on with.
        phases: to watch the run.
        say: told of what a person should know, one sentence at a time.
        open_engine: how the checkpoint is loaded.

    Raises:
        UserError: the run must not start or cannot go on; what was saved before stays whole, and ``resume`` goes on with it.
    """
    phases = phases or Phases()
    with contextlib.ExitStack() as stack:
        target = Path(out)
        _check_files(Path(model), Path(prompts), target, options)
        sink = stack.enter_context(contextlib.closing(Sink.open(target, resume=options.resume)))
        earlier = _earlier(target, sink)
        sink.is_finished = earlier is not None and earlier.is_complete
        try:
            gate = check_gate(model, options.gate, phases)
        except NoCertificate as error:
            raise NoCertificate(f"{error} (or --allow-ungated to write texts that nobody vouches for)") from None
        say(standing(gate))
        settled = settle(options, gate, earlier)
        certified = gate.certificate.limits.skip_threshold if gate.certificate is not None else options.skip_threshold
        if certified != options.skip_threshold:
            say(f"the certificate counted flips at a skip threshold of {certified:g}, this run has {options.skip_threshold:g}")
        spool = stack.enter_context(PromptSpool(target.parent))
        aside = stack.enter_context(contextlib.closing(PendingFile(quarantine_path(target))))
        tokenizer = load_tokenizer(gate.model, trust_remote_code=options.engine.trust_remote_code)
        day = earlier.day if earlier is not None else None
        intake = _take_in(gate.model, tokenizer, Path(prompts), options, settled, day, spool, aside, phases)
        if earlier is None:
            intake.set_aside()  # to be looked at, also where it is too much
        else:
            check_same_prompts(earlier, intake.facts.to_json(), target)
        _check_quarantine(intake, options, say)
        job = _job(gate, tokenizer, intake, options, settled)
        settled = replace(settled, longest=intake.longest + 1 + options.max_tokens)
        return Run(gate, target, options, settled, intake, job, sink, phases, say).finish(earlier, open_engine)


def _earlier(out: Path, sink: Sink) -> RunRecord | None:
    """The record of what is there already: rows, or the end of a shard that got no prompts and so no rows."""
    if sink.holds_rows:
        return read_record(out)
    record = read_record(out) if record_path(out).exists() else None
    return record if record is not None and record.result is not None and record.result["counts"]["rows"] == 0 else None


def _check_files(model: Path, prompts: Path, out: Path, options: GenerateOptions) -> None:
    """Mistyped names, before anything is made or read."""
    if out.resolve().is_relative_to(model.resolve()):
        raise GenerationError(f"{out}: lies in the checkpoint's folder and would change it; give an --out elsewhere")
    if reason := no_file(prompts, "a JSON Lines prompt file"):
        raise GenerationError(f"prompt file {reason}")
    if out.is_dir():
        raise GenerationError(f"{out}: is a folder; expected the name of a results file as --out")
    if not out.exists():
        return
    if out.samefile(prompts):
        raise GenerationError(f"{out}: is the prompt file itself; give another --out")
    if out.is_file() and out.stat().st_size and not options.resume and not record_path(out).exists():
        raise GenerationError(
            f"{out}: exists and holds no results of gated-generate ({record_path(out).name} is not beside it); give another --out"
        )


def standing(gate: Gate) -> str:
    """How far the run is vouched for, in one line."""
    certificate = gate.certificate
    if certificate is None:
        return 'warning: NOT GATED: no certificate vouches for this checkpoint; every row is marked "gated": false'
    limit = f"at a limit of {certificate.limits.max_delta:g} for the mean |delta|"
    found = f"certificate {certificate.path}: {certificate.outcome} {limit}"
    found += f", accepted warnings: {', '.join(certificate.warnings)}" if certificate.warnings else ""
    if certificate.signed:
        return f"{found}, signed by the trusted key"
    return f"{found}; without --trusted-key it guards against mistakes, not against forgery"


def _take_in(
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Path,
    options: GenerateOptions,
    settled: Settled,
    day: datetime.date | None,
    spool: PromptSpool,
    aside: PendingFile,
    phases: Phases,
) -> Intake:
    """Tokenize every prompt and check that the ``model`` can take it."""
    room, rows = _room(model, options), vocabulary_rows(model)
    with phases.tokenize.running():
        scanned = scan(prompts)
        phases.tokenize.expect(scanned.lines)
        return take_in(
            scanned,
            tokenizer,
            spool=spool,
            aside=aside,
            prefill=settled.prefill,
            max_length=room,
            vocabulary=rows,
            chunk_size=settled.chunk_size,
            shard=options.shard,
            date=day,
            progress=phases.tokenize.advance,
        )


def _job(gate: Gate, tokenizer: PreTrainedTokenizerBase, intake: Intake, options: GenerateOptions, settled: Settled) -> Job:
    """What is done to every chunk, once both labels are known to be tokens of their own after the prompts."""
    labels = resolve_labels(tokenizer, intake.sample, prefill=settled.prefill, skip=settled.skip_label, write=settled.write_label)
    if gate.certificate is not None:
        gate.certificate.check_use(engine=gate.certificate.engine, labels=labels, prefill=settled.prefill)
    return Job(
        labels=labels,
        prefill=settled.prefill,
        selection=Selection(options.skip_threshold, options.write_all),
        limits=GenerationLimits(options.max_tokens),
        text_key=options.text_key,
        gated=gate.is_gated,
    )


def _room(model: Path, options: GenerateOptions) -> int | None:
    """Most tokens of a prompt: the positions less the decision token and the text."""
    limits = [limit for limit in (max_positions(model), options.engine.max_model_len) if limit is not None]
    if not limits:
        return None
    room = min(limits) - 1 - options.max_tokens
    if room < 1:
        raise GenerationError(
            f"the model has {min(limits)} positions, and {options.max_tokens} tokens are to be written after the decision: "
            "no room is left for a prompt; lower --max-tokens or raise --max-model-len"
        )
    return room


def _check_quarantine(intake: Intake, options: GenerateOptions, say: Say) -> None:
    facts = intake.facts
    if facts.quarantined == 0:
        return
    most = " / ".join(map(str, intake.troubles[:3]))
    if len(intake.troubles) > 3:
        most += f" / of other kinds: {sum(trouble.lines for trouble in intake.troubles[3:])}"
    where = f", see {intake.aside.path}" if intake.quarantined else ""
    found = f"{facts.quarantined} of {facts.rows} rows of {facts.path} cannot be used ({most}){where}"
    share = facts.quarantined / facts.rows
    if share > options.max_quarantine:
        raise GenerationError(
            f"{found}; that is {share:.1%}, above --max-quarantine {options.max_quarantine:.1%}: nothing was written"
        )
    if facts.accepted == 0:
        raise GenerationError(f"{found}; no prompt is left to decide")
    say(f"warning: {found}; they are set aside")
