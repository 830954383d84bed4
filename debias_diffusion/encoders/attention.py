"""The attention from a text encoder's output token, EOT, in the last layer (DeBias-CLIP, section E.3)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..clip.backbone import Backbone
from ..clip.blocks import before_attention, block_forward, causal_attention
from ..errors import UserError
from ..text.tokens import TokenBatch
from .text_encoders import TextEncoder

# What the attention before the softmax is divided by. The paper writes equations 1 and 2 for one head of the whole
# hidden dimension D. Divided by its root, the product of whole query and key, which is the sum over heads, is the mean
# over heads on their own scale times the root of their number: the same curve, higher.
Scale = Literal["head", "hidden"]


@dataclass(frozen=True)
class EotAttention:
    """The attention from each caption's EOT to the positions of its row, averaged over the heads of the last layer.

    Attributes:
        before_softmax: [batch, slots] m_EOT of equation 2, on one `Scale`; -inf after EOT.
        after_softmax: [batch, slots] the weights; a row sums to 1, and they are 0 after EOT.
        is_text: [batch, slots] True for SOT, text and EOT; False for pads.
        ends: [batch] number of slots up to and including EOT.
    """

    before_softmax: Tensor
    after_softmax: Tensor
    is_text: Tensor
    ends: Tensor


@torch.inference_mode()
def eot_attention(encoder: Backbone | TextEncoder, tokens: TokenBatch, scale: Scale = "head") -> EotAttention:
    """The last layer's attention from EOT, for a batch of captions. All tensors are on the CPU.

    Args:
        encoder: a CLIP two-tower, or a transformers CLIP text encoder, in evaluation mode.
        tokens: from the encoder's tokenizer, with its context length, on its device.
        scale: of `before_softmax`. "head": the mean over heads of q k / sqrt(head width), as in the softmax. "hidden":
            q k / sqrt(D) over all heads, D the hidden dimension, as in equations 1 and 2. The weights after the softmax
            are the same with both.

    Raises:
        UserError: EOT is not the encoder's output token.
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
    scores = (torch.einsum("bhd,bshd->bhs", query, key) / math.sqrt(query.shape[-1])).cpu()
    scores = scores.masked_fill((slots >= ends[:, None])[:, None], -torch.inf)
    is_text = ((slots < int(tokens.shared_sot)) | (slots >= tokens.n_prefix[:, None])) & (slots < ends[:, None])
    heads = scores.shape[1]
    before = scores.mean(dim=1) * (math.sqrt(heads) if scale == "hidden" else 1.0)
    return EotAttention(before, scores.softmax(dim=-1).mean(dim=1), is_text, ends)


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


class PositionMeans:
    """The mean attention from EOT to each position over many captions (equation 3), in double precision.

    A position's sum is divided by the number of captions with text there, not padding; EOT counts as text, as in the
    equation.

    Args:
        context_length: positions of the encoder.

    Attributes:
        counts: [context_length] number of captions with SOT, text or EOT at each position.
        captions: number of captions.
    """

    def __init__(self, context_length: int):
        self.captions, self.counts = 0, torch.zeros(context_length, dtype=torch.long)
        kinds = ("before_softmax", "after_softmax")
        self._sums = {kind: torch.zeros(context_length, dtype=torch.double) for kind in kinds}
        self._eot = dict.fromkeys(self._sums, 0.0)

    def add(self, attention: EotAttention) -> None:
        """Raises UserError for attention that is not finite."""
        slots = attention.is_text.shape[1]
        eot = torch.arange(len(attention.ends)), attention.ends - 1
        for name, sums in self._sums.items():
            values = getattr(attention, name).double()
            if not values[attention.is_text].isfinite().all():
                raise UserError("The attention is NaN or infinite. Check the encoder's weights.")
            sums[:slots] += values.masked_fill(~attention.is_text, 0.0).sum(dim=0)
            self._eot[name] += values[eot].sum().item()
        self.counts[:slots] += attention.is_text.sum(dim=0)
        self.captions += len(attention.ends)

    def means(self, name: str) -> Tensor:
        """[positions] "before_softmax" or "after_softmax", SOT first, up to the last position with text."""
        positions = int(self.counts.nonzero().max()) + 1
        return self._sums[name][:positions] / self.counts[:positions]

    def eot(self, name: str) -> float:
        """The mean attention from EOT to itself, at any position."""
        return self._eot[name] / self.captions
