"""Searches for attention heads of a CLIP that hurt: alone, in sets, by a genetic algorithm and by descent (AAT)."""
