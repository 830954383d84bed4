"""Regional prompts of an image tower (Fix-CLIP, section 3.3): learned tokens between CLS and patches, one for a band.

    X = [CLS, R_1 .. R_M, P_1 .. P_N] in every block; after block l, R of block l + 1 takes the prompts' places (E2)

As replaced, what the prompts attend to is read by nothing: they are keys and values alone, the same for every image.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial

import torch
from open_clip.transformer import ResidualAttentionBlock
from torch import nn

from ..errors import UserError
from .blocks import Attention, before_attention, full_attention

MASKS = ("bands", "none", "r2p", "p2r", "product")
UPDATES = ("replace", "carry")
LAYERS = ("own", "shared")
_DEVIATION = 0.02  # of the prompts at the start


@dataclass(frozen=True)
class PromptSettings:
    """How an image tower uses its prompts: what its weights do not say.

    Attributes:
        count: M, the number of prompts in a block, from 1.
        mask: who attends to whom. In every one CLS attends to all.
            "bands": patches attend to CLS and patches; prompt j to itself and band j (E3 with j - 1, Fig. 4).
            "none": everything attends to everything.
            "r2p": as bands, but prompts attend to all patches (Table 13).
            "p2r": as bands, but patches also attend to prompts (Table 13).
            "product": as bands, but the logits are multiplied with the mask, as E4 is printed: a masked pair keeps the
            weight e^0.
        update: after a block, "replace" puts the next block's prompts in the place of these (E2); "carry", which is not
            the paper's, adds them, so that what a prompt has read of its band reaches CLS in later blocks.
        layers: "own" prompts for each block, or the same "shared" by all (Table 13).

    Raises:
        UserError: a value is none of these.
    """

    count: int
    mask: str = "bands"
    update: str = "replace"
    layers: str = "own"

    def __post_init__(self):
        if type(self.count) is not int or self.count < 1:
            raise UserError(f"prompts must be a whole number from 1, or 0 for none, got {self.count!r}.")
        for name, known in (("mask", MASKS), ("update", UPDATES), ("layers", LAYERS)):
            if getattr(self, name) not in known:
                raise UserError(f"prompt_{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")

    @classmethod
    def of_config(cls, config: Mapping) -> "PromptSettings":
        """The settings that `description` wrote. Raises UserError for other ones."""
        known = {field.name for field in fields(cls)}
        if not isinstance(config, Mapping) or set(config) != known:
            raise UserError(f"regional_prompts must be an object with {', '.join(sorted(known))}, got {config!r}.")
        return cls(**config)

    def description(self) -> dict:
        """JSON values that identify the settings, for `Backbone.config`."""
        return asdict(self)


def bands(count: int, patches: int) -> torch.Tensor:
    """[count, patches] True where a patch is of a prompt's band: floor(patches / count) patches each, in raster order.

    E3 with (j - 1) in the place of j, which would skip the first band and overrun the last. The last patches, `patches`
    mod `count`, are of no band.
    """
    length = patches // count
    first = torch.arange(count)[:, None] * length
    places = torch.arange(patches)
    return (first <= places) & (places < first + length)


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
        self.settings, self.depth = settings, depth
        sets = 1 if settings.layers == "shared" else depth
        self.prompts = nn.Parameter(_DEVIATION * torch.randn(sets, settings.count, width))

    @property
    def are_carried(self) -> bool:
        return self.settings.update == "carry"

    def of_block(self, block: int) -> torch.Tensor:
        """[count, width] before block number `block`, from 0."""
        return self.prompts[block % len(self.prompts)]

    def insert(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[batch, 1 + patches, width] before the first block -> the same, with the prompts after CLS if carried."""
        if not self.are_carried:
            return hidden_states
        first = self.of_block(0).to(hidden_states.dtype).expand(len(hidden_states), -1, -1)
        return torch.cat([hidden_states[:, :1], first, hidden_states[:, 1:]], dim=1)

    def update(self, block: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """The states after a block -> those before the next one (E2)."""
        if not self.are_carried or block == self.depth - 1:
            return hidden_states
        cls, carried, patches = self._split(hidden_states)
        return torch.cat([cls, carried + self.of_block(block + 1), patches], dim=1)

    def remove(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The states after the last block without those of the prompts."""
        if not self.are_carried:
            return hidden_states
        cls, _, patches = self._split(hidden_states)
        return torch.cat([cls, patches], dim=1)

    def attention(
        self, module: ResidualAttentionBlock, block: int, patches: int, kept: torch.Tensor | None = None
    ) -> Attention:
        """The attention of a block with the prompts. It may be given the query of CLS alone.

        Args:
            module: the block, whose weights make keys and values of prompts that are not carried.
            block: its number, from 0.
            patches: N of a whole image.
            kept: [batch, visible] the patches that are there, in order, where others were left out; None: all.
        """
        if not self.are_carried:
            return partial(self._attend_replaced, module, block)
        return partial(self._attend_carried, patches, kept)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows.tensor_split([1, 1 + self.settings.count], dim=1)

    def _attend_replaced(self, module, block: int, query, key, value) -> torch.Tensor:
        """Of CLS and patches, [batch, 1 + patches, heads, head_dim] each."""
        _, *of_prompts = before_attention(module, self.of_block(block))
        prompt_key, prompt_value = (part.to(key.dtype).expand(len(key), *part.shape) for part in of_prompts)
        return self._attend_cls_and_patches(query, (key, value), (prompt_key, prompt_value))

    def _attend_carried(self, patches: int, kept: torch.Tensor | None, query, key, value) -> torch.Tensor:
        """Of CLS, prompts and patches, [batch, 1 + count + visible, heads, head_dim] each."""
        (key_cls, key_prompts, key_patches), (value_cls, value_prompts, value_patches) = map(self._split, (key, value))
        plain = torch.cat([key_cls, key_patches], dim=1), torch.cat([value_cls, value_patches], dim=1)
        if query.shape[1] == 1:
            return self._attend_cls_and_patches(query, plain, (key_prompts, value_prompts))
        query_cls, query_prompts, query_patches = self._split(query)
        rest = torch.cat([query_cls, query_patches], dim=1)
        attended = self._attend_cls_and_patches(rest, plain, (key_prompts, value_prompts))
        of_prompts = self._attend_prompts(query_prompts, key, value, self._seen(patches, kept, query.device))
        return torch.cat([attended[:, :1], of_prompts, attended[:, 1:]], dim=1)

    def _attend_cls_and_patches(self, query, plain, of_prompts) -> torch.Tensor:
        """CLS attends to all; patches to CLS and patches, and to the prompts as the mask has it."""
        everything = [torch.cat(parts, dim=1) for parts in zip(plain, of_prompts, strict=True)]
        mask = self.settings.mask
        if mask in ("none", "p2r"):
            return full_attention(query, *everything)
        cls = full_attention(query[:, :1], *everything)
        if query.shape[1] == 1:
            return cls
        if mask == "product":  # a logit of 0 is that of a key of zeros
            everything[0] = torch.cat([plain[0], torch.zeros_like(of_prompts[0])], dim=1)
        seen = everything if mask == "product" else plain
        return torch.cat([cls, full_attention(query[:, 1:], *seen)], dim=1)

    def _attend_prompts(self, query, key, value, seen: torch.Tensor) -> torch.Tensor:
        """[batch, count, heads, head_dim] of the prompts, which attend where `seen` is True."""
        if self.settings.mask != "product":
            return full_attention(query, key, value, attn_mask=seen)
        logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        return torch.einsum("bhqk,bkhd->bqhd", (logits * seen).softmax(dim=-1), value)

    def _seen(self, patches: int, kept: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """[1 or batch, 1, count, 1 + count + visible] True for what each prompt attends to."""
        count, mask = self.settings.count, self.settings.mask
        of_patches = bands(count, patches).to(device)
        if mask in ("none", "r2p"):
            of_patches = torch.ones_like(of_patches)
        # [1 or batch, count, visible]
        of_patches = of_patches[None] if kept is None else of_patches[:, kept].transpose(0, 1)
        itself = torch.eye(count, dtype=torch.bool, device=device)
        before = torch.cat([torch.zeros_like(itself[:, :1]), itself], dim=1)
        if mask == "none":
            before = torch.ones_like(before)
        return torch.cat([before.expand(len(of_patches), -1, -1), of_patches], dim=2)[:, None]
