"""Images from SDXL checkpoints: loaded with an encoder, rendered in batches, settings kept in PNG."""
