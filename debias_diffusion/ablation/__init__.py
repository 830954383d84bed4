"""Attention ablation (AAT): the heads of a CLIP that hurt are found, and quieted. Lin et al., 2025."""
