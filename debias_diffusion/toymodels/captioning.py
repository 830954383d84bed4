"""A captioning loss beside the contrastive one, as CoCa has it, so that hidden states say which word belongs to which.

Contrastive training alone leaves the toy CLIP's texts a bag of words (see docs/toy-world-making.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHT = 2.0  # of the captioning loss, beside 1 for the contrastive one (Yu et al., 2022, CoCa, section 4.1)


class Captioner(nn.Module):
    """Predicts each next token of a caption from the text tower's hidden state there and the patches of the image.

    It reads the layer that SDXL's UNet reads and has no attention between tokens: what the words so far say must be
    in that one state. Only training uses it.

    Args:
        width: of both towers' hidden states.
    """

    def __init__(self, width: int, heads: int, vocabulary: int):
        super().__init__()
        self.before_attention, self.before_mlp, self.before_head = (nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, hidden_states: Tensor, patches: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """The mean cross-entropy of the tokens behind SOT, EOT included.

        Args:
            hidden_states: [batch, tokens, width], after the block before the last.
            patches: [batch, patches, width], of the image tower.
            ids: [batch, tokens]
            lengths: [batch], SOT and EOT included.
        """
        queries = self.before_attention(hidden_states)
        hidden_states = hidden_states + self.attention(queries, patches, patches, need_weights=False)[0]
        hidden_states = hidden_states + self.mlp(self.before_mlp(hidden_states))
        asked = torch.arange(1, ids.shape[1]) < lengths[:, None]
        logits = self.head(self.before_head(hidden_states[:, :-1][asked]))
        return F.cross_entropy(logits.float(), ids[:, 1:][asked])
