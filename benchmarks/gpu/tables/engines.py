"""What bench-engines found, as tables and its own pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables.common import NOT_MEASURED, failures, table


def pieces(parts: dict[str, Any], out: Path) -> dict[str, str]:
    """Of the example's own model with pictures and of the same at the size of a larger one; of both an earlier run's sweep."""
    return {
        "engines": piece(parts, "engines", out),
        "engines_4b": piece(parts, "engines-4b", None),
        "engines_earlier_sweep": earlier_sweep(parts, "engines"),
        "engines_4b_earlier_sweep": earlier_sweep(parts, "engines-4b"),
    }


def earlier_sweep(parts: dict[str, Any], name: str) -> str:
    """Of the run that is kept beside the present one, which tried smaller batches; nothing where none is kept."""
    found = parts.get(name, {}).get("measured", {}).get("third sitting")
    return sweep(found["report"]) if found else ""


def piece(parts: dict[str, Any], name: str, pictures: Path | None) -> str:
    part = parts.get(name)
    if part is None or "engines" not in part["measured"]:
        return NOT_MEASURED + "\n\n" + failures(part)
    found = part["measured"].get("with stock") or part["measured"]["engines"]
    return "\n\n".join(text for text in sections(found["command"], found["report"], name, pictures) if text)


def sections(command: str, report: dict[str, Any], name: str, pictures: Path | None) -> list[str]:
    from lora_merge.generation.bench.arms import ARMS

    titles = {arm.name: arm.title for arm in ARMS}
    prompts = report["prompts"]
    return [
        f"```console\n{command}\n```",
        f"{prompts['number']:,} distinct prompts ({prompts['tokens']:,} tokens); the same {prompts['to_write']:,} of them get a "
        f"text in every arm ({prompts['text_tokens']:,} tokens), greedy. Raw numbers: [gpu-{name}.json](gpu-{name}.json); "
        "[what is measured and how](../bench-engines.md).",
        times(report, titles),
        ratios(report, titles),
        proof(report, titles),
        memory(report, titles),
        threshold(report, titles),
        sweep(report),
        *(drawn(report, pictures) if pictures else []),
    ]


def drawn(report: dict[str, Any], out: Path) -> list[str]:
    from lora_merge.generation.bench.pictures import draw

    scratch = out / ".engines"
    scratch.mkdir(exist_ok=True)
    links = []
    for name in draw(report, scratch):
        (scratch / name).replace(out / f"gpu-engines-{name}")
        links.append(f"![{Path(name).stem}](gpu-engines-{name})")
    scratch.rmdir()
    return links


def times(report: dict[str, Any], titles: dict[str, str]) -> str:
    phases = ("import", "load", "warm_up", "decide", "write", "one_shot")
    rows = []
    for name, arm in report["arms"].items():
        shown = [f"{arm['seconds'][phase]:,.1f}" if phase in arm["seconds"] else "–" for phase in phases]
        tokens = arm["rates"].get("text_tokens")
        rates = [f"{arm['rates']['prompts']:,.0f}", "–" if tokens is None else f"{tokens:,.0f}"]
        rows.append([titles.get(name, name), *shown, f"**{arm['work_seconds']:,.1f}**", *rates])
    heads = ["arm", "import", "load", "warm-up", "decide", "write", "one-shot", "**work**, s", "prompts/s", "text tokens/s"]
    return table(heads, rows)


def ratios(report: dict[str, Any], titles: dict[str, str]) -> str:
    rows = []
    for entry in report["ratios"]:
        even = entry["break_even"]
        phases = [f"{entry[phase]:.2f}" if phase in entry else "–" for phase in ("decide", "write")]
        shown = "never" if even is None else f"{even:,.0f} prompts"
        rows.append(
            [
                titles.get(entry["slow"], entry["slow"]),
                titles.get(entry["fast"], entry["fast"]),
                f"**{entry['total']:.2f}**",
                *phases,
                shown,
            ]
        )
    for entry in report["refused_ratios"]:
        names = [titles.get(entry["slow"], entry["slow"]), titles.get(entry["fast"], entry["fast"])]
        rows.append([*names, "none", "", "", f"not the same work: {'; '.join(entry['refused'])}"])
    heads = ["time of", "over time of", "total", "decide", "write", "the second wins, loading included, from"]
    return table(heads, rows) if rows else ""


def proof(report: dict[str, Any], titles: dict[str, str]) -> str:
    rows = []
    for name, found in report["proof"].items():
        near = found.get("near_ties")
        rows.append(
            [
                titles.get(name, name),
                f"{found['agreement']:.2%}",
                f"{found['disagreements']:,}" + ("" if near is None else f" ({near} near ties)"),
                f"{found['token_difference']:.2%}",
                f"{found['differing']:.1%} of {found['compared']:,}",
            ]
        )
    reference = titles.get(report["reference"], report["reference"])
    heads = [f"against {reference}", "decisions agree", "differ", "tokens differ by", "texts differ"]
    return table(heads, rows) if rows else ""


def memory(report: dict[str, Any], titles: dict[str, str]) -> str:
    rows = []
    for name, arm in report["arms"].items():
        sizes = [arm["memory"].get(key) for key in ("host_peak", "device_peak")]
        wasted, kv = arm["wasted_share"], arm["kv"] or {}
        rows.append(
            [
                titles.get(name, name),
                *("–" if size is None else f"{size / 1e9:.1f} GB" for size in sizes),
                "none" if wasted is None else f"{wasted:.1%}",
                f"{kv['tokens']:,.0f}" if kv.get("tokens") else "–",
                f"{kv['prompts']:,.0f}" if kv.get("prompts") else "–",
            ]
        )
    return table(["arm", "host memory", "device memory", "padding and waiting", "KV tokens that fit", "prompts at once"], rows)


def threshold(report: dict[str, Any], titles: dict[str, str]) -> str:
    rows = []
    for name, arm in report["arms"].items():
        saved = arm["threshold_before_writing"]
        if saved:
            rows.append(
                [
                    titles.get(name, name),
                    f"{saved['kept_texts']:,} of {saved['texts']:,} ({saved['same_texts']:.1%} the same)",
                    f"{saved['tokens_saved']:,} of {saved['tokens']:,}",
                    f"{saved['seconds_saved']:.1f} of {saved['seconds']:.1f}",
                ]
            )
    if not rows:
        return ""
    text = f"The threshold ({report['settings']['skip_threshold']:g}) before writing, against writing all and dropping then:"
    return f"{text}\n\n{table(['arm', 'texts kept', 'tokens saved', 'seconds saved'], rows)}"


def sweep(report: dict[str, Any]) -> str:
    sizes = report["sweep"]["sizes"]
    if not sizes:
        return ""
    stock = {entry["batch"]: entry for entry in (report.get("stock") or {}).get("sizes", [])}
    rows = []
    for entry in sizes:
        mark = " ← knee" if entry["batch"] == report["sweep"]["knee"] else ""
        if "failed" in entry:
            row = [str(entry["batch"]), "did not fit", "", "", ""]
        else:
            speed = f"{entry['tokens'] / entry['seconds']:,.0f}"
            row = [
                f"{entry['batch']}{mark}",
                f"{entry['seconds']:.1f}",
                speed,
                f"{entry['peak'] / 1e9:.1f} GB",
                f"{entry['wasted_share']:.1%}",
            ]
        other = stock.get(entry["batch"])
        rows.append(row + ([f"{other['seconds']:.1f}" if other and "seconds" in other else "–"] if stock else []))
    heads = ["Transformers, generation batch", "seconds", "tokens/s", "peak memory", "padding and waiting"]
    count = report["sweep"].get("texts")
    note = f"Writing {count:,} texts:\n\n" if isinstance(count, int) else ""
    return note + table(heads + (["`model.generate`, seconds"] if stock else []), rows)
