"""`python -m debias_diffusion` is the command `debias-diffusion`, also for `accelerate launch -m debias_diffusion`."""

from debias_diffusion.app.cli import main

if __name__ == "__main__":
    main()
