"""The command line of a checkout, `python -m research`."""

from debias_diffusion.app.cli import COMMANDS as PRODUCT
from debias_diffusion.app.cli import Command, main
from debias_diffusion.registry import Registry

from . import options
from .as_released import AsReleasedConfig

OWN = {
    "reproduce": Command(
        options.ReproduceConfig, "reproduce.listing:reproduce", "table-S4 --world toy --device cpu", "eval"
    ),
    "as-released": Command(
        AsReleasedConfig,
        "as_released:rewrite",
        "--file data/debias_vitb_3e.pt --output data/debias_vitb_3e-as-released.safetensors",
        "eval",
    ),
    "cola": Command(
        options.ColaConfig,
        "cola:evaluate_cola",
        "--encoders ViT-B-16-quickgelu:openai --data COLA_multiobjects_matching_benchmark.json --images images "
        "--output scores",
        "eval",
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
