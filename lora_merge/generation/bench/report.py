"""The tables of a comparison as Markdown, and everything as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_merge.generation.bench import figures
from lora_merge.generation.bench.api import BenchResult
from lora_merge.generation.bench.arms import ARMS, ArmResult

TITLES = {arm.name: arm.title for arm in ARMS}
_QUIET = 0.05
"""Share of other processes above which times are not to be trusted: at 9 % an arm has taken a third longer than at 1 %."""
FORMAT = "lora-merge/engines"
VERSION = 1


def to_json(result: BenchResult) -> dict[str, Any]:
    """The whole comparison; texts and decisions of every prompt are left to the files of the parts."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": dict(result.machine),
        "prompts": {**result.prompts, "to_write": len(result.listed.indices), "text_tokens": sum(result.listed.lengths)},
        "settings": {
            "max_tokens": result.options.max_tokens,
            "decide_batch": result.options.decide_batch,
            "write_batch": result.options.write_batch,
            "chunk_size": result.options.chunk_size,
            "repeats": result.options.repeats,
            "skip_threshold": result.options.skip_threshold,
            "min_agreement": result.options.limits.min_agreement,
            "max_token_difference": result.options.limits.max_token_difference,
        },
        "reference": result.reference,
        "proof": {name: proof.to_json() for name, proof in result.proof.items()},
        "within_engines": {name: proof.to_json() for name, proof in result.within.items()},
        "arms": {name: _arm(result, name) for name in result.arms},
        "ratios": [entry for entry in _ratios(result) if "refused" not in entry],
        "refused_ratios": [entry for entry in _ratios(result) if "refused" in entry],
        "by_length": _by_length(result),
        "sweep": {"texts": result.swept, "sizes": list(result.sweep), "knee": figures.knee(result.sweep)},
        "stock": {"texts": result.swept, "sizes": list(result.stock), "knee": figures.knee(result.stock)},
    }


def _arm(result: BenchResult, name: str) -> dict[str, Any]:
    arm = result.arms[name]
    return {
        "seconds": dict(arm.seconds),
        "work_seconds": arm.work_seconds,
        "start_seconds": arm.start_seconds,
        "work_seconds_of_repeats": list(arm.work_seconds_of_repeats),
        "decisions": {decision: list(arm.decisions).count(decision) for decision in ("skip", "write", "other")},
        "rates": figures.rates(arm, result.listed),
        "written_tokens": arm.written_tokens,
        "computed_tokens": arm.computed,
        "wasted_share": figures.waste(arm),
        "memory": dict(arm.memory),
        "other_load": arm.other_load,
        "kv": arm.kv,
        "threshold_before_writing": figures.saved_by_threshold(arm, result.listed),
        "engine": dict(arm.engine),
    }


def _ratios(result: BenchResult) -> Iterator[dict[str, Any]]:
    number = int(result.prompts["number"])
    for slow, fast in figures.pairs(result.arms):
        entry: dict[str, Any] = {"slow": slow, "fast": fast}
        if figures.comparable(slow, fast, result.proof):
            even = figures.break_even(result.arms[slow], result.arms[fast], number)
            yield {**entry, **figures.ratios(result.arms, slow, fast), "break_even": even}
        else:
            reasons = [reason for name in (slow, fast) if name in result.proof for reason in result.proof[name].reasons]
            yield {**entry, "refused": reasons}


def _by_length(result: BenchResult) -> list[dict[str, float]]:
    slow, fast = "hf-two-phase", "vllm-two-phase"
    if not {slow, fast} <= set(result.arms) or not figures.comparable(slow, fast, result.proof):
        return []
    return figures.by_length(result.arms[slow], result.arms[fast], result.listed)


def to_markdown(result: BenchResult, pictures: Sequence[str] = ()) -> str:
    """The comparison for people. ``pictures``: file names to show."""
    parts = [*_conditions(result), *_proof(result), *_times(result), *_ratio_table(result), *_length_table(result)]
    parts += [*_threshold_table(result), *_sweep_table(result), *(f"![{name}]({name})" for name in pictures)]
    return "\n\n".join(parts) + "\n"


