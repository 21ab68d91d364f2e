"""Weights in, weights out: base + adapter -> merged checkpoint. Knows no prompt and no model run."""
