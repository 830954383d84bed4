"""The command line of a checkout, `python -m research`."""

from debias_diffusion.app.cli import COMMANDS as PRODUCT
from debias_diffusion.app.cli import main
from debias_diffusion.registry import Command, Registry

from . import options

OWN = {
    "reproduce": Command(
        options.ReproduceConfig, "reproduce.listing:reproduce", "table-S4 --world toy --device cpu", "eval"
    ),
    "pairs": Command(options.PairsConfig, "pairs:write_pairs", "--root data --output data/coco-train-1k.jsonl", "eval"),
    "toymodels": Command(
        options.ToyModelsConfig, "toymodels.build:build", "--output runs/toyworld --weights runs/weights", "eval"
    ),
}

COMMANDS = Registry("command", PRODUCT | OWN)

if __name__ == "__main__":
    from . import extensions  # what research adds to the package's registries

    extensions.register()
    main(program="python -m research", commands=COMMANDS)
