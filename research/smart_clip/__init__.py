"""SmartCLIP: its method with the mask network, and retrieval under masks."""
