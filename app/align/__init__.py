"""`debias-diffusion align`: fit SDXL's text encoders to the UNet that reads them."""
