"""Suppressed attention heads of a CLIP (AAT, Lin et al. 2025): how they attend, are named, found and kept."""
