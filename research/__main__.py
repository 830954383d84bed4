"""The command line of a checkout, `python -m research`."""

from debias_diffusion.app.cli import Command, main

COMMANDS = {
    "reproduce": Command(
        "regenerate a table of the papers, or test their claims, with real data or in the toy world",
        "options:ReproduceConfig",
        "reproduce.listing:reproduce",
        "table-S4 --world toy --device cpu",
        "eval",
        "research",
    ),
    "cola": Command(
        "do objects keep their own attributes? Cola's pairs of images, and its classes",
        "options:ColaConfig",
        "cola:evaluate_cola",
        "--encoders ViT-B-16-quickgelu:openai --data COLA_multiobjects_matching_benchmark.json --images images "
        "--output scores",
        "eval",
        "research",
    ),
    "toymodels": Command(
        "build the models of the toy world, as the package ships them",
        "options:ToyModelsConfig",
        "toymodels.build:build",
        "--output runs/toyworld --weights runs/weights",
        "eval",
        "research",
    ),
}

if __name__ == "__main__":
    main(program="python -m research", commands=COMMANDS)
