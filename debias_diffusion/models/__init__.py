"""Two-tower models of the CLIP family: load, stretch, encode, save."""
