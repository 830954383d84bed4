"""Captions and prompts, to sentences, token ids, chunks and embeddings: pure functions, without diffusers."""
