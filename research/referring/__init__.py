"""Captions of toy scenes whose sentences refer back to each other, and what a reader of parts of them can know."""
