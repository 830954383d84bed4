"""Searches for attention heads that lower recall: alone, in sets, by a genetic algorithm and by descent (AAT)."""
