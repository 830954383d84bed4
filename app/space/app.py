"""The demo as a Hugging Face Space, which lets visitors in at all addresses of its machine."""

from ..demo.launch import AppConfig, run_app

run_app(AppConfig(host="0.0.0.0"))
