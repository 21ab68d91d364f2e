"""Scores the QLoRA reference and the merged checkpoint, judges, explains, certifies."""
