"""The cost of longer prompts for an image.

    python benchmarks/generate.py [--steps 30] [--repeats 7] [--timed] [--stock-encoders] [--positions 77 152 ...]

Counted: the FLOPs of SDXL at 1024 x 1024, its true configuration without weights. A step is the UNet on one row of the
batch; with guidance it runs on two, and every number of a step but the ratios doubles.
Timed: the steps of an image with guidance, from the embeddings to the latents, and the encoding of its prompt. On an
accelerator the model is SDXL with random weights in half precision, on the CPU the toy SDXL. The lengths take turns, so
that other load affects all; ratios are to the steps of stock diffusers (77 positions) in the same round. --timed leaves
out the counting, --stock-encoders gives CLIP-L 77 positions, so that it reads in chunks, and --positions names the
lengths, 77 among them.
Prints Markdown, and writes to benchmarks/results/.
"""

import statistics
from functools import partial

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
from harness import by_turns, publish, read_options
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from debias_diffusion.devices import seconds
from debias_diffusion.eval.report import Table
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.text.tokens import clip_tokenizer

WINDOW, STOCK = 248, 77
POSITIONS = (STOCK, 152, 227, WINDOW, 494)
COUNTED = (*POSITIONS, 496)  # the last: two chunks that keep their BOS and EOS

UNET = dict(
    sample_size=128,
    block_out_channels=(320, 640, 1280),
    down_block_types=("DownBlock2D", *2 * ["CrossAttnDownBlock2D"]),
    up_block_types=(*2 * ["CrossAttnUpBlock2D"], "UpBlock2D"),
    transformer_layers_per_block=(1, 2, 10),
    attention_head_dim=(5, 10, 20),
    cross_attention_dim=768 + 1280,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=6 * 256 + 1280,
    use_linear_projection=True,
)
VAE = dict(
    down_block_types=4 * ("DownEncoderBlock2D",),
    up_block_types=4 * ("UpDecoderBlock2D",),
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
)
IDS = dict(vocab_size=49408, bos_token_id=49406, eos_token_id=49407)
CLIP_L = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
BIG_G = dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20)


def random_sdxl(
    device: torch.device, dtype: torch.dtype, context_length: int = WINDOW
) -> StableDiffusionXLLongPromptPipeline:
    """SDXL's true configuration with a CLIP-L of `context_length` positions and a bigG of 77."""
    clip_l = CLIPTextConfig(**IDS, **CLIP_L, max_position_embeddings=context_length, hidden_act="quick_gelu")
    big_g = CLIPTextConfig(**IDS, **BIG_G, max_position_embeddings=STOCK, projection_dim=BIG_G["hidden_size"])
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            models = {
                "unet": UNet2DConditionModel(**UNET),
                "vae": AutoencoderKL(**VAE),
                "text_encoder": CLIPTextModel(clip_l),
                "text_encoder_2": CLIPTextModelWithProjection(big_g),
            }
    finally:
        torch.set_default_dtype(default)
    return StableDiffusionXLLongPromptPipeline(
        **{part: model.eval() for part, model in models.items()},
        tokenizer=clip_tokenizer(context_length),
        tokenizer_2=clip_tokenizer(STOCK, pad_token="!"),
        scheduler=EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        add_watermarker=False,
    )


def prompt_of(pipe: StableDiffusionXLLongPromptPipeline, positions: int) -> str:
    """A prompt whose embeddings have that many positions."""
    prompt = " ".join("red" if at % 16 else "." for at in range(1, positions - 1))
    actual = pipe.prompt_layout(prompt).positions
    assert actual == positions, f"{actual} positions, {positions} wanted"
    return prompt


# --- counted ---


