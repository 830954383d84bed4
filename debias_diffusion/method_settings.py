"""The settings of the package's methods, which `train` has as options. Imports nothing large, so that help is fast."""

from dataclasses import dataclass
from typing import Literal

from .limits import BelowOne, Checked, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share


@dataclass(frozen=True)
class DualCaptionSettings(Checked):
    """Of training on a long and a short caption.

    Attributes:
        sampling: Sentences of the short caption. Without the summary: random (a random subset), ordered (from the
            second to a random end), independent (each with probability 1/2), shuffle (all, in random order), keep-4 or
            keep-N (that many), details (all, in order). With it: summary (nothing else), summary-as-released (the text
            up to the first ". ", as in Long-CLIP's code), opening (up to a random end). given: the short_caption of
            each entry of the data.
        padding: Pads before the short caption: random, none, pad-20, pad-40 or pad-N, pre-sot (before SOT too).
        short_weight: w of the loss w * short + (1 - w) * long, from 0 to 1; at 0 or 1 only one of them is computed.
        components: Principal components of the image features that short captions are compared with, fewer than the
            batch less one; 0 compares them with the features themselves. null is the recipe's, or of a small batch half
            of what fits.
        label_smoothing: From 0 to below 1; not for SigLIP's loss.
        pooling: Where the text feature is read: eot, or average over all tokens that are not pads.
        component_parts: Equal parts of the batch that each have components of their own, as each process has in
            Long-CLIP's code; 1 takes those of the whole batch.
        decay: The parameters that weight decay acts on: matrices, or all of them, as in Long-CLIP's code.
        keep_states: Weight of the term that keeps the hidden states which SDXL's UNet reads near the base model's, read
            in chunks; 0 leaves it out.
    """

    sampling: str
    padding: str
    short_weight: Share
    components: NonNegativeInt = 32
    label_smoothing: BelowOne = 0.1
    pooling: Literal["eot", "average"] = "eot"
    component_parts: PositiveInt = 1
    decay: Literal["matrices", "all"] = "matrices"
    keep_states: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class FixClipSettings(DualCaptionSettings):
    """Of the parts of Fix-CLIP.

    Attributes:
        mask_ratio: Share of patches that are masked in the image that a short caption is compared with, below 1; 0
            masks none.
        masked_patches: replace masked patches with one learned vector, zeros at first, put in before positions are
            added; or discard them, which is faster and worse (Table 5, "Dis."). CLS is never masked.
        short_positions: own, the base model's rows of positions for short captions, which are cut at its context length
            and not stretched; or shared, one table for all captions.
        prompts: Regional prompts in each block of the image tower, each with a band of the image; 0 for none.
        prompt_mask: Who attends to whom. bands: prompts to their bands, patches to no prompts; none: all to all.
        prompt_layers: own prompts for each block, or the same shared by all.
        groups: Groups of blocks whose features are compared too, dividing the blocks of both towers; 0 for none.
        first_group: The first group that is compared, from 1; null compares the last three.
        new_rate: Multiplies the learning rate of mask vector, prompts and the groups' heads, which start untrained.
    """

    mask_ratio: BelowOne = 0.0
    masked_patches: Literal["replace", "discard"] = "replace"
    short_positions: Literal["own", "shared"] = "shared"
    prompts: NonNegativeInt = 0
    prompt_mask: Literal["bands", "none"] = "bands"
    prompt_layers: Literal["own", "shared"] = "own"
    groups: NonNegativeInt = 0
    first_group: PositiveInt | None = None
    new_rate: PositiveFloat = 1.0
