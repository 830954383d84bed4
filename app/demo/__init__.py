"""The demo: what each text encoder reads of a long prompt. Only `page` uses gradio."""
