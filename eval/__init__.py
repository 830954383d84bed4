"""Measures of a trained encoder: retrieval, robustness to sentence edits, and generated images."""
