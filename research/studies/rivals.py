"""compel and sd_embed beside our readings, in the toy world: the same prompts, noise, UNet and zeros as negative.

    pip install compel==2.5.1 lark git+https://github.com/xhinker/sd_embed@4a47f71150a22942fa606fb741a1c971d95ba56f
    python -m research.studies.rivals [--seeds 43 44 45] [--prompts 60]

Both read prompts in full chunks that end wherever their tokens do. sd_embed gives the UNet each chunk's BOS and
EOS, and so does compel. Writes research/results/rivals.md and .json.
"""

import inspect
from collections.abc import Callable

import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image
from tqdm import tqdm

from debias_diffusion.eval.report import Table
from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.shipped import GUIDANCE_SCALE, STEPS, shipped

from .drawing import SCORES, LongPrompts
from .harness import publish, read_options

READINGS, AT_ONCE = ("overlap", "separate", "a1111", "comfyui", "kohya", "cut"), 20
Embed = Callable[[str], tuple[torch.Tensor, torch.Tensor]]  # a prompt's embeddings and pooled one, [1, ...]


def ours(pipe, reading: str) -> Embed:
    reader = with_long_prompts(pipe, reading=reading)

    def embed(prompt: str):
        embeds, _, pooled, _ = reader.encode_prompt(prompt, do_classifier_free_guidance=False)
        return embeds, pooled

    return embed


def compel(pipe) -> Embed:
    from compel import Compel, ReturnedEmbeddingsType

    kind = ReturnedEmbeddingsType.PENULTIMATE_HIDDEN_STATES_NON_NORMALIZED
    how = {"returned_embeddings_type": kind, "requires_pooled": [False, True], "truncate_long_prompts": False}
    return Compel([pipe.tokenizer, pipe.tokenizer_2], [pipe.text_encoder, pipe.text_encoder_2], **how)


def sd_embed(pipe) -> Embed:
    """With the toy vocabulary's BOS and EOS, whose numbers are written into its code."""
    from sd_embed import embedding_funcs

    ids = f"bos,eos = {pipe.tokenizer.bos_token_id},{pipe.tokenizer.eos_token_id}"
    exec(inspect.getsource(embedding_funcs).replace("bos,eos = 49406,49407", ids), vars(embedding_funcs))
    return lambda prompt: embedding_funcs.get_weighted_text_embeddings_sdxl(pipe, prompt)[::2]


def draw(pipe, embed: Embed, prompts: list[str]) -> list[Image.Image]:
    """In the order of the prompts; those of a length together."""
    embedded, images = [embed(prompt) for prompt in prompts], {}
    for length in sorted({embeds.shape[1] for embeds, _ in embedded}):
        same = [at for at, (embeds, _) in enumerate(embedded) if embeds.shape[1] == length]
        for start in range(0, len(same), AT_ONCE):
            batch = same[start : start + AT_ONCE]
            embeds, pooled = (torch.cat(parts) for parts in zip(*(embedded[at] for at in batch), strict=True))
            noise = [torch.Generator().manual_seed(at) for at in batch]
            how = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE_SCALE, "generator": noise}
            drawn = pipe(prompt_embeds=embeds, pooled_prompt_embeds=pooled, **how).images
            images |= dict(zip(batch, drawn, strict=True))
    return [images[at] for at in range(len(prompts))]


if __name__ == "__main__":
    options = read_options(__doc__, seeds=[43, 44, 45], prompts=60)
    torch.set_grad_enabled(False)
    pipe = StableDiffusionXLPipeline.from_pretrained(shipped("toy/sdxl"))
    pipe.set_progress_bar_config(disable=True)
    prompts = LongPrompts([f"test-{seed}" for seed in options.seeds], options.prompts)
    texts = [clean(text) for text in prompts.texts]
    readers = {reading: ours(pipe, reading) for reading in READINGS} | {
        "compel": compel(pipe),
        "sd_embed": sd_embed(pipe),
    }
    shown = {name: prompts.read(draw(pipe, embed, texts)) for name, embed in tqdm(readers.items())}
    rows = {name: prompts.scores(of_reader) for name, of_reader in shown.items()}
    less = {name: prompts.differences(shown["overlap"], of_reader) for name, of_reader in shown.items()}
    cells = [
        [
            name,
            *(f"{row[score]['value']:.1f}" for score in SCORES),
            "{difference:+.1f} ({low:+.1f} to {high:+.1f})".format(**less[name]["objects_right"]),
        ]
        for name, row in rows.items()
    ]
    table = Table(["read by", *SCORES.values(), "overlap's objects right less these (95%)"], cells)
    publish("rivals", vars(options) | {"rows": rows, "overlap less": less}, table)