def _conditions(result: BenchResult) -> Iterator[str]:
    machine, prompts, options = result.machine, result.prompts, result.options
    place = ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['cores']} cores"
    yield "# Engines compared"
    yield (
        f"{prompts['number']:,} distinct prompts ({prompts['tokens']:,} tokens); the same {len(result.listed.indices):,} of "
        f"them get a text in every arm ({sum(result.listed.lengths):,} tokens, at most {options.max_tokens} each), greedy, "
        f"from the same token ids. {place}; {machine['tool']}, Python {machine['python']}."
    )
    described = []
    for name, arm in result.arms.items():
        versions = ", ".join(f"{library} {version}" for library, version in arm.engine["versions"].items())
        described.append(f"- {TITLES[name]}: {arm.engine['dtype']} on {arm.engine['device']}; {versions}")
    yield "\n".join(described)


def _proof(result: BenchResult) -> Iterator[str]:
    yield f"## Same work\n\nHeld against {TITLES[result.reference]}, whose decisions fixed the list of prompts to write."
    rows = []
    for name, proof in result.proof.items():
        near = "" if proof.near_ties is None else f" ({proof.near_ties} near ties)"
        first = "–" if proof.first_difference is None else f"token {proof.first_difference + 1:g}"
        verdict = "yes" if proof.holds else f"no: {'; '.join(proof.reasons)}"
        rows.append(
            [
                TITLES[name],
                f"{proof.agreement:.2%}",
                f"{proof.disagreements:,}{near}",
                f"{proof.tokens:,}",
                f"{proof.token_difference:.2%}",
                f"{proof.differing:.1%} of {proof.compared:,}",
                first,
                verdict,
            ]
        )
    heads = ["arm", "decisions agree", "differ", "tokens of texts", "difference", "texts differ", "first (median)", "same work"]
    if rows:
        yield table(heads, rows)
    if result.within:
        yield f"Within one engine, one-shot against two-phase: {'; '.join(_within(result))}."


def _within(result: BenchResult) -> Iterator[str]:
    for name, proof in result.within.items():
        near = "" if proof.near_ties is None else f", {proof.near_ties} of the others near ties"
        first = "" if proof.first_difference is None else f", first at token {proof.first_difference + 1:g} (median)"
        engine = "vLLM" if name.startswith("vllm") else "Transformers"
        decided = f"decisions agree on {proof.agreement:.2%}{near if proof.disagreements else ''}"
        yield f"{engine}: {decided}, {proof.differing:.1%} of {proof.compared:,} texts differ{first}"


def _times(result: BenchResult) -> Iterator[str]:
    yield "## Times\n\nSeconds. Loading and warming up are not part of the work."
    heads = ["arm", "import", "load", "warm-up", "decide", "write", "one-shot", "**work**", "prompts/s", "text tokens/s"]
    rows = []
    for name, arm in result.arms.items():
        rates = figures.rates(arm, result.listed)
        phases = [_seconds(arm, phase) for phase in ("import", "load", "warm_up", "decide", "write", "one_shot")]
        tokens = f"{rates['text_tokens']:,.0f}" if "text_tokens" in rates else "–"
        rows.append([TITLES[name], *phases, f"**{arm.work_seconds:,.2f}**", f"{rates['prompts']:,.1f}", tokens])
    yield table(heads, rows)
    yield from _other_load(result)
    heads = ["arm", "peak host memory", "peak device memory", "padding and waiting", "KV tokens that fit", "prompts at once"]
    rows = []
    for name, arm in result.arms.items():
        wasted, kv = figures.waste(arm), arm.kv or {}
        shown = "none: continuous batching" if wasted is None else f"{wasted:.1%} of the tokens computed for writing"
        sizes = [_size(arm.memory.get("host_peak")), _size(arm.memory.get("device_peak"))]
        rows.append([TITLES[name], *sizes, shown, _count(kv.get("tokens")), _count(kv.get("prompts"))])
    yield table(heads, rows)


def _other_load(result: BenchResult) -> Iterator[str]:
    """A machine that does other things meanwhile makes times that say little."""
    known = [(TITLES[name], arm.other_load) for name, arm in result.arms.items()]
    for part, sizes in (("sweep", result.sweep), ("model.generate", result.stock)):
        known += [(f"{part} {size['batch']}", size.get("other_load")) for size in sizes]
    loads = {name: load for name, load in known if load is not None}
    if not loads:
        return
    shares = ", ".join(f"{name} {load:.0%}" for name, load in loads.items())
    warning = "**The machine was not quiet, so these times say little.** " if max(loads.values()) > _QUIET else ""
    yield f"{warning}Processor time that went to other processes meanwhile: {shares}."


