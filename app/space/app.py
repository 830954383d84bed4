"""The demo as a Hugging Face Space, open to visitors on all addresses of its machine."""

from debias_diffusion.app.demo.launch import AppConfig, run_app

run_app(AppConfig(host="0.0.0.0"))
