"""The demo as a Hugging Face Space, open to visitors on all addresses of its machine."""

from ..demo.launch import AppConfig, run_app

run_app(AppConfig(host="0.0.0.0"))
