"""Makes docs/results/gpu.md, its pictures and its JSON files from what ``run.py`` left.

    python benchmarks/gpu/report.py --results gpu-results

The text is that of page.md beside this script; what stands there in braces is filled in here. A part that is missing says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from tables import drift, engines, environment, equivalence, merge, models, recipes, targets  # noqa: E402

PARTS = ("drift", "equivalence", "recipe-fp4", "recipe-dora", "models", "engines", "engines-4b", "merge")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "docs" / "results")
    options = parser.parse_args()
    parts: dict[str, Any] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        file = options.results / f"{name}.json"
        if file.is_file():
            text = without_paths(file.read_text(encoding="utf-8"))
            parts[name] = json.loads(text)
            (options.out / f"gpu-{name}.json").write_text(text, encoding="utf-8")
    pieces = {"environment": environment.line(parts)}
    for module in (targets, drift, equivalence, recipes, models, engines, merge):
        pieces |= module.pieces(parts, options.out)
    page = (HERE / "page.md").read_text(encoding="utf-8")
    for name, text in pieces.items():
        page = page.replace("{" + name + "}", text)
    lines = "\n".join(line.rstrip() for line in page.splitlines())
    while "\n\n\n" in lines:
        lines = lines.replace("\n\n\n", "\n\n")
    (options.out / "gpu.md").write_text(lines.strip() + "\n", encoding="utf-8")


def without_paths(text: str) -> str:
    """The JSON with the names that this page uses in the place of the folders of the machine it was measured on."""
    words = shlex.split(json.loads(text)["environment"]["command"])
    given = dict(itertools.pairwise(words))
    names = {given.get("--base"): "models/gemma-3-270m"}
    for option, name in (("--work", "gpu-work"), ("--json", "gpu-results")):
        if option in given:
            names[str(Path(given[option]).parent)] = name
    for path, name in sorted(names.items(), key=lambda item: -len(item[0] or "")):
        if path and path != ".":
            text = text.replace(path, name)
    return re.sub(r'"/[^"]*/(examples/grocery/)', r'"\1', text)


if __name__ == "__main__":
    main()
