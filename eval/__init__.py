"""Measures of encoders: robustness, retrieval, attention, classification, images generated with them; pages of all."""
