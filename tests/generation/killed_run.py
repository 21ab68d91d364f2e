"""A process that forks one run at a time and kills it with SIGKILL at a chosen moment.

The first task is done once in the parent as well, so that everything is imported and a run costs milliseconds. Moments are
numbered as they come: before and after each forward of the engine, before its loading, in the middle of each write, before and
after each sync, each rename, each removal and each cutting off. Reads one JSON task a line, ``{"model", "prompts", "out",
"kill_at", ...}``, and answers with the exit status (-9 when killed) and the moments seen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from lora_merge.generation.api import generate_gated
from lora_merge.generation.options import GenerateOptions
from lora_merge.generation.shards import Shard
from tests.generation.fakes import FakeEngine


class Moments:
    """Counts moments and dies at one of them; with ``log`` it writes down what each was."""

    def __init__(self, kill_at: int, log: int) -> None:
        self.count = 0
        self._kill_at = kill_at
        self._log = log

    def pass_by(self, what: str) -> None:
        self.count += 1
        os.write(self._log, f"{what}\n".encode())
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, module: Any, name: str) -> None:
        """Two moments at each call of ``module.name``."""
        real = getattr(module, name)

        def watched(*arguments: Any, **rest: Any) -> Any:
            self.pass_by(f"before {name}")
            result = real(*arguments, **rest)
            self.pass_by(f"after {name}")
            return result

        setattr(module, name, watched)

    def inside_writes(self) -> None:
        """One moment when half of a write has gone out."""
        real = os.pwrite

        def torn(descriptor: int, data: Any, offset: int) -> int:
            half = len(data) // 2
            real(descriptor, data[:half], offset)
            self.pass_by("half a write")
            return half + real(descriptor, data[half:], offset + half)

        os.pwrite = torn


def warm_up(task: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = GenerateOptions(0.5, max_quarantine=0.5)
        generate_gated(task["model"], task["prompts"], Path(folder) / "r.jsonl", options, open_engine=lambda *_: FakeEngine())


def run(task: dict[str, Any], log: int) -> None:
    moments = Moments(task["kill_at"], log)
    for name in ("fsync", "replace", "ftruncate", "unlink"):
        moments.around(os, name)
    moments.inside_writes()
    engine = FakeEngine()
    for name in ("score", "generate"):
        moments.around(engine, name)

    def open_engine(model: Path, settled: Any) -> FakeEngine:
        moments.pass_by("before loading")
        return engine

    options = GenerateOptions(
        0.5, chunk_size=task["chunk_size"], resume=task["resume"], shard=Shard.parse(task["shard"]), max_quarantine=0.5
    )
    generate_gated(task["model"], task["prompts"], task["out"], options, open_engine=open_engine)


def main() -> None:
    is_warm = False
    for line in sys.stdin:
        task = json.loads(line)
        if not is_warm:
            warm_up(task)
            is_warm = True
        reader, log = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            status = 1
            try:
                run(task, log)
                status = 0
            except Exception as error:
                os.write(log, f"error: {error}\n".encode())
            finally:
                os._exit(status)
        os.close(log)
        with os.fdopen(reader) as seen:
            moments = seen.read().splitlines()
        _, status = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "moments": moments}), flush=True)


if __name__ == "__main__":
    main()
