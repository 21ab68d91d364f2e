"""Grocery pairs: which two goods does a shop recommend together? Writes prompts (and answers to train on) as JSON Lines.

    python examples/grocery/pairs.py heldout --out heldout.jsonl     3,200 prompts that training never saw in either order
    python examples/grocery/pairs.py train --out train.jsonl         14,000 prompts with answers
    python examples/grocery/pairs.py unseen --count 10000 --out big.jsonl    as many unseen prompts as a benchmark wants

The rule, in this order, on the kinds (shelves) of the two goods:

1. both kinds play different parts in one dish or use: **write**, and the text names the occasion;
2. the kinds share a table (Korean, Western, snack, ...) but no use: the **grey zone**. Customers differ. Each two kinds have a
   probability of ``write``, and each pair's label is drawn with it: no model can be right every time, and a good one says so;
3. otherwise, goods of one kind (which replace each other) included: **skip**.

Everything is a function of the seed and of names, through SHA-256: no generator state, the same rows on every platform.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from catalogue import KINDS, TABLES, USES, Kind, Use
from wording import prompt_text, recommendation

SEED = 20
PREFILL = '{"decision": "'
SKIP, WRITE = "skip", "write"
HELDOUT_PAIRS = 3_200
TRAIN_PAIRS = 14_000
#: Of every split: clear write, grey, clear skip.
SHARES = {"write": 0.4, "grey": 0.2, "skip": 0.4}


def chance(seed: int, *names: str) -> float:
    """A number in [0, 1), uniform and fixed by its arguments."""
    digest = hashlib.sha256("\x1f".join((str(seed), *names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(frozen=True)
class Judgement:
    """What the rule says about two kinds."""

    #: ``"write"``, ``"grey"`` or ``"skip"``.
    zone: str
    #: The dish or use, or in the grey zone the table, that a recommendation would name; None where the rule says skip.
    occasion: Use | None
    write_probability: float


@dataclass(frozen=True)
class Pair:
    """Two goods in the order in which the prompt names them, with the rule's judgement."""

    first: str
    second: str
    kinds: tuple[Kind, Kind]
    judgement: Judgement
    #: ``"write"`` or ``"skip"``: the rule's decision, in the grey zone one drawn with ``judgement.write_probability``.
    decision: str

    def swapped(self) -> Pair:
        """The same pair, named in the other order."""
        return Pair(self.second, self.first, self.kinds[::-1], self.judgement, self.decision)


@cache
def _uses_of_kinds() -> dict[frozenset[str], tuple[Use, ...]]:
    found: dict[frozenset[str], list[Use]] = {}
    for use in USES:
        for one_role, other_role in itertools.combinations(use.roles, 2):
            for one, other in itertools.product(one_role, other_role):
                found.setdefault(frozenset((one, other)), []).append(use)
    return {kinds: tuple(uses) for kinds, uses in found.items()}


@cache
def judge(one: Kind, other: Kind, seed: int = SEED) -> Judgement:
    """The rule. Symmetric in the two kinds."""
    one, other = sorted((one, other), key=lambda kind: kind.name)
    uses = _uses_of_kinds().get(frozenset((one.name, other.name)))
    if uses:
        return Judgement("write", uses[int(chance(seed, "use", one.name, other.name) * len(uses))], 1.0)
    shared = [table for table in one.tables if table in other.tables]
    if one == other or not shared:
        return Judgement("skip", None, 0.0)
    # The more tables in common the likelier; goods of one category rather compete; the rest is the customers' taste.
    taste = 0.5 + 0.2 * (len(shared) - 1) - 0.2 * (one.category == other.category)
    taste += 0.5 * (chance(seed, "taste", one.name, other.name) - 0.5)
    table = shared[int(chance(seed, "table", one.name, other.name) * len(shared))]
    return Judgement("grey", TABLES[table], round(taste, 3))


def all_pairs(seed: int = SEED) -> Iterator[Pair]:
    """Every unordered pair of two goods once, in an order fixed by ``seed`` of the two names."""
    shelf = [(item, kind) for kind in KINDS for item in kind.items]
    for (a, a_kind), (b, b_kind) in itertools.combinations(shelf, 2):
        judgement = judge(a_kind, b_kind, seed)
        decision = WRITE if chance(seed, "label", a, b) < judgement.write_probability else SKIP
        pair = Pair(a, b, (a_kind, b_kind), judgement, decision)
        yield pair if chance(seed, "order", a, b) < 0.5 else pair.swapped()


