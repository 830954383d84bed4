"""The demo: what each text encoder makes of a long prompt. The page is in `page`; nothing else here knows of gradio."""
