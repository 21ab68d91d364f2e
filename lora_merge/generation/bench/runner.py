"""Runs each task in a process of its own, watches its memory, and keeps its result so that it need not be repeated."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lora_merge.generation.bench.arms import ArmResult, Task
from lora_merge.generation.bench.memory import MemoryWatch, OtherLoad
from lora_merge.generation.bench.progress import ProgressLines
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.files import replaced_file
from lora_merge.generation.orphans import end_with_descendants


class Runner:
    """Measures tasks; results, and what the processes said, lie in ``folder``, each as soon as it is measured.

    With ``resume`` a task whose result is there already is not measured again, if it is the very same task on the same
    ``machine``. ``say`` is told of each task, of how far it is, and of its time.
    """

    def __init__(
        self,
        folder: Path,
        machine: Mapping[str, Any],
        *,
        resume: bool = False,
        verbose: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._folder = folder
        self._machine = dict(machine)
        self._say = say
        self._resume = resume
        self._verbose = verbose
        folder.mkdir(parents=True, exist_ok=True)

    def arm(self, task: Task) -> ArmResult:
        """Measure one arm."""
        return ArmResult.from_json(self.measure(task))

    def measure(self, task: Task) -> dict[str, Any]:
        """Measure any task; returns what its process found, with the load of other processes and the peak memory of an arm.

        Raises:
            GenerationError: the process failed; the message ends with the last line it wrote.
        """
        stored = self._folder / f"{task.name}.json"
        if self._resume and (found := self._stored(stored, task)) is not None:
            self._say(f"{task.name}: measured before")
            return found
        self._say(f"{task.name}: measuring")
        started = time.monotonic()
        result = self._run(task)
        with replaced_file(stored) as file:
            file.write(json.dumps({"task": task.digest, "machine": self._machine, "result": result}).encode())
        self._say(f"{task.name}: measured in {time.monotonic() - started:,.0f} s, starting included")
        return result

    def _stored(self, path: Path, task: Task) -> dict[str, Any] | None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        same = content.get("task") == task.digest and content.get("machine") == self._machine
        return dict(content["result"]) if same else None

    def _run(self, task: Task) -> dict[str, Any]:
        task_file, result_file = self._folder / f"{task.name}.task.json", self._folder / f"{task.name}.partial.json"
        log = self._folder / f"{task.name}.log"
        result_file.unlink(missing_ok=True)
        task_file.write_text(json.dumps(task.to_json()), encoding="utf-8")
        progress_file = self._folder / f"{task.name}.progress.json"
        module = ["-m", "lora_merge.generation.bench.worker"]
        command = [sys.executable, *module, *map(str, (task_file, result_file, progress_file))]
        lines = ProgressLines(progress_file, task.name, self._say)
        with open(log, "wb") as said:
            output = None if self._verbose else said
            asked, load = time.time(), OtherLoad()
            with subprocess.Popen([*command, repr(asked)], stdout=output, stderr=output) as process:
                try:
                    with MemoryWatch(process.pid) as watch:
                        status = _wait(process, lines)
                except BaseException:
                    end_with_descendants(process)
                    raise
        if status != 0 or not result_file.exists():
            raise GenerationError(f"{task.name} failed with exit code {status}: {_last_line(log)}; see {log}")
        result = json.loads(result_file.read_text(encoding="utf-8"))
        result_file.unlink()
        for file in (task_file, progress_file):
            file.unlink(missing_ok=True)
        result["other_load"] = load.share()
        if task.part == "arm":
            result["memory"] = {**result["memory"], "host_peak": watch.host, "device_peak": watch.device}
        return dict(result)


def _wait(process: subprocess.Popen[bytes], lines: ProgressLines) -> int:
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            lines.look()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
