"""How the toy CLIP is fine-tuned on long captions, by the quickstart, and for the models that ship."""

from pathlib import Path

from debias_diffusion.training.config import TrainConfig

VALIDATION = 100  # pairs held out
RECIPES = ("long-clip", "debias-clip", "debias-clip-sdxl")


def toy_training(
    recipe: str,
    model: str,
    data: Path,
    images: Path,
    output: Path,
    *,
    steps: int = 150,
    batch: int = 128,
    learning_rate: float = 5e-4,
    seed: int = 0,
) -> TrainConfig:
    """Settings of the real `train`, alike for all RECIPES; the first VALIDATION pairs of `write_pairs` are held out."""
    return TrainConfig(
        data=str(data),
        images=str(images),
        output=str(output),
        model=model,
        recipe=recipe,
        components=min(32, batch // 4),
        validation=VALIDATION,
        batch=batch,
        epochs=steps,  # more than enough; max_steps ends the run
        max_steps=steps,
        learning_rate=learning_rate,
        seed=seed,
        precision="fp32",
        max_bad=0,  # what the world draws is readable, so no scene need stand in for another
        workers=1,
        eval_every=steps,
        checkpoint_every=50,
    )
