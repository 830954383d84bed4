"""Two-tower models of the CLIP family: loaded, stretched, encoded with, saved."""