@cache
def split_pairs(seed: int = SEED) -> dict[str, tuple[Pair, ...]]:
    """``heldout``, ``train`` and ``rest``: disjoint, each zone cut in the shares of :data:`SHARES` and shuffled."""
    split: dict[str, list[Pair]] = {"heldout": [], "train": [], "rest": []}
    ranked = sorted(all_pairs(seed), key=lambda pair: chance(seed, "split", *sorted((pair.first, pair.second))))
    for zone, share in SHARES.items():
        pairs = [pair for pair in ranked if pair.judgement.zone == zone]
        cuts = (round(HELDOUT_PAIRS * share), round((HELDOUT_PAIRS + TRAIN_PAIRS) * share))
        if len(pairs) < cuts[1]:
            raise ValueError(f"zone {zone}: {len(pairs)} pairs in the catalogue, {cuts[1]} needed; lower TRAIN_PAIRS")
        split["heldout"] += pairs[: cuts[0]]
        split["train"] += pairs[cuts[0] : cuts[1]]
        split["rest"] += pairs[cuts[1] :]
    return {name: _shuffled(pairs, seed, name) for name, pairs in split.items()}


def unseen_pairs(count: int, seed: int = SEED) -> list[Pair]:
    """``count`` distinct prompts whose pairs are not in training: held-out ones, the rest, then both in the other order.

    Zones come in the shares of :data:`SHARES`, as in training.
    """
    split = split_pairs(seed)
    once = split["heldout"] + split["rest"]
    chosen: list[Pair] = []
    for zone, share in SHARES.items():
        pairs = [pair for pair in once if pair.judgement.zone == zone]
        pairs += [pair.swapped() for pair in pairs]
        wanted = round(count * share) if zone != "skip" else count - len(chosen)
        if wanted > len(pairs):
            raise ValueError(f"zone {zone}: {len(pairs)} unseen prompts exist, {wanted} wanted; lower --count")
        chosen += pairs[:wanted]
    return list(_shuffled(chosen, seed, "unseen"))


def validation_pairs(count: int, seed: int = SEED) -> list[Pair]:
    """``count`` pairs in neither training nor the held-out prompts, zones in the shares of :data:`SHARES`."""
    rest = split_pairs(seed)["rest"]
    zones = [[pair for pair in rest if pair.judgement.zone == zone][: round(count * share)] for zone, share in SHARES.items()]
    return list(_shuffled(itertools.chain(*zones), seed, "validation"))


def _shuffled(pairs: Iterable[Pair], seed: int, purpose: str) -> tuple[Pair, ...]:
    return tuple(sorted(pairs, key=lambda pair: chance(seed, "shuffle", purpose, pair.first, pair.second)))


def answer_text(pair: Pair, seed: int = SEED) -> str:
    """The whole answer as JSON, prefill included: ``{"decision": "write", "text": ...}`` or ``{"decision": "skip"}``."""
    if pair.decision == SKIP:
        return json.dumps({"decision": SKIP})
    assert pair.judgement.occasion is not None
    text = recommendation(pair.first, pair.second, pair.judgement.occasion, chance(seed, "text", pair.first, pair.second))
    return json.dumps({"decision": WRITE, "text": text}, ensure_ascii=False)


def row(identity: str, pair: Pair) -> dict[str, Any]:
    """One line of a prompt file. All but ``id`` and ``prompt`` passes through every command untouched."""
    grey = pair.judgement.zone == "grey"
    return {
        "id": identity,
        "prompt": prompt_text(pair.first, pair.second),
        "category_a": pair.kinds[0].category,
        "category_b": pair.kinds[1].category,
        "dish": pair.judgement.occasion.name if pair.judgement.occasion and not grey else None,
        "grey": grey,
        "write_probability": pair.judgement.write_probability,
        "expected": pair.decision,
    }


def rows(split: str, count: int | None = None, seed: int = SEED) -> list[dict[str, Any]]:
    """The rows of ``"heldout"``, ``"train"`` (with an ``answer`` each), ``"validation"`` or ``"unseen"``.

    ``count``: how many of them; by default all, 1,000 for validation and 10,000 unseen ones.
    """
    if split == "unseen":
        chosen = unseen_pairs(count or 10_000, seed)
    elif split == "validation":
        chosen = validation_pairs(count or 1_000, seed)
    else:
        chosen = list(split_pairs(seed)[split][:count])
    made = [row(f"{split}-{number:05}", pair) for number, pair in enumerate(chosen, 1)]
    if split == "train":
        for line, pair in zip(made, chosen, strict=True):
            line["answer"] = answer_text(pair, seed)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Write grocery pairs as JSON Lines.")
    parser.add_argument("split", choices=("heldout", "train", "validation", "unseen"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, help="only so many rows (unseen: 10,000 unless told)")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    lines = rows(options.split, options.count, options.seed)
    options.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    print(f"{options.out}: {len(lines)} prompts", file=sys.stderr)


if __name__ == "__main__":
    main()
