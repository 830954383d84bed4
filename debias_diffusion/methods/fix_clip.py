"""Fix-CLIP: masked images for short captions, regional prompts, and features of middle layers (arXiv 2507.10095).

fix-clip    the paper's method (section 3)
long-clip   the summary as the short caption, both losses weigh the same; each part can be added: the paper's Table 4

Its text tower is an ordinary one. After training, the long table of positions reads every caption, and the regional
prompts (`clip.regional_prompts`) stay in the image tower; the mask vector and the heads of the hierarchy are left
behind. `docs/fix-clip.md` says how the paper's tables are run, `research/fix-clip.md` where it leaves a choice.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..clip.backbone import Backbone
from ..clip.image_tower import ImageTower, MaskedPatches
from ..clip.regional_prompts import PromptSettings
from ..clip.text_tower import set_short_positions
from ..data.batch import Batch, Caption, draw_generator
from ..errors import UserError
from ..method_settings import FixClipSettings
from ..text.tokens import CaptionTokenizer
from .base import Losses, Term, at_least_float
from .dual_caption import DualCaption
from .objectives import contrastive_loss

_HALF = 0.5  # of all terms: E8 adds L_short and L_long at weight 1, the other recipes halve them
_LAST_WEIGHT = 0.8  # omega of the last group; each group before it has half (section 4.1: 0.2, 0.4, 0.8)
_GROUPS = 3  # that are compared where no first group is given: the fourth to the sixth of six


def mask_size(ratio: float, patches: int) -> int:
    """floor(ratio * patches): how many of an image's patches are masked (section 3.2).

    Args:
        ratio: alpha, above 0 and below 1.

    Raises:
        UserError: none or all would be.
    """
    masked = math.floor(Fraction(str(ratio)) * patches)
    if not 0 < masked < patches:
        raise UserError(
            f"mask_ratio is {ratio:g}, which masks {masked} of the image's {patches} patches; at least one must be "
            "masked and one left. Give another."
        )
    return masked


def draw_mask(ratio: float, patches: int, seed: int, epoch: int, sample_id: str) -> Tensor:
    """[patches] bool, True where a patch is masked: drawn without replacement, apart from all other draws."""
    rng = draw_generator(seed, epoch, f"{sample_id}/mask")
    is_masked = torch.zeros(patches, dtype=torch.bool)
    is_masked[rng.sample(range(patches), mask_size(ratio, patches))] = True
    return is_masked


class GroupHeads(nn.Module):
    """GMF (E6): a projection without bias and a layer norm for each compared group of one tower.

    Args:
        projection: [width, embed_dim] the tower's final one, from which each group's starts.
        groups: how many are compared.
    """

    def __init__(self, projection: Tensor, groups: int):
        super().__init__()
        width, embed_dim = projection.shape
        self.projections = nn.ModuleList(nn.Linear(width, embed_dim, bias=False) for _ in range(groups))
        self.norms = nn.ModuleList(nn.LayerNorm(embed_dim) for _ in range(groups))
        for linear in self.projections:
            linear.weight = nn.Parameter(projection.detach().T.clone(memory_format=torch.contiguous_format))

    def forward(self, aggregated: Tensor) -> Tensor:
        """[batch, groups, width] -> [batch, groups, embed_dim]"""
        heads = zip(self.projections, self.norms, aggregated.unbind(1), strict=True)
        return torch.stack([norm(linear(state)) for linear, norm, state in heads], dim=1)


@dataclass(frozen=True)
class GroupLosses(Term):
    """E7: symmetric InfoNCE of the images' and the long captions' features of groups of blocks (section 3.4).

    Its features, "image_groups" and "text_groups", [batch, compared groups, embed_dim], come from the towers' pass that
    `FixClip.encode` makes. No label is smoothed. "group_4" and so on in the report are L_g without their weights.

    Attributes:
        groups: G, which divides the blocks of either tower.
        first: K, the first group that is compared, from 1 to G.
    """

    groups: int
    first: int

    @property
    def numbers(self) -> range:
        """The groups that are compared, K to G."""
        return range(self.first, self.groups + 1)

    def weight(self, group: int) -> float:
        """omega_g = 0.8 * 2^(g - G): 0.2, 0.4 and 0.8 for groups 4 to 6 of 6, as in the paper."""
        return _LAST_WEIGHT * 2.0 ** (group - self.groups)

    def blocks(self, depth: int) -> list[int]:
        """The numbers, from 0, of the blocks of the compared groups, of a tower with `depth` blocks."""
        size = depth // self.groups
        return list(range((self.first - 1) * size, depth))

    def aggregate(self, states: Tensor) -> Tensor:
        """GTA (E5): states after `blocks` [batch, blocks, width] -> [batch, compared groups, width].

        The S states of a group are summed with the weights exp(-(j - S)^2 / 2) / sqrt(2 pi), j = 1 .. S.
        """
        grouped = states.unflatten(1, (len(self.numbers), -1))
        size = grouped.shape[2]
        distances = torch.arange(1 - size, 1, device=states.device, dtype=states.dtype)
        weights = (-(distances**2) / 2).exp() / math.sqrt(2 * math.pi)
        return torch.einsum("bgjw,j->bgw", grouped, weights)

    def modules(self, backbone: Backbone) -> dict[str, nn.Module]:
        """Heads of both towers, trained with the model and left behind."""
        count, text = len(self.numbers), backbone.text.tower.text_projection
        text = text.weight.T if isinstance(text, nn.Linear) else text
        return {
            "image_heads": GroupHeads(backbone.model.visual.proj, count),
            "text_heads": GroupHeads(text, count),
        }

    def losses(self, features: Mapping[str, Tensor], scale: Tensor, bias: Tensor | None = None) -> Losses:
        image, text = (F.normalize(features[f"{tower}_groups"], dim=-1) for tower in ("image", "text"))
        losses, report = {}, {}
        for at, group in enumerate(self.numbers):
            loss = contrastive_loss(image[:, at], text[:, at], scale)
            losses[f"group_{group}_loss"] = _HALF * self.weight(group) * loss
            report[f"group_{group}"] = loss.detach()
        return losses, report

    def describe(self) -> str:
        return f"groups {self.first} to {self.groups} of {self.groups} compared"


@dataclass(frozen=True)
class FixClip(FixClipSettings, DualCaption):
    """A long caption against the image, a short one against a masked view of it, and middle layers (Fix-CLIP).

        L = 1/2 (sum over g = K .. G of omega_g L_g + L_short + L_long)          (E8)

    With every part off it is `DualCaption`, bit for bit.
    """

    # Of the base model; `prepare` sets them.
    patches: int = field(default=0, repr=False, metadata={"is_setting": False})
    short_length: int = field(default=0, repr=False, metadata={"is_setting": False})

    def __post_init__(self):
        super().__post_init__()
        if (self.first_group or 0) > self.groups:
            raise UserError(f"first_group is {self.first_group}, but must be from 1 to groups, which is {self.groups}.")
        if (self.mask_ratio or self.hierarchy or self.has_own_positions) and not (self.has_long and self.has_short):
            raise UserError(
                f"short_weight is {self.short_weight:g}, but masked images, groups and short positions need both "
                "captions. Give one between 0 and 1."
            )
        if self.has_own_positions and self.padding != "none":
            raise UserError(
                f"padding is {self.padding}, but pads in front of captions that have positions of their own are not "
                "supported. Give padding none, or short_positions shared."
            )

    @property
    def regional_prompts(self) -> PromptSettings | None:
        return PromptSettings(self.prompts, self.prompt_mask, self.prompt_layers) if self.prompts else None

    @property
    def hierarchy(self) -> GroupLosses | None:
        if not self.groups:
            return None
        return GroupLosses(self.groups, self.first_group or max(1, self.groups - _GROUPS + 1))

    @property
    def has_own_positions(self) -> bool:
        return self.short_positions == "own"

    @property
    def _is_plain(self) -> bool:
        """Whether every part is off."""
        return not (self.mask_ratio or self.prompts or self.groups or self.has_own_positions)

    def check_base(self, base_model: Backbone, keep_positions: int, freeze_image_tower: bool) -> None:
        super().check_base(base_model, keep_positions, freeze_image_tower)
        existing = base_model.prompt_settings
        if existing is not None and existing != self.regional_prompts:
            raise UserError(
                f"The base model's image tower has regional prompts ({_spelled(existing)}), other than asked for "
                f"({_spelled(self.regional_prompts)}). Give those, or another base model."
            )
        if self._is_plain:
            return
        _check_towers(base_model)
        tower = base_model.image
        if self.hierarchy:
            divisor = math.gcd(tower.depth, _depth(base_model))
            if divisor % self.groups:
                possible = ", ".join(str(count) for count in range(1, divisor + 1) if divisor % count == 0)
                raise UserError(
                    f"groups is {self.groups}, which does not divide the {tower.depth} blocks of the image tower and "
                    f"the {_depth(base_model)} of the text tower. Give groups one of {possible}, or 0 for none."
                )
        if self.mask_ratio:
            mask_size(self.mask_ratio, tower.patches)
        if self.prompts > tower.patches:
            raise UserError(
                f"prompts is {self.prompts}, but an image has {tower.patches} patches. Give at most as many."
            )
        if freeze_image_tower and (self.mask_ratio or self.hierarchy or (self.prompts and not existing)):
            raise UserError(
                "freeze_image_tower keeps one feature of each image, but masked images, new prompts and groups need "
                "the image tower in every step. Leave it out, or give 0 for mask_ratio, prompts and groups."
            )
        if self.has_own_positions:
            _check_positions(base_model, keep_positions)

    def prepare(self, backbone: Backbone) -> "FixClip":
        """Adds the prompts to the image tower, and keeps the base model's own rows of positions for short captions."""
        super().prepare(backbone)
        if self.regional_prompts and backbone.prompt_settings is None:
            backbone.add_prompts(self.regional_prompts)
        if self.has_own_positions and backbone.short_positions is None:
            tower = backbone.text.tower
            set_short_positions(tower, tower.positional_embedding[backbone.unstretched_rows])
        if self._is_plain:
            return self
        table = backbone.short_positions
        return replace(self, patches=backbone.image.patches, short_length=0 if table is None else len(table))

    def modules(self, backbone: Backbone) -> dict[str, nn.Module]:
        """Also "mask" with the mask vector [width], trained with the model and left behind."""
        modules = {}
        if self.mask_ratio and self.masked_patches == "replace":
            modules["mask"] = nn.ParameterDict({"vector": torch.zeros_like(backbone.model.visual.class_embedding)})
        return modules | super().modules(backbone)

    @property
    def rates(self) -> dict[str, float]:
        return dict.fromkeys(("method/", "visual.regional_prompts."), self.new_rate)

    @cached_property
    def terms(self) -> list[Term]:
        return [*super().terms, *([self.hierarchy] if self.hierarchy else [])]

    def captions(self, caption: str, tokenizer: CaptionTokenizer, *draw: Any, **short: Any) -> list[Caption]:
        """The long caption, then the short one, which "own" positions cut at the base model's context length."""
        captions = super().captions(caption, tokenizer, *draw, **short)
        if self.has_own_positions:
            end = self.short_length - tokenizer.n_special if self.short_length else None  # None before `prepare`
            captions[-1] = Caption(captions[-1].ids[:end], 0, is_short=True)
        return captions

    def views(self, image: Tensor, *sample: Any) -> dict[str, Tensor]:
        """Also {"is_masked": [patches] bool}, where there is a masked view."""
        views = super().views(image, *sample)
        if self.mask_ratio:
            views["is_masked"] = draw_mask(self.mask_ratio, self.patches, *sample[2:])
        return views

    def encode(self, backbone: Backbone, batch: Batch, modules: Any = None) -> dict[str, Tensor]:
        """{"image", "long_text", "short_text"}, no text without weight; "short_image", the masked one, if there is one,
        each [batch, embed_dim]; "image_groups", "text_groups" [batch, compared groups, embed_dim]; at least float32."""
        if not (self.mask_ratio or self.prompts or self.groups):
            return super().encode(backbone, batch, modules)
        hierarchy, states = self.hierarchy, torch.empty(0)
        if batch.cached_features:
            features = {"image": batch.images}
        else:
            vector = modules["mask"]["vector"] if self.mask_ratio and self.masked_patches == "replace" else None
            masked = MaskedPatches(batch.views["is_masked"], vector) if self.mask_ratio else None
            blocks = hierarchy.blocks(backbone.image.depth) if hierarchy else ()
            encoded = backbone.image.encode_with_masked(backbone.as_floats(batch.images), blocks, masked)
            image, masked_image, states = encoded
            features = {"image": image} | ({} if masked_image is None else {"short_image": masked_image})
        texts, text_states = backbone.text.encode(batch.tokens, hierarchy.blocks(_depth(backbone)) if hierarchy else ())
        features |= dict(zip(self.text_names, texts.split(len(batch)), strict=True))
        if hierarchy:
            for tower, cls_or_eot in (("image", states), ("text", text_states[: len(batch)])):
                aggregated = hierarchy.aggregate(at_least_float(cls_or_eot))
                features[f"{tower}_groups"] = modules[f"{tower}_heads"](aggregated)
        return {name: at_least_float(feature) for name, feature in features.items()}

    def describe(self) -> str:
        parts = [super().describe()]
        if self.has_own_positions:
            parts.append("short captions read with the base model's positions")
        if self.mask_ratio:
            patches = "replaced" if self.masked_patches == "replace" else "left out"
            parts.append(f"short captions compared with images of which {self.mask_ratio:.0%} is {patches}")
        if self.regional_prompts:
            parts.append(f"regional prompts ({_spelled(self.regional_prompts)})")
        return "; ".join(parts)


