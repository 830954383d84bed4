"""`debias-diffusion generate`: images from prompts of any length."""
