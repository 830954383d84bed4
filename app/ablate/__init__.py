"""`debias-diffusion ablate`: find the attention heads of a CLIP that hurt, and quiet them."""