@torch.no_grad()
def flops(run) -> tuple[int, dict[str, int]]:
    """What `run()` takes, in all and by the names of the modules."""
    with FlopCounterMode(display=False) as counter:
        run()
    by_module = {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
    return counter.get_total_flops(), by_module


def unet_inputs(pipe: StableDiffusionXLLongPromptPipeline, positions: int) -> dict:
    """Of one row, without values."""
    config, empty = pipe.unet.config, lambda *shape: torch.empty(*shape, device="meta")
    pooled = empty(1, pipe.text_encoder_2.config.projection_dim)
    return dict(
        sample=empty(1, config.in_channels, config.sample_size, config.sample_size),
        timestep=empty(()),
        encoder_hidden_states=empty(1, positions, config.cross_attention_dim),
        added_cond_kwargs={"text_embeds": pooled, "time_ids": empty(1, 6)},
    )


def parts(total: int, by_module: dict[str, int]) -> dict[str, float]:
    """The shares of a UNet's step."""

    def share(*ends: str) -> float:
        return sum(count for name, count in by_module.items() if name.endswith(ends)) / total

    shares = {
        "self-attention": share(".attn1"),
        "cross-attention, keys and values": share(".attn2.to_k", ".attn2.to_v"),
        "cross-attention, the rest": share(".attn2") - share(".attn2.to_k", ".attn2.to_v"),
        "feed-forward": share(".ff"),
    }
    shares["convolutions and the rest"] = 1 - sum(shares.values())
    return {part: round(value, 4) for part, value in shares.items()}


def count(steps: int) -> dict:
    """SDXL's FLOPs at the lengths of `COUNTED`."""
    pipe, rows = random_sdxl(torch.device("meta"), torch.float32), {}
    decode, _ = flops(lambda: pipe.vae.decode(unet_inputs(pipe, STOCK)["sample"]))
    for positions in tqdm(COUNTED, desc="counting"):
        inputs = unet_inputs(pipe, positions)
        plain, by_module = flops(lambda inputs=inputs: pipe.unet(**inputs))
        row = rows[positions] = {"plain": plain, "shares": parts(plain, by_module)}
        row["plain_to_stock"] = round(plain / rows[STOCK]["plain"], 4)
        if positions in POSITIONS:
            encode = partial(pipe.encode_prompt, prompt_of(pipe, positions), device="meta", negative_prompt="")
            row["encode"], _ = flops(encode)
            row["encode_share"] = round(row["encode"] / (row["encode"] + 2 * steps * plain + decode), 4)
    parameters = sum(parameter.numel() for parameter in pipe.unet.parameters())
    return {"unet_parameters": parameters, "steps": steps, "decode": decode, "rows": rows}


def counted_tables(result: dict) -> list[Table | str]:
    tera, rows, costs = 1e12, result["rows"], []
    title = (
        f"Counted: SDXL's UNet ({result['unet_parameters'] / 1e9:.3f} billion parameters) at 1024 x 1024, one row of "
        f"the batch (two with guidance). Encoding: CLIP-L of {WINDOW} positions, bigG in chunks of {STOCK}, prompt and "
        f"negative prompt; its share is of an image with guidance, {result['steps']} steps and decoding "
        f"({result['decode'] / tera:.2f} TFLOP)."
    )
    for positions, row in rows.items():
        encode = [f"{row['encode'] / tera:.3f}", f"{row['encode_share']:.2%}"] if "encode" in row else [None, None]
        costs.append([str(positions), f"{row['plain'] / tera:.3f}", f"{row['plain_to_stock'] - 1:+.2%}", *encode])
    shares = [[part, *(f"{row['shares'][part]:.1%}" for row in rows.values())] for part in rows[STOCK]["shares"]]
    return [
        title,
        Table(["positions", "TFLOP a step", "to stock", "encoding TFLOP", "share"], costs),
        Table(["share of a step", *map(str, rows)], shares),
    ]


# --- timed ---


@torch.no_grad()
def measure(
    pipe: StableDiffusionXLLongPromptPipeline, lengths: list[int], steps: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of every round, by what was done."""
    pipe.set_progress_bar_config(disable=True)
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    prompts = {positions: prompt_of(pipe, positions) for positions in lengths}
    embeds = {}

    def encode(positions: int) -> None:
        results = pipe.encode_prompt(prompts[positions], device=pipe.device, negative_prompt="")
        words = pipe.prompt_layout(prompts[positions], negative_prompt="").words
        embeds[positions] = dict(zip(names, results, strict=True)) | {"words": words}

    def draw(positions: int, **options: float) -> None:
        call = embeds[positions] | {"generator": torch.Generator().manual_seed(0)}
        pipe.set_long_prompt(**options)(**call, num_inference_steps=steps, output_type="latent")

    kinds = {"encode": encode, "plain": draw, "sharpen": partial(draw, sharpen=2)}
    variants = {f"{n} {kind}": partial(run, n) for n in lengths for kind, run in kinds.items()}
    return by_turns(variants, repeats, lambda run: seconds(run, pipe.device))


def spread(times: list[float], baseline: list[float]) -> list[float]:
    """Median, least and most of the rounds' ratios."""
    ratios = [one / other for one, other in zip(times, baseline, strict=True)]
    return [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))]


