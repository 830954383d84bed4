"""One hundred long prompts, drawn in four ways, and a page on which a person marks their facts."""
