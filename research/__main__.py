"""The command line of a checkout, `python -m research`."""

import sys

from debias_diffusion.app.cli import COMMANDS as PRODUCT
from debias_diffusion.app.cli import main
from debias_diffusion.registry import Command, Registry

from . import extensions, options
from .as_released import AsReleasedConfig

OWN = {
    "reproduce": Command(
        options.ReproduceConfig, "reproduce.listing:reproduce", "table-S4 --world toy --device cpu", "eval"
    ),
    "ablate": Command(
        options.AblateConfig,
        "ablate.command:ablate",
        "--model toy/clip --data toy/validation --output runs/ablation",
        "eval",
    ),
    "as-released": Command(
        AsReleasedConfig,
        "as_released:rewrite",
        "--file data/debias_vitb_3e.pt --output data/debias_vitb_3e-as-released.safetensors",
        "eval",
    ),
    "synthesize": Command(
        options.SynthesizeConfig,
        "synthesize.command:synthesize",
        "--model llava-hf/llama3-llava-next-8b-hf --server http://localhost:8000 --images images --output pairs",
        "eval",
    ),
    "referring": Command(
        options.ReferringConfig,
        "referring.scores:evaluate_referring",
        "--encoders cut:original original --data toy/referring-test --base toy/sdxl --output scores",
        "eval",
    ),
    "pairs": Command(options.PairsConfig, "pairs:write_pairs", "--root data --output data/coco-train-1k.jsonl", "eval"),
    "showcase": Command(
        options.ShowcaseConfig, "showcase.command:showcase", "--base toy/sdxl --limit 8 --output runs/showcase", "eval"
    ),
    "toymodels": Command(
        options.ToyModelsConfig, "toymodels.build:build", "--output runs/toyworld --weights runs/weights", "eval"
    ),
}

COMMANDS = Registry("command", PRODUCT | OWN)

if __name__ == "__main__":
    arguments = sys.argv[1:] or ["--help"]
    extensions.register(only_for_help=arguments[0] not in COMMANDS or bool({"-h", "--help"} & {*arguments}))
    main(program="python -m research", commands=COMMANDS)