def time_images(device: torch.device, lengths: list[int], steps: int, repeats: int, stock: bool) -> dict:
    is_toy = device.type == "cpu"
    if is_toy:
        pipe = load_pipeline("toy/sdxl", None if stock else "toy/debias-clip", device)
    else:
        pipe = random_sdxl(device, torch.float16, STOCK if stock else WINDOW)
    times, rows = measure(pipe, lengths, steps, repeats), {}
    for positions in lengths:
        plain, encode = times[f"{positions} plain"], statistics.median(times[f"{positions} encode"])
        rows[positions] = {
            "step_ms": round(1000 * statistics.median(plain) / steps, 3),
            "plain_to_stock": spread(plain, times[f"{STOCK} plain"]),
            "sharpen_to_plain": spread(times[f"{positions} sharpen"], plain),
            "encode_ms": round(1000 * encode, 3),
            "encode_share": round(encode / (statistics.median(plain) + encode), 4),
        }
    return {
        "model": "toy" if is_toy else "sdxl",
        "precision": f"fp{torch.finfo(pipe.unet.dtype).bits}",
        "first_encoder_positions": pipe.text_encoder.config.max_position_embeddings,
        "pixels": pipe.default_sample_size * pipe.vae_scale_factor,
        "steps": steps,
        "repeats": repeats,
        "ratios": "median, least and most of the rounds, which took turns with whatever else ran there",
        "baseline": f"steps of stock diffusers: {STOCK} positions",
        "rows": rows,
    }


def timed_tables(result: dict) -> list[Table | str]:
    title = (
        f"Timed: {result['model']}, {result['pixels']} pixels, {result['precision']}, guidance, "
        f"{result['steps']} steps, {result['repeats']} rounds. Ratios ({result['ratios']}) are to {result['baseline']}."
    )
    lines = []
    for positions, row in result["rows"].items():
        ratios = row["plain_to_stock"], row["sharpen_to_plain"]
        ratios = ["{:.2f} ({:.2f}-{:.2f})".format(*values) for values in ratios]
        encoding = [f"{row['encode_ms']:.1f}", f"{row['encode_share']:.1%}"]
        lines.append([str(positions), row["step_ms"], *ratios, *encoding])
    titles = ["positions", "ms a step", "to stock", "sharpen, to plain", "ms encoding", "share of both"]
    return [title, Table(titles, lines)]


def main() -> None:
    options = read_options(__doc__, steps=30, repeats=7, timed=False, stock_encoders=False, positions=list(POSITIONS))
    device = Accelerator().device
    if not options.timed:
        counted = count(options.steps)
        publish("generate-sdxl-counted", counted, *counted_tables(counted))
    timed = time_images(device, options.positions, options.steps, options.repeats, options.stock_encoders)
    name = f"generate-{timed['model']}-{device.type}-{timed['precision']}" + "-stock" * options.stock_encoders
    publish(name, timed, *timed_tables(timed), device=device)


if __name__ == "__main__":
    main()
