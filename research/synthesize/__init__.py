"""`python -m research synthesize`: captions for images, written by a multimodal model and cleaned."""
