"""Evaluations of generated images."""
