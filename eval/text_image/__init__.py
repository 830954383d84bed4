"""Evaluations of text encoders on real images and captions."""
