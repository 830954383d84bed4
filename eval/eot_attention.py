"""The attention from a text encoder's output token, EOT, in the last layer (DeBias-CLIP, section E.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.blocks import before_attention, block_forward, causal_attention
from debias_diffusion.encoders.text_encoders import TextEncoder
from debias_diffusion.errors import UserError
from debias_diffusion.text.tokens import TokenBatch


@dataclass(frozen=True)
class EotAttention:
    """The attention from each caption's EOT to the positions of its row, averaged over the heads of the last layer.

    Attributes:
        before_softmax: [batch, slots] m_EOT of equation 2 in standard deviations from its mean, both over the caption's
            text; -inf after EOT. So encoders whose products of q and k have other scales can be compared, and what the
            equations divide them by does not matter. Text that is looked at all alike has 0.
        after_softmax: [batch, slots] the weights; a row sums to 1, and they are 0 after EOT.
        is_text: [batch, slots] True for text; False for SOT, EOT and pads.
        ends: [batch] number of slots up to and including EOT.
    """

    before_softmax: Tensor
    after_softmax: Tensor
    is_text: Tensor
    ends: Tensor


@torch.inference_mode()
def eot_attention(encoder: Backbone | TextEncoder, tokens: TokenBatch) -> EotAttention:
    """The last layer's attention from EOT, for a batch of captions. All tensors are on the CPU.

    Args:
        encoder: a CLIP two-tower, or a transformers CLIP text encoder, in evaluation mode.
        tokens: from the encoder's tokenizer, with its context length, on its device.

    Raises:
        UserError: EOT is not the encoder's output token, or the attention is not finite.
    """
    check_reads_eot(encoder)
    ends = tokens.n_prefix + tokens.lengths
    slots = torch.arange(int(ends.max()))
    # Under the causal mask nothing after the longest caption's EOT matters.
    rows = tokens.padded()[:, : len(slots)]
    last_layer = _backbone_last_layer if isinstance(encoder, Backbone) else _transformers_last_layer
    # [batch, slots, heads, head_dim] each; half precision is multiplied in single
    query, key = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in last_layer(encoder, rows))
    query = query[torch.arange(len(ends)), ends - 1]
    # [batch, heads, slots]
    scores = (torch.einsum("bhd,bshd->bhs", query, key) / query.shape[-1] ** 0.5).cpu()
    if not scores.isfinite().all():
        raise UserError("The attention is NaN or infinite. Check the encoder's weights.")
    after_eot = slots >= ends[:, None]
    weights = scores.masked_fill(after_eot[:, None], -torch.inf).softmax(dim=-1).mean(dim=1)
    starts = tokens.n_prefix + int(not tokens.shared_sot)  # of the text
    is_text = (slots >= starts[:, None]) & (slots < ends[:, None] - 1)
    before = _standardised(scores.mean(dim=1), is_text).masked_fill(after_eot, -torch.inf)
    return EotAttention(before, weights, is_text, ends)


def _standardised(values: Tensor, is_text: Tensor) -> Tensor:
    """Values [batch, slots] of each caption in standard deviations from their mean, both over its text."""
    count = is_text.sum(dim=1, keepdim=True).clamp(min=1)
    values = values - values.where(is_text, 0.0).sum(dim=1, keepdim=True) / count
    deviation = (values.where(is_text, 0.0).square().sum(dim=1, keepdim=True) / count).sqrt()
    return (values / deviation).masked_fill(deviation == 0, 0.0)


def check_reads_eot(encoder: Backbone | TextEncoder) -> None:
    """Raises UserError for a two-tower that does not read its text feature at EOT under a causal mask."""
    if not isinstance(encoder, Backbone):
        return
    if not encoder.family.causal:
        raise UserError(
            f"The text tower of a {encoder.family.name} has no causal mask, and its feature is not read at EOT, so "
            "there is no attention from EOT as DeBias-CLIP defines it. Give a CLIP, for example ViT-L-14."
        )
    if encoder.pooling != "eot":
        raise UserError(
            f"This text tower has {encoder.pooling} pooling: EOT is not its output token, and the attention from EOT "
            "says little about its features. Give one that is pooled at EOT."
        )


def _backbone_last_layer(backbone: Backbone, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [batch, slots] -> the last block's query and key, [batch, slots, heads, head_dim] each"""
    tower = backbone.text.tower
    hidden_states = tower.token_embedding(rows) + tower.positional_embedding[: rows.shape[1]]
    *blocks, last = tower.transformer.resblocks
    for block in blocks:
        hidden_states = block_forward(block, hidden_states, causal_attention)
    return before_attention(last, hidden_states)[:2]


def _transformers_last_layer(encoder: TextEncoder, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the encoder's own layers, adapters included"""
    layer = getattr(encoder, "text_model", encoder).encoder.layers[-1]
    states = layer.layer_norm1(encoder(input_ids=rows, output_hidden_states=True).hidden_states[-2])
    parts = (layer.self_attn.q_proj, layer.self_attn.k_proj)
    return tuple(part(states).unflatten(-1, (encoder.config.num_attention_heads, -1)) for part in parts)
