"""The demo: what each text encoder reads of a long prompt.

Only `page`, `endpoints`, `guard` and `fair_queue` use gradio.
"""
