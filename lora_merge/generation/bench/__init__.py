"""Compares engines on the same work: proves that it was the same, then says how long each took."""
