"""Prompts, decision labels and the engines that score and generate. Knows no gate."""
