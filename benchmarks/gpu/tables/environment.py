"""The card, its driver and the versions."""

from __future__ import annotations

from typing import Any


def line(parts: dict[str, Any]) -> str:
    """One sentence for each environment that the parts were measured in; one, where it was the same throughout."""
    found: dict[str, list[str]] = {}
    for name, part in parts.items():
        about = part["environment"]
        versions = ", ".join(f"{library} {version}" for library, version in about["versions"].items())
        cards = "; ".join(about["cards"]) or "no GPU"
        cuda = f", CUDA {about['cuda']}" if about["cuda"] else ""
        text = f"{cards}{cuda}; {about['cores']} cores; Python {about['python']}, {versions}"
        found.setdefault(text, []).append(name)
    if len(found) == 1:
        return next(iter(found)) + "."
    return "\n".join(f"- {', '.join(names)}: {text}." for text, names in found.items()) or "Nothing measured yet."
