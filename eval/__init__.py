"""Measures of encoders: robustness, retrieval, attention, classification, pictures drawn with them; pages of all."""
