"""`debias-diffusion export`: from a training run to the formats of other programs."""
