"""The toy world's SDXL: diffusers' and transformers' own classes under SDXL's configuration keys, at tiny sizes."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion.toyworld.shipped import GUIDANCE_SCALE, STEPS

from .vae import LATENT_CHANNELS, SIZE

_TIME_EMBEDDING = 32  # of each of the six numbers that say size, crop and target size


def new_unet(text_width: int, pooled_width: int, seed: int = 2) -> UNet2DConditionModel:
    """The untrained UNet; as in SDXL the text enters below the first level only, in several layers a block.

    Its second level has 3 x 3 cells, one for each place of a scene.

    Args:
        text_width: of both text encoders' hidden states together.
        pooled_width: of the second text encoder's projection.
    """
    torch.manual_seed(seed)
    return UNet2DConditionModel(
        sample_size=SIZE // 8,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=[1, 2],
        attention_head_dim=[4, 8],  # the number of heads, under the name that diffusers gives it
        cross_attention_dim=text_width,
        addition_embed_type="text_time",
        addition_time_embed_dim=_TIME_EMBEDDING,
        projection_class_embeddings_input_dim=pooled_width + 6 * _TIME_EMBEDDING,
        use_linear_projection=True,
        norm_num_groups=16,
    )


def new_scheduler() -> EulerDiscreteScheduler:
    """SDXL's noise schedule down to no signal at all, so that drawing starts where training has been.

    The model predicts v, because at that end noise would tell nothing (Lin et al., 2024, Common Diffusion Noise
    Schedules and Sample Steps are Flawed).
    """
    return EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )


def assemble(
    text_encoder: CLIPTextModel,
    text_encoder_2: CLIPTextModelWithProjection,
    tokenizer: CLIPTokenizer,
    vae: AutoencoderKL,
) -> StableDiffusionXLPipeline:
    """The parts as a stock pipeline, with an untrained UNet."""
    width = text_encoder.config.hidden_size + text_encoder_2.config.hidden_size
    return StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=text_encoder,
        text_encoder_2=text_encoder_2,
        tokenizer=_padded_with(tokenizer, "<|endoftext|>"),
        tokenizer_2=_padded_with(tokenizer, "!"),
        unet=new_unet(width, text_encoder_2.config.projection_dim),
        scheduler=new_scheduler(),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )


def _padded_with(tokenizer: CLIPTokenizer, pad: str) -> CLIPTokenizer:
    """A copy that pads as SDXL's first tokenizer does, with EOT, or as its second, with "!", which is id 0."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in settings["merges"]]
    return CLIPTokenizer(
        vocab=settings["vocab"], merges=merges, pad_token=pad, model_max_length=tokenizer.model_max_length
    )


def save(pipe: StableDiffusionXLPipeline, folder: Path) -> None:
    """Writes the folder that StableDiffusionXLPipeline.from_pretrained loads; its weights as fp16."""
    pipe.to(torch.float16).save_pretrained(folder)
    for name in ("model_index.json", "text_encoder", "text_encoder_2", "unet", "vae"):
        file = folder / name if name.endswith(".json") else folder / name / "config.json"
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)  # where it lay while it was built
        if name.startswith("text_encoder"):
            config["dtype"] = "float32"  # diffusers loads its own parts so, transformers as they are stored
        elif name == "model_index.json":
            config["_sampling"] = {"steps": STEPS, "guidance_scale": GUIDANCE_SCALE, "fixed_size": True}
        file.write_text(json.dumps(config, indent=2) + "\n")
