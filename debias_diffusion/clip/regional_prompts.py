"""Regional prompts of an image tower (Fix-CLIP, section 3.3): learned tokens between CLS and patches, one for a band.

    X = [CLS, R_1 .. R_M, P_1 .. P_N] in every block; after block l, R of block l + 1 takes the prompts' places (E2)

So what the prompts attend to is read by nothing: they are keys and values alone, the same for every image.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from open_clip.transformer import ResidualAttentionBlock
from torch import nn

from ..limits import Checked, PositiveInt
from .blocks import Attention, before_attention, full_attention

_DEVIATION = 0.02  # of the prompts at the start


@dataclass(frozen=True)
class PromptSettings(Checked):
    """How an image tower uses its prompts: what its weights do not say.

    Attributes:
        count: M, the number of prompts in a block, from 1.
        mask: who attends to whom, CLS always to all. Because prompts are replaced, what they attend to changes nothing:
            Table 13's R2P, where prompts attend to all patches, is "bands"; its P2R, where patches attend to prompts
            too, is "none".
            "bands": patches attend to CLS and patches; prompt j to itself and band j (E3 with j - 1, Fig. 4).
            "none": everything attends to everything.
        layers: "own" prompts for each block, or the same "shared" by all (Table 13).

    Raises:
        UserError: a value is none of these.
    """

    count: PositiveInt
    mask: Literal["bands", "none"] = "bands"
    layers: Literal["own", "shared"] = "own"


class RegionalPrompts(nn.Module):
    """The prompts of all blocks, as part of an image tower: `visual.regional_prompts`.

    Args:
        settings: see `PromptSettings`.
        width, depth: of the image tower.

    Attributes:
        prompts: [depth, count, width], or [1, count, width] where all blocks share them; N(0, 0.02^2) at the start.
    """

    def __init__(self, settings: PromptSettings, width: int, depth: int):
        super().__init__()
        self.settings = settings
        sets = 1 if settings.layers == "shared" else depth
        self.prompts = nn.Parameter(_DEVIATION * torch.randn(sets, settings.count, width))

    def attention(self, module: ResidualAttentionBlock, block: int) -> Attention:
        """The attention of a block with the prompts. It may be given the query of CLS alone.

        Args:
            module: the block, whose weights make the prompts' keys and values.
            block: its number, from 0.
        """
        return partial(self._attend, module, self.prompts[block % len(self.prompts)])

    def _attend(self, module: ResidualAttentionBlock, prompts: torch.Tensor, query, key, value) -> torch.Tensor:
        """Of CLS and patches, [batch, 1 + patches, heads, head_dim] each; prompts [count, width]."""
        _, *prompt_key_value = before_attention(module, prompts)
        behind = (part.to(key.dtype).expand(len(key), *part.shape) for part in prompt_key_value)
        everything = [torch.cat(parts, dim=1) for parts in zip((key, value), behind, strict=True)]
        if self.settings.mask == "none":
            return full_attention(query, *everything)
        cls = full_attention(query[:, :1], *everything)
        if query.shape[1] == 1:
            return cls
        return torch.cat([cls, full_attention(query[:, 1:], key, value)], dim=1)
