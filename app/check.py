"""`check`: does an SDXL checkpoint read long prompts on this machine as this package promises?"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

import psutil
import torch
from accelerate.utils.memory import clear_device_cache
from diffusers import StableDiffusionXLPipeline

from debias_diffusion.devices import DTYPES, cost, explain_memory, pick_device
from debias_diffusion.encoders.spec import READINGS
from debias_diffusion.errors import FailedError, quiet_logging, reason
from debias_diffusion.files import write_json
from debias_diffusion.pipelines.attention_shares import PARTS, attention_shares
from debias_diffusion.pipelines.calls import EMBEDDINGS
from debias_diffusion.pipelines.rendering.checkpoints import DENOISER, Checkpoint
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.text.sentences import join_sentences, split_sentences

from .prompt_options import CheckConfig
from .prompts import sheet_prompts
from .sheet import draw_ways, provenance, write_sheet

SHORT, OTHER = "a red bus in front of an old stone house", "two grey cats on a roof at night, ink drawing"
KEPT = 0.9  # of the words' part, from the shortest prompt to the longest; 97% or more in the toy worlds
LONG = 34 * "A red bus passes the old stone house, and a man waits there in the rain. "  # 612 tokens


def check(config: CheckConfig) -> None:
    """Compares with stock diffusers, encodes, times, draws prompts in four ways, and writes `check.json`.

    Raises FailedError if some checks have failed, which stops no other; the file says how.
    """
    device, checkpoint = pick_device(config.device), Checkpoint.parse(config.base)
    checkpoint.check_kind()
    print("The checkpoint says:", ", ".join(f"{name} {value}" for name, value in checkpoint.says().items()), flush=True)
    if device.type == "cpu":
        height, width = (min(256, side) for side in checkpoint.size)
        config = replace(config, height=config.height or height, width=config.width or width, steps=config.steps or 2)
        print(f"On a CPU: images of {config.height} x {config.width} pixels in {config.steps} steps.")
    height, width = config.height or checkpoint.size[0], config.width or checkpoint.size[1]
    results = _model_checks(config, device, height * width)
    clear_device_cache(garbage_collection=True)  # or those models and the ones that draw would be in memory together
    results["prompts in four ways"] = _result("prompts in four ways", lambda: _draw_sheet(config))
    write_json(Path(config.output) / "check.json", provenance(config) | {"checks": results})
    print(f"Wrote {config.output}/check.json.")
    if failed := [name for name, result in results.items() if "failed" in result]:
        raise FailedError(f"{len(failed)} of {len(results)} checks failed: {'; '.join(failed)}.")


def _draw_sheet(config: CheckConfig) -> dict[str, dict[str, str]]:
    prompts = [*sheet_prompts().values()][: config.limit]
    images = draw_ways(config, prompts)
    write_sheet(config, prompts, images, range(len(prompts)))
    return {way: {file.name: digest for file, digest in pairs} for way, pairs in images.items()}


def _result(name: str, work: Callable) -> dict:
    """What a check gives, or how it fails; printed."""
    try:
        with torch.no_grad(), quiet_logging():
            result = {"result": work()}
    except Exception as error:  # whatever it is, the others are still worth knowing
        result = {"failed": f"{type(error).__name__}: {reason(error)}"}
    print(f"{'FAILED' if 'failed' in result else 'ok'}: {name}: {str(*result.values())[:500]}", flush=True)
    return result


def most_memory(pipe: StableDiffusionXLPipeline, pixels: int) -> tuple[float, float]:
    """GB that an image with guidance takes at most, counted for SDXL's layout. A GPU needs half a gigabyte more.

    Of a UNet's step and of the decoding, as many tensors of the widest layer at full resolution as are alive at once,
    see benchmarks/sdxl_memory.py. The length of the prompt does not show in it.

    Returns:
        with all models on the device, and with one model at a time, as `--low-memory` keeps them on an NVIDIA GPU.
    """
    models = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    weights = {name: sum(weight.nbytes for weight in part.parameters()) for name, part in models.items()}
    unet, vae = pipe.unet, pipe.vae
    in_decoding = 4 if vae.config.force_upcast else vae.dtype.itemsize  # diffusers decodes in float32 then
    upcast = weights["vae"] * (in_decoding / vae.dtype.itemsize - 1)
    decoding = 6 * vae.config.block_out_channels[0] * in_decoding * pixels + upcast
    step = 31.5 * unet.config.block_out_channels[0] * unet.dtype.itemsize * pixels / pipe.vae_scale_factor**2
    alone = {**weights, "unet": weights["unet"] + step, "vae": weights["vae"] + decoding}
    together = sum(weights.values()) + max(step, decoding)
    return together / 1e9, max(alone.values()) / 1e9


def _model_checks(config: CheckConfig, device: torch.device, pixels: int) -> dict[str, dict]:
    """All checks but the images. The checkpoint is loaded once, for stock diffusers and for this package."""
    with explain_memory(device, "Try --precision bf16."):
        ours = load_pipeline(config.base, None, device, DTYPES.get(config.precision))
    whole, alone = most_memory(ours, pixels)
    has = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total
    print(f"An image takes {whole:.1f} GB at most, counted, and {alone:.1f} GB with one model at a time.", end=" ")
    print(f"{device} has {has / 1e9:.1f} GB.", flush=True)
    zeros = ours.config.force_zeros_for_empty_prompt
    stock = StableDiffusionXLPipeline(**ours.components, force_zeros_for_empty_prompt=zeros, add_watermarker=False)
    ours.set_progress_bar_config(disable=True)
    stock.set_progress_bar_config(disable=True)

    def embed(pipe, prompt: str | list[str], **options) -> dict[str, torch.Tensor | None]:
        embeddings = dict(zip(EMBEDDINGS, pipe.encode_prompt(prompt, device=device, **options), strict=True))
        if bad := [name for name, value in embeddings.items() if value is not None and not value.isfinite().all()]:
            raise ValueError(f"{', '.join(bad)} are not finite")
        return embeddings

    def latents(pipe, steps: int = 2, **call) -> torch.Tensor:
        size = {"height": config.height, "width": config.width, "generator": torch.Generator().manual_seed(0)}
        return pipe(**call, **size, num_inference_steps=steps, output_type="latent").images

    def short_prompts() -> str:
        cases = list(product((1, 2), (None, OTHER), (True, False), (None, 1)))
        for batch, second, guidance, skip in cases:
            call = {"prompt_2": second and [second] * batch, "do_classifier_free_guidance": guidance, "clip_skip": skip}
            theirs, mine = (embed(pipe, [SHORT, OTHER][:batch], **call) for pipe in (stock, ours))
            for name, value in theirs.items():
                if value is not None and not torch.equal(value, mine[name]):
                    raise ValueError(f"{name} of {batch} with {call} differ by {(value - mine[name]).abs().max():.3g}")
        if not torch.equal(latents(stock, prompt=SHORT), latents(ours, prompt=SHORT)):
            raise ValueError("latents differ, and embeddings do not")
        return f"{len(cases)} cases of embeddings, and latents"

    def sharpening() -> str:
        if config.sharpen == 1:
            return "not asked for: sharpen is 1"
        sharpened = copy.copy(ours).set_long_prompt(sharpen=config.sharpen)
        before, changed, after = (latents(pipe, prompt=LONG) for pipe in (ours, sharpened, ours))
        if torch.equal(before, changed) or not torch.equal(before, after):
            raise ValueError("latents are equal with and without it, or differ after it")
        return f"latents differ by {(before - changed).abs().mean():.3g} in the mean"

    def costs(pipe, count: int) -> dict[str, dict]:
        prompt = "red " * (count - 2)
        step = partial(latents, pipe, steps=1, **embed(pipe, prompt))
        return {"encoding": cost(partial(embed, pipe, prompt), device), "step": cost(step, device)}

    def shares() -> dict:
        size = {"height": config.height, "width": config.width, "generator": torch.Generator().manual_seed(0)}
        sentences = split_sentences(next(iter(sheet_prompts().values())))
        texts = [join_sentences(sentences[:count]) for count in range(1, len(sentences) + 1)]
        by_length = {ours.prompt_layout(text).positions: text for text in texts}  # the longest of each length
        rows = {count: attention_shares(ours, text, **size) for count, text in by_length.items() if count <= 227}
        means = {part: {count: fmean(row[part] for row in rows[count]) for count in rows} for part in PARTS}
        said = {
            part: ", ".join(f"{share:.0%} at {count}" for count, share in of_part.items())
            for part, of_part in means.items()
        }
        shortest, *_, longest = means["words"].values()
        how = "keep their part of the attention in long prompts, as in the toy worlds: what helps there may"
        if longest < KEPT * shortest:
            how = "lose a part of the attention in long prompts, unlike in the toy worlds: what helps there may not"
        return said | {"so": f"the words {how} help here", "rows": rows}

    readings = {name: copy.copy(ours).set_long_prompt(reading=name) for name in READINGS}
    load = partial(load_pipeline, config.base, None, device, without=DENOISER)
    lengths = {"stock, 77": (stock, 77)} | {f"ours, {count}": (ours, count) for count in (77, 227, 527)}
    checks = {
        "short prompts equal stock diffusers": short_prompts,
        "600 tokens are finite": lambda: [name for name in ("fp16", "bf16") if embed(load(DTYPES[name]), LONG)],
        "every reading encodes": lambda: [name for name in READINGS if embed(readings[name], LONG)],
        "sharpening differs and leaves no trace": sharpening,
        "where attention goes, by positions": shares,
        "time and memory, by positions": lambda: {name: costs(*pair) for name, pair in lengths.items()},
    }
    return {name: _result(name, work) for name, work in checks.items()}
