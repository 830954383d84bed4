"""SmartCLIP: a caption chooses the dimensions of the image embedding that it is compared with (arXiv 2507.22264).

smart-clip   one caption, cut after a random number of sentences, against the image under the caption's binary mask

The mask network is saved beside the towers, for `evaluate masked-retrieval`; published scores are without. More:
`research/recipes.md`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from open_clip.transformer import ResidualAttentionBlock
from torch import Tensor, nn

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.blocks import block_forward, full_attention
from debias_diffusion.clip.text_tower import TextTower
from debias_diffusion.clip.weight_files import check_finite, read_state, save_tensors
from debias_diffusion.data.batch import Batch
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.limits import NonNegativeFloat, PositiveFloat
from debias_diffusion.methods import Term
from debias_diffusion.methods.base import Losses
from debias_diffusion.methods.dual_caption import DualCaption

MASK_FILE = "mask_network.safetensors"  # beside the weights of a model
_ALIGN = 10.0  # lambda_align
_LEAST_SQUARE = 1e-12  # of the length under a mask, of an image feature of length 1


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


def masked_cosines(images: Tensor, texts: Tensor, masks: Tensor) -> Tensor:
    """cos(masks_j * images_i, texts_j), [N, M]: images [N, dim], each under the mask of each text, both [M, dim].

    As <image, mask * text> / sqrt(<image^2, mask^2>), two products, with no tensor [N, M, dim]; 0 under an empty mask.
    """
    images, texts = F.normalize(images, dim=-1), F.normalize(texts, dim=-1)
    squares = images.square() @ masks.square().T
    return images @ (masks * texts).T * squares.clamp(min=_LEAST_SQUARE).rsqrt()


@dataclass(frozen=True)
class MaskedLoss(Term):
    """10 (L_i2t + L_t2i) + sparsity * mean |mask|: similarities are cos(mask_j * image_i, text_j).

    Attributes:
        sparsity: weight of the share of dimensions that masks keep.
    """

    sparsity: float
    label_smoothing: float

    def modules(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"mask": MaskNetwork(backbone.text)}

    def encode(
        self, backbone: Backbone, batch: Batch, features: Mapping[str, Tensor], modules: Any = None
    ) -> dict[str, Tensor]:
        """{"mask": [batch, embed_dim]}"""
        with torch.no_grad():  # masks teach the text tower nothing
            states = backbone.text.final_states(batch.tokens)
        return {"mask": modules["mask"](states)}

    def losses(self, features: Mapping[str, Tensor], scale: Tensor, bias: Tensor | None = None) -> Losses:
        mask = features["mask"]
        logits = scale * masked_cosines(features["image"], features["short_text"], mask)
        labels, smoothing = torch.arange(len(mask), device=mask.device), self.label_smoothing
        both = [F.cross_entropy(rows, labels, label_smoothing=smoothing) for rows in (logits, logits.T)]
        masked = both[0] + both[1]
        size = mask.abs().mean()  # with no gradient where a mask is 0
        losses = {"masked_loss": _ALIGN * masked, "mask_size_loss": self.sparsity * size}
        return losses, {"masked": masked.detach() / 2, "mask_size": size.detach()}

    def describe(self) -> str:
        return f"masks whose size has weight {self.sparsity:g}"


@dataclass(frozen=True)
class SmartClip(DualCaption):
    """One caption against the image under its mask, in the place of the other losses; see `MaskedLoss`.

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

    @cached_property
    def terms(self) -> list[Term]:
        _, *others = super().terms  # but the first, of the long and the short caption
        return [*others, MaskedLoss(self.sparsity, self.label_smoothing)]

    @property
    def rates(self) -> dict[str, float]:
        return {"method/": self.new_rate}

    def save(self, folder: Path, modules: Any = None) -> None:
        save_tensors(modules["mask"].state_dict(), folder / MASK_FILE)


SMART_CLIP = SmartClip("opening", "none", short_weight=1.0, components=0, label_smoothing=0.0)
