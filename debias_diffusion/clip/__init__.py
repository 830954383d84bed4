"""Two-tower models of the CLIP family: towers, blocks, positions, and their weights."""
