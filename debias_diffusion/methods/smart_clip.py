"""SmartCLIP: a caption chooses the dimensions of the image embedding that it is compared with (arXiv 2507.22264).

smart-clip   one caption, cut after a random number of sentences, against the image under the caption's binary mask

The mask network is saved beside the towers, for `--masks`; published scores are without. More: `research/recipes.md`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from open_clip.transformer import ResidualAttentionBlock
from torch import Tensor, nn

from ..clip.backbone import Backbone
from ..clip.blocks import block_forward, full_attention
from ..clip.text_tower import TextTower
from ..clip.weight_files import check_finite, read_state, save_tensors
from ..errors import UserError, explain_failure
from ..limits import NonNegativeFloat, PositiveFloat
from ..text.tokens import TokenBatch
from .base import Batch
from .dual_caption import DualCaption
from .keep_states import KeepStates
from .objectives import masked_cosines

MASK_FILE = "mask_network.safetensors"  # beside the weights of a model
_ALIGN = 10.0  # lambda_align


class MaskNetwork(nn.Module):
    """One transformer block over all states of a caption, attention pooling, and a threshold.

    Args:
        text: the text tower, whose width, heads and activation it takes. It begins as a block of CLIP's does.
    """

    def __init__(self, text: TextTower):
        super().__init__()
        like, width = text.transformer.resblocks[0], text.tower.positional_embedding.shape[1]
        self.block = ResidualAttentionBlock(width, cast(int, like.attn.num_heads), act_layer=type(like.mlp.gelu))
        self.pool = nn.Linear(width, 1, bias=False)  # the softmax would cancel a bias
        for matrix in (self.block.attn.in_proj_weight, self.pool.weight):
            nn.init.normal_(matrix, std=width**-0.5)
        for name in ("attn.out_proj", "mlp.c_fc", "mlp.c_proj"):
            nn.init.normal_(self.block.get_parameter(f"{name}.weight"), std=(2 * width) ** -0.5)

    def forward(self, states: Tensor) -> Tensor:
        """[batch, positions, width] -> [batch, width] of 0 and 1, with the gradient of their sigmoid."""
        states = block_forward(self.block, states, full_attention)
        soft = (self.pool(states).softmax(dim=1) * states).sum(dim=1).sigmoid()
        return soft + ((soft >= 0.5).to(soft) - soft).detach()

    def encode(self, backbone: Backbone, tokens: TokenBatch) -> Tensor:
        """[batch, 2, embed_dim]: each caption's feature, not normalised, and its mask."""
        return torch.stack([backbone.encode_text(tokens), self(backbone.text.final_states(tokens))], dim=1)


def read_mask_network(folder: str, backbone: Backbone) -> MaskNetwork | None:
    """What a run has saved beside its model, or None. Raises UserError if it is damaged, or of another model."""
    file = Path(folder, MASK_FILE)
    if not file.is_file():
        return None
    with explain_failure(f"The mask network {str(file)!r} cannot be used"):
        network = MaskNetwork(backbone.text)
        network.load_state_dict(read_state(file))
        check_finite(network.state_dict().items(), repr(str(file)))
    return network.to(backbone.logit_scale).eval()


@dataclass(frozen=True)
class SmartClip(DualCaption):
    """One caption against the image under its mask: similarities are cos(mask_j * image_i, text_j).

        L = 10 (L_i2t + L_t2i) + sparsity * mean |mask|

    Attributes:
        sparsity: weight of the share of dimensions that masks keep.
        new_rate: multiplies the learning rate of the mask network.
    """

    sparsity: NonNegativeFloat = 2.0
    new_rate: PositiveFloat = 1000.0

    def __post_init__(self):
        super().__post_init__()
        given = f"short_weight is {self.short_weight:g} and components {self.components}"
        if self.has_long or self.components:
            raise UserError(f"{given}, but smart-clip compares one caption with masked images. Leave both out.")

    def check_base(self, base_model: Backbone, keep_positions: int, freeze_image_tower: bool) -> None:
        super().check_base(base_model, keep_positions, freeze_image_tower)
        config = base_model.config["model_cfg"]
        width, embed_dim = config["text_cfg"].get("width"), config["embed_dim"]
        if not base_model.family.causal or width != embed_dim:
            raise UserError(
                f"A mask has the {width} channels of the text tower, and masks the {embed_dim} dimensions of the image "
                "embedding. Give a CLIP with as many of both, such as OpenAI's ViT-B-16 or ViT-L-14."
            )

    def prepare(self, backbone: Backbone) -> DualCaption:
        backbone.logit_scale.requires_grad_(False)  # 100 throughout in the authors' code
        return super().prepare(backbone)

    def modules(self, backbone: Backbone) -> dict[str, nn.Module]:
        return super().modules(backbone) | {"mask": MaskNetwork(backbone.text)}

    def save(self, folder: Path, modules: Any = None) -> None:
        save_tensors(modules["mask"].state_dict(), folder / MASK_FILE)

    def rate(self, name: str) -> float:
        return self.new_rate if name.startswith("method/") else 1.0

    def encode(self, backbone: Backbone, batch: Batch, modules: Any = None) -> dict[str, Tensor]:
        with torch.no_grad():  # masks teach the text tower nothing
            states = backbone.text.final_states(batch.tokens)
        return super().encode(backbone, batch, modules) | {"mask": modules["mask"](states)}

    def losses(
        self, features: dict[str, Tensor], scale: Tensor, bias: Tensor | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mask = features["mask"]
        logits = scale * masked_cosines(features["image"], features["short_text"], mask)
        labels, smoothing = torch.arange(len(mask), device=mask.device), self.label_smoothing
        both = [F.cross_entropy(rows, labels, label_smoothing=smoothing) for rows in (logits, logits.T)]
        masked = both[0] + both[1]
        size = mask.abs().mean()  # with no gradient where a mask is 0
        losses, report = KeepStates.losses(self, features, scale, bias)
        losses |= {"masked_loss": _ALIGN * masked, "mask_size_loss": self.sparsity * size}
        return losses, report | {"masked": masked.detach() / 2, "mask_size": size.detach()}

    def describe(self) -> str:
        return f"{super().describe()}, masks whose size has weight {self.sparsity:g}"


RECIPES = {"smart-clip": SmartClip("opening", "none", short_weight=1.0, components=0, label_smoothing=0.0)}
