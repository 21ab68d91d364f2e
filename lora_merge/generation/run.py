"""From prompts that are ready to results that are whole: resume, load, go chunk by chunk, check, record."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lora_merge
from lora_merge.engines.protocol import Engine
from lora_merge.generation.chunk import Job
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.files import scan
from lora_merge.generation.gate import Gate
from lora_merge.generation.intake import Intake
from lora_merge.generation.options import GenerateOptions
from lora_merge.generation.phases import Phases
from lora_merge.generation.record import RunRecord, check_same_run, quarantine_path, record_path, write_record
from lora_merge.generation.rows import Tally, encode_row
from lora_merge.generation.settle import Settled
from lora_merge.generation.shards import chunk_count
from lora_merge.generation.sink import Sink

EngineOpener = Callable[[Path, Settled], Engine]
Say = Callable[[str], None]


def silent(text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class GenerateResult:
    """A finished run.

    Attributes:
        out: the results file.
        record: what it was made from; ``record.result`` says how it ended, its counts are of the whole file.
        quarantine: the file of the rows set aside; None when there are none.
        done_before: whether an earlier process had ended the run: this one loaded nothing, and the times and the count of resumed
            rows in the record are the earlier one's.
    """

    out: Path
    record: RunRecord
    quarantine: Path | None
    done_before: bool = False

    def to_json(self) -> dict[str, Any]:
        """The summary as ``--format json`` prints it (docs/generation-format.md)."""
        return {
            "out": str(self.out),
            "record": str(record_path(self.out)),
            "quarantine": None if self.quarantine is None else str(self.quarantine),
            "gated": self.record.gate["gated"],
            "shard": str(self.record.shard),
            "done_before": self.done_before,
            **(self.record.result or {}),
        }


@dataclass(frozen=True)
class Run:
    """One run, with everything that was settled before a model loads."""

    gate: Gate
    out: Path
    options: GenerateOptions
    settled: Settled
    intake: Intake
    job: Job
    sink: Sink
    phases: Phases
    say: Say

    def finish(self, earlier: RunRecord | None, open_engine: EngineOpener) -> GenerateResult:
        """Do what an ``earlier`` process has not done. Nothing is loaded when nothing is left."""
        tally = Tally()
        record = self._record(earlier.engine if earlier else {})
        whole = 0
        if earlier is not None:
            check_same_run(earlier, record, self.out)
            self.intake.set_aside()
            whole = self._restore(tally)
            if earlier.is_complete and tally.rows == len(self.intake.spool):
                return self._conclude(earlier, tally, tally.rows)
        resumed = tally.rows
        spool = self.intake.spool
        self.phases.decide.expect(len(spool), before=tally.rows)
        self._expect_texts(tally, before=tally.written)
        if whole < chunk_count(len(spool), self.settled.chunk_size):
            with self._engine(open_engine) as engine:
                record = self._record(self._checked_description(engine))
                if earlier is not None:
                    check_same_run(earlier, record, self.out)
                else:
                    write_record(record, self.out)
                self._work(engine, whole, tally)
                self.gate.check_unchanged()
        return self._conclude(record, tally, resumed)

    def _work(self, engine: Engine, whole: int, tally: Tally) -> None:
        """Every chunk from number ``whole`` on. The first doubt about the decisions is said at once: the rest takes hours.

        Rows are saved only while the files are those that were checked: in Transformers on a CPU they are still being read.
        """
        doubted = False
        try:
            for prompts in itertools.islice(self.intake.spool.chunks(self.settled.chunk_size), whole, None):
                rows = self.job.rows(engine, prompts, self.phases)
                with self.phases.save.running():
                    self.gate.check_unchanged()
                    self.sink.append([encode_row(row) for row in rows])
                self.phases.save.advance(len(rows))
                for row in rows:
                    tally.add(row)
                self._expect_texts(tally)
                if not doubted and (doubt := tally.doubt_of_decisions):
                    self.say(f"warning: {doubt}")
                    doubted = True
        finally:
            if not self.sink.holds_rows:
                record_path(self.out).unlink(missing_ok=True)

    def _restore(self, tally: Tally) -> int:
        """Whole chunks that an earlier process wrote."""
        self.phases.restore.expect(len(self.intake.spool))
        chunks = self.intake.spool.chunks(self.settled.chunk_size)
        with self.phases.restore.running():
            whole = self.sink.restore(([prompt.id for prompt in chunk] for chunk in chunks), tally)
        self.phases.restore.advance(tally.rows)
        self.say(f"resuming {self.out}: {tally.rows:,} of {len(self.intake.spool):,} rows are whole")
        return whole

    def _engine(self, open_engine: EngineOpener) -> contextlib.closing[Engine]:
        self.phases.load.expect(1)
        with self.phases.load.running():
            engine = open_engine(self.gate.model, self.settled)
        self.phases.load.advance(1)
        return contextlib.closing(engine)

    def _checked_description(self, engine: Engine) -> dict[str, Any]:
        """What the engine says of itself, once it is what was certified and what was hashed."""
        self.gate.check_loaded()
        described = engine.describe()
        differences = self.gate.check_use(described, self.job.labels, self.job.prefill)
        if differences:
            self.say(f"the certificate was measured under other circumstances, which may move a number: {'; '.join(differences)}")
        return described

    def _expect_texts(self, tally: Tally, before: float = 0.0) -> None:
        """How many texts there will be, if the prompts to come are like those so far."""
        if tally.rows:
            total = tally.written / tally.rows * len(self.intake.spool)
            self.phases.write.expect(round(total), before or self.phases.write.before)

    def _record(self, engine: Mapping[str, Any]) -> RunRecord:
        return RunRecord(
            settings=self.settled.to_json(self.options, self.job.labels),
            model={"path": str(self.gate.model), "root": self.gate.root},
            prompts=self.intake.facts.to_json(),
            engine=engine,
            gate=self.gate.to_json(),
            shard=self.options.shard,
            tool=f"lora-merge {lora_merge.__version__}",
        )

    def _conclude(self, record: RunRecord, tally: Tally, resumed: int) -> GenerateResult:
        """Count what lies on disk, not what was meant to, and close the record."""
        quarantine = quarantine_path(self.out)
        results = scan(self.out)
        aside = scan(quarantine) if self.intake.quarantined else None
        quarantined = aside.lines if aside is not None else 0
        expected = len(self.intake.spool) + self.intake.quarantined
        if record.result is not None and record.result["sha256"] != results.sha256:
            raise GenerationError(
                f"{self.out}: was changed after its run had ended (SHA-256 {results.sha256[:12]}…, the record has "
                f"{str(record.result['sha256'])[:12]}…); bring the file back, or run again with another --out"
            )
        if results.lines + quarantined != expected or tally.rows != results.lines:
            raise GenerationError(
                f"{self.out}: holds {results.lines} rows and {quarantine.name} {quarantined}, together not the {expected} rows "
                "of the input; the files were changed during the run"
            )
        result = {
            "input_rows": expected,
            "quarantined": quarantined,
            "counts": tally.to_json(),
            "sha256": results.sha256,
            "quarantine_sha256": aside.sha256 if aside is not None else None,
            "resumed_rows": resumed,
            "phases": self.phases.to_json(),
        }
        if doubt := tally.doubt_of_texts:
            self.say(f"warning: {doubt}")
        ended = record if record.is_complete else record.ended(result)
        self.sink.is_finished = True
        write_record(ended, self.out)
        return GenerateResult(self.out, ended, quarantine if quarantined else None, done_before=record.is_complete)
