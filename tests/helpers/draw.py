"""How the tests of pipelines draw."""

import inspect
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

SHORT = "A red cat sleeps on a blue sofa, next to a window."
OTHER = "Two green birds."
LONG = f"{SHORT} {'The sky is grey, the house is old. ' * 9}In front of it stands a yellow bicycle."
PROMPTS = {"short": SHORT, "long": LONG}

# in the order in which `encode_prompt` returns them; Stable Diffusion 1.5 has the first two
EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
TEXT_PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


def load(cls, folder, **components):
    pipe = cls.from_pretrained(folder, add_watermarker=False, **components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def aligned(pipe):
    """The pipeline with copies of its weights. Where they lie in a file's memory map decides the last bits of sums."""
    for part in models(pipe).values():
        for weight in part.parameters():
            weight.data = weight.data.clone()
    return pipe


def draw(pipe, prompt=None, seed=0, **call):
    """Images [n, height, width, 3] of two steps; what the call gives wins."""
    default = {"num_inference_steps": 2, "generator": torch.Generator("cpu").manual_seed(seed), "output_type": "np"}
    return pipe(prompt=prompt, **{**default, **call}).images


def generators(count):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def embed(pipe, prompt, guided=True, **encoded):
    """The arguments of a call that stand for the prompt."""
    how = {"device": None, "num_images_per_prompt": 1, "do_classifier_free_guidance": guided}
    embeds = pipe.encode_prompt(prompt, **how, **encoded)
    return {name: value for name, value in zip(EMBEDDINGS, embeds, strict=False) if value is not None}


@contextmanager
def watched(pipe):
    """Lists the batch and length of the text at each step of the UNet."""
    seen = []
    hook = pipe.unet.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["encoder_hidden_states"].shape[:2])), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


def only_in_forward(model):
    """Outside of its `forward` a model's weights are NaN from now on, as if they lay elsewhere.

    Only the final norm, which SD 1.5's `clip_skip` calls by itself, fetches its own, as offloaded layers do.
    """
    weights = {weight: weight.data for weight in model.parameters()}
    away = {weight: torch.tensor(float("nan"), dtype=weight.dtype).expand(weight.shape) for weight in weights}

    def put(values):
        for weight, value in values.items():
            weight.data = value

    for name, module in model.named_modules():
        if name.endswith("final_layer_norm"):
            module.register_forward_pre_hook(
                lambda norm, _: put({weight: weights[weight] for weight in norm.parameters()})
            )
    model.register_forward_pre_hook(lambda *_: put(weights))
    model.register_forward_hook(lambda *_: put(away))
    put(away)


def models(pipe):
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def parameters(function):
    return inspect.signature(function).parameters


def arguments(function):
    """Names, kinds and defaults; annotations may differ."""
    return [(name, parameter.kind, parameter.default) for name, parameter in parameters(function).items()]


def add_lora(encoder, scale=1.0):
    """A layer of the LoRA that it adds, by peft itself: transformers may ask for a later one than there is."""
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    torch.manual_seed(3)
    lora = LoraConfig(r=4, lora_alpha=4 * scale, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    inject_adapter_in_model(lora, encoder)
    encoder.peft_config = {"default": lora}  # as transformers would
    return next(layer for layer in encoder.modules() if hasattr(layer, "scaling"))


WORDS = ("red cat blue sofa tree house sky " * 30).split()
PLAIN = " ".join(WORDS[:140])
LATE = " ".join([*WORDS[:120], "dragon", *WORDS[121:140]])  # differs in token 120


def same_image(pipe, **call):
    """Whether the late word is without effect on the image."""
    images = [draw(pipe, prompt, height=32, width=32, **call) for prompt in (PLAIN, LATE)]
    assert images[0].shape == (1, 32, 32, 3) and images[0].std() > 0.01
    return np.array_equal(*images)
