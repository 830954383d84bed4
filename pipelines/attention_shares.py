"""Where a UNet's cross-attention goes: to BOS, to the words, to EOS and to the pads."""

from collections import defaultdict
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor2_0

from .sharpening import attention_logits

PARTS = ("BOS", "words", "EOS", "pads")


class _Watching(AttnProcessor2_0):
    """diffusers' processor of a cross-attention, which notes the shares of the last row of a batch, the prompt's."""

    def __init__(self, words: int, noted: dict[int, list[torch.Tensor]]):
        super().__init__()
        self.words, self.noted = words, noted

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
        weights = attention_logits(attn, hidden_states[-1:], encoder_hidden_states[-1:]).softmax(-1)
        shares = weights.mean((0, 1))  # [positions]
        sizes = [1, self.words, 1, len(shares) - self.words - 2]
        self.noted[hidden_states.shape[1]].append(torch.stack([part.sum() for part in shares.split(sizes)]))
        return super().__call__(attn, hidden_states, encoder_hidden_states, *args, **kwargs)


@torch.no_grad()
def attention_shares(pipe: Any, prompt: str, steps: int = 3, **call) -> list[dict]:
    """The shares of the attention at the first, a middle and the last step, by the resolution of the attention.

    Means over heads, layers and places of the image, of the row with guidance.

    Args:
        pipe: an SDXL pipeline for long prompts with the reading `overlap` or `separate`, whose UNet nothing sharpens.
        prompt: whose words, EOS and pads are told apart by `prompt_layout`.
        call: more arguments of the pipeline's call.

    Returns:
        for each step and resolution "step", from 1, "places" of the image, and the PARTS, whose sum is 1.
    """
    words = sum(pipe.prompt_layout(prompt).words[0])
    processors, rows = pipe.unet.attn_processors, []
    noted: dict[int, list[torch.Tensor]] = defaultdict(list)

    def note_step(pipe: Any, index: int, timestep: Any, tensors: dict) -> dict:
        if index in (0, steps // 2, steps - 1):
            for places, parts in sorted(noted.items(), reverse=True):
                shares = torch.stack(parts).mean(0).tolist()
                rows.append({"step": index + 1, "places": places, **dict(zip(PARTS, shares, strict=True))})
        noted.clear()
        return {}

    watching = _Watching(words, noted)
    pipe.unet.set_attn_processor({name: watching if "attn2" in name else own for name, own in processors.items()})
    try:
        pipe(prompt, num_inference_steps=steps, callback_on_step_end=note_step, output_type="latent", **call)
    finally:
        pipe.unet.set_attn_processor(processors)
    return rows