def _ratio_table(result: BenchResult) -> Iterator[str]:
    yield (
        "## Ratios\n\nTime of the first over time of the second. Break-even: from so many prompts on the second is done first, "
        "loading included."
    )
    rows = []
    for entry in _ratios(result):
        names = [TITLES[entry["slow"]], TITLES[entry["fast"]]]
        if "refused" in entry:
            rows.append([*names, f"none: not the same work ({'; '.join(entry['refused'])})", "", "", ""])
            continue
        even = entry["break_even"]
        shown = "never" if even is None else "always first" if even == 0 else f"{even:,.0f} prompts"
        phases = [f"{entry[phase]:.2f}" if phase in entry else "–" for phase in ("decide", "write")]
        rows.append([*names, f"**{entry['total']:.2f}**", *phases, shown])
    yield table(["first", "second", "total", "decide", "write", "break-even"], rows)


def _length_table(result: BenchResult) -> Iterator[str]:
    groups = _by_length(result)
    if groups:
        yield "## By text length\n\nWriting only, Transformers two-phase over vLLM two-phase; the prompts were just decided."
        rows = [
            [
                f"{group['shortest']:g} to {group['longest']:g} tokens",
                f"{group['texts']:,}",
                f"{group['slow_seconds']:.2f}",
                f"{group['fast_seconds']:.2f}",
                f"{group['ratio']:.2f}",
            ]
            for group in groups
        ]
        yield table(["texts of", "number", "Transformers", "vLLM", "ratio"], rows)


def _threshold_table(result: BenchResult) -> Iterator[str]:
    rows = []
    for name, arm in result.arms.items():
        saved = figures.saved_by_threshold(arm, result.listed)
        if saved is not None:
            rows.append(
                [
                    TITLES[name],
                    f"{saved['texts']:,}",
                    f"{saved['kept_texts']:,} ({saved['same_texts']:.1%} the same)",
                    f"{saved['tokens_saved']:,} of {saved['tokens']:,}",
                    f"{saved['seconds_saved']:.2f} of {saved['seconds']:.2f}",
                ]
            )
    if rows:
        threshold = f"{result.options.skip_threshold:g}"
        yield f"## Threshold before writing\n\nAt a skip threshold of {threshold}, against writing all and dropping then."
        yield table(["arm", "written then dropped from", "kept texts", "tokens saved", "seconds saved"], rows)


def _sweep_table(result: BenchResult) -> Iterator[str]:
    if not result.sweep:
        return
    knee, stock = figures.knee(result.sweep), {entry["batch"]: entry for entry in result.stock}
    total = len(result.listed.indices)
    which = f"all {total:,} texts" if result.swept == total else f"{result.swept:,} of the {total:,} texts, evenly spread"
    yield f"## Generation batch of Transformers\n\nWriting {which}. The knee is the smallest batch within 5 % of the best time."
    heads = ["batch", "seconds", "tokens/s", "peak memory", "padding and waiting"]
    rows = []
    for entry in result.sweep:
        mark = " ← knee" if entry["batch"] == knee else ""
        if "failed" in entry:
            row = [f"{entry['batch']}", f"did not fit: {entry['failed']}", "", "", ""]
        else:
            speed, wasted = f"{entry['tokens'] / entry['seconds']:,.0f}", f"{entry['wasted_share']:.1%}"
            row = [f"{entry['batch']}{mark}", f"{entry['seconds']:.2f}", speed, _size(entry["peak"]), wasted]
        rows.append(row + ([_stock_seconds(stock.get(entry["batch"]))] if stock else []))
    yield table(heads + (["`model.generate`, seconds"] if stock else []), rows)
    best, best_stock = figures.best(result.sweep), figures.best(result.stock)
    if best is not None and best_stock is not None:
        yield (
            f"At its best `model.generate` takes {best_stock['seconds']:.2f} s ({best_stock['batch']} at once), this engine "
            f"{best['seconds']:.2f} s ({best['batch']} at once): {best_stock['seconds'] / best['seconds']:.2f} times as fast."
        )


def _stock_seconds(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "–"
    return f"did not fit: {entry['failed']}" if "failed" in entry else f"{entry['seconds']:.2f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers and names are aligned by whoever renders it."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(arm: ArmResult, phase: str) -> str:
    return f"{arm.seconds[phase]:,.2f}" if phase in arm.seconds else "–"


def _size(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e9:,.2f} GB"


def _count(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}"
