"""Image-caption pairs: what is read from disk and how it reaches a training step."""
