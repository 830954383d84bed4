"""The search of AAT (Lin et al. 2025) for attention heads whose suppression makes a CLIP retrieve better."""