def _depth(backbone: Backbone) -> int:
    """The number of blocks of the text tower."""
    return len(backbone.text.tower.transformer.resblocks)


def _spelled(settings: PromptSettings | None) -> str:
    """Prompts as the options that ask for them."""
    if settings is None:
        return "prompts 0"
    return f"prompts {settings.count}, prompt_mask {settings.mask}, prompt_layers {settings.layers}"


def _check_towers(base_model: Backbone) -> None:
    """Raises UserError unless the towers are a CLIP's with a plain vision transformer that pools at CLS."""
    if not base_model.family.causal or base_model.loss != "softmax":
        raise UserError(
            f"The base model is a {base_model.family.name}; Fix-CLIP's parts are those of a CLIP with CLS and EOT, and "
            "its InfoNCE. Give one, for example ViT-B-16, or another recipe."
        )
    visual = ImageTower(base_model.model.visual).visual
    pools_cls = visual.attn_pool is None and visual.pool_type == "tok" and visual.proj is not None
    if not (pools_cls and isinstance(visual.patch_dropout, nn.Identity)):
        raise UserError(
            "The base model's image tower has another pooling than a projected CLS, or patch dropout, which Fix-CLIP's "
            "parts do not work with. Give a CLIP with a plain vision transformer, for example ViT-B-16, or another "
            "recipe."
        )


def _check_positions(base_model: Backbone, keep_positions: int) -> None:
    """Raises UserError unless the base model's own rows of positions are at hand, and row 1 stays as it is."""
    is_stretched = "keep" in base_model.config.get("debias_diffusion", {})
    if is_stretched and base_model.short_positions is None:
        raise UserError(
            "short_positions is own, but the base model's positions are already stretched and trained: its rows for "
            "short captions are gone. Give the model that it was trained from, or short_positions shared."
        )
    kept = base_model.kept_positions if is_stretched else keep_positions
    if kept < 1:
        raise UserError(
            "short_positions is own, and both tables begin with the same SOT, but keep_positions is 0. Give at least "
            "1, or short_positions shared."
        )


RECIPES = {
    "long-clip": FixClip(sampling="summary", padding="none", short_weight=0.5),
    "fix-clip": FixClip(
        sampling="summary",
        padding="none",
        short_weight=0.5,
        components=0,
        mask_ratio=0.75,
        short_positions="own",
        prompts=4,
        groups=6,
    ),
}
