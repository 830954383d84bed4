"""Evaluations that only a checkout has: `python -m research evaluate NAME`."""
