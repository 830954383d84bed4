"""One interface over CLIP-family two-towers from open_clip: load, encode images, encode text, save.

The towers are open_clip's own modules; only the text tower's forward is ours, because it need not compute what a causal
mask hides (see `TextTower`).
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip.transformer import ResidualAttentionBlock
from safetensors.torch import save_file
from torch import nn

from .errors import UserError, near_matches
from .positions import FACTOR, KEEP, stretch_positions
from .tokens import CaptionTokenizer, TokenBatch, clip_tokenizer, load_tokenizer
from .toyworld.shipped import shipped

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
TOKENIZER_FOLDER = "tokenizer"

# Captions of like length attend together, in at most so many groups without and so many with pads in front: more
# would waste calls, fewer would waste padding.
_GROUPS = 8

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def block_forward(block: ResidualAttentionBlock, hidden_states: torch.Tensor, attend: Attention) -> torch.Tensor:
    """One transformer block with its attention given as a function.

    Args:
        block: open_clip's block, whose weights are used where they are.
        hidden_states: [..., width], any leading shape.
        attend: (query, key, value), each [..., heads, width / heads], to the attended values of the same shape.
    """
    attention = block.attn
    qkv = F.linear(block.ln_1(hidden_states), attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = (part.unflatten(-1, (attention.num_heads, -1)) for part in qkv.chunk(3, dim=-1))
    attended = attention.out_proj(attend(query, key, value).flatten(-2))
    hidden_states = hidden_states + block.ls_1(attended)
    return hidden_states + block.ls_2(block.mlp(block.ln_2(hidden_states)))


@dataclass(frozen=True)
class _Group:
    """Captions that attend together, padded to the longest of them.

    Attributes:
        rows: [tokens] where the group's tokens lie among all captions' tokens.
        slots: [tokens] where they lie in the padded group, flattened.
        size, text: captions, and tokens of the longest: the padded group's shape.
        prefix: how much of the shared prefix the caption that sees most of it sees.
        mask: [size, 1, text, prefix + text], True where a token may look; None where a causal mask says it all.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    size: int
    text: int
    prefix: int
    mask: torch.Tensor | None

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[all tokens, heads, head_dim] -> [size, heads, text, head_dim]"""
        # Every slot is written once, so that forward and backward are plain, deterministic copies.
        empty = packed.new_zeros(self.size * self.text, *packed.shape[1:])
        padded = empty.index_copy(0, self.slots, packed.index_select(0, self.rows))
        return padded.unflatten(0, (self.size, self.text)).transpose(1, 2)

    def behind(self, shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The padded group's own states behind the part of the shared ones [prefix, heads, head_dim] it sees."""
        shared = shared[: self.prefix].transpose(0, 1).expand(self.size, -1, -1, -1)
        return torch.cat([shared, own], dim=2)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[size, heads, text, head_dim] -> [tokens, heads, head_dim], in the order of `rows`"""
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)


class _Layout:
    """Where each caption's tokens lie in a packed batch: the prefix first, then the captions one after the other."""

    def __init__(self, tokens: TokenBatch, device: torch.device):
        self.n_prefix = len(tokens.prefix_ids)
        lengths, n_prefix = tokens.lengths, tokens.n_prefix
        starts = lengths.cumsum(0) - lengths
        within = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        # A caption's own tokens follow the part of the prefix it sees.
        own = within + n_prefix.repeat_interleave(lengths)
        self.positions = torch.cat([torch.arange(self.n_prefix), own]).to(device)
        self.last = (self.n_prefix + starts + lengths - 1).to(device)
        self.groups = []
        for has_pads in (False, True):
            members = ((n_prefix > 1) == has_pads).nonzero().flatten()
            members = members[lengths[members].argsort(stable=True)]
            for group in members.tensor_split(min(_GROUPS, len(members)) or 1):
                if len(group):
                    self.groups.append(self._group(group, starts, lengths, n_prefix, device))

    @staticmethod
    def _group(members, starts, lengths, n_prefix, device) -> _Group:
        size, text, prefix = len(members), int(lengths[members].max()), int(n_prefix[members].max())
        inside = torch.arange(text) < lengths[members, None]
        rows = (starts[members, None] + torch.arange(text))[inside]
        slots = torch.arange(size * text).view(size, text)[inside]
        mask = None
        if prefix > 1:
            seen = (torch.arange(prefix) < n_prefix[members, None])[:, None, None].expand(size, 1, text, prefix)
            causal = torch.ones(text, text, dtype=torch.bool).tril().expand(size, 1, text, text)
            mask = torch.cat([seen, causal], dim=-1).to(device)
        return _Group(rows.to(device), slots.to(device), size, text, prefix, mask)


class TextTower:
    """A causal CLIP text tower that computes a caption up to its EOT and the shared beginning once.

    Under a causal mask nothing after EOT changes the pooled state, so it is not computed. And `[SOT, PAD, PAD, ...]`
    begins every row, so its states are computed once for the longest prefix, and each caption attends to as much of
    them as it has pads. Values and gradients are those of the padded rows (up to rounding).

    Args:
        tower: the module that holds the text tower's parts: an `open_clip.CLIP`, or a `CustomTextCLIP`'s `text`.
    """

    def __init__(self, tower: nn.Module):
        self.tower = tower

    @property
    def context_length(self) -> int:
        return self.tower.positional_embedding.shape[0]

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        """[batch, embed_dim] features of each caption's EOT, projected, not normalised."""
        tower = self.tower
        ids = torch.cat([tokens.prefix_ids, tokens.ids])
        layout = _Layout(tokens, ids.device)
        # [longest prefix + sum of lengths, width]
        hidden_states = tower.token_embedding(ids) + tower.positional_embedding[layout.positions]
        for block in tower.transformer.resblocks:
            hidden_states = block_forward(block, hidden_states, lambda q, k, v: _attend(layout, q, k, v))
        return self.project(tower.ln_final(hidden_states[layout.last]))

    def project(self, pooled: torch.Tensor) -> torch.Tensor:
        """[batch, width] -> [batch, embed_dim]"""
        projection = self.tower.text_projection
        if projection is None:
            return pooled
        return projection(pooled) if isinstance(projection, nn.Linear) else pooled @ projection


def _attend(layout: _Layout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of packed rows [rows, heads, head_dim]: the prefix to itself, captions to it and themselves."""
    n = layout.n_prefix
    prefix = [x[:n] for x in (query, key, value)]
    own = [x[n:] for x in (query, key, value)]
    prefix_out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in prefix), is_causal=True)
    out = torch.zeros_like(own[0])
    for group in layout.groups:
        group_query, *group_key_value = (group.pad(x) for x in own)
        keys_values = [group.behind(*pair) for pair in zip(prefix[1:], group_key_value, strict=True)]
        if group.mask is None:
            # All see SOT and nothing else before their text. With SOT as a query too, a causal mask says it all, for
            # which there are faster kernels; its output is not needed.
            queries = group.behind(prefix[0], group_query)
            attended = F.scaled_dot_product_attention(queries, *keys_values, is_causal=True)[:, :, group.prefix :]
        else:
            attended = F.scaled_dot_product_attention(group_query, *keys_values, attn_mask=group.mask)
        out = out.index_copy(0, group.rows, group.unpad(attended).to(out.dtype))
    return torch.cat([prefix_out[0].transpose(0, 1), out])


class Backbone(nn.Module):
    """A two-tower CLIP: images and captions to features in one space.

    Made by `load_backbone`. Features are not normalised; `logit_scale` is the log of the scale, as in CLIP.

    Attributes:
        model: open_clip's own module; its state dict is what is saved.
        text: the text tower, sharing `model`'s weights.
        tokenizer: CaptionTokenizer for the model's window.
        preprocess: open_clip's validation transform, PIL image -> [3, height, width].
        config: what `open_clip_config.json` holds.
        random_weights: whether nothing was loaded into it.
    """

    def __init__(self, model: nn.Module, tokenizer: CaptionTokenizer, config: dict, random_weights: bool = False):
        super().__init__()
        self.model = model
        self.random_weights = random_weights
        self.text = TextTower(getattr(model, "text", model))
        self.tokenizer = tokenizer
        self.config = config
        preprocess_cfg = open_clip.get_model_preprocess_cfg(model)
        self.preprocess = image_transform_v2(PreprocessCfg(**preprocess_cfg), is_train=False)

    @property
    def context_length(self) -> int:
        return self.text.context_length

    @property
    def kept_positions(self) -> int:
        """How many first rows of the position table stay as they are in training."""
        return self.config.get("debias_diffusion", {}).get("keep", 0)

    @property
    def logit_scale(self) -> nn.Parameter:
        return self.model.logit_scale

    def tokenize(self, captions: list[str]) -> TokenBatch:
        return self.tokenizer(captions)

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, 3, height, width] preprocessed images -> [batch, embed_dim]"""
        return self.model.encode_image(images)

    def encode_text(self, tokens: TokenBatch) -> torch.Tensor:
        """Tokens -> [batch, embed_dim]"""
        return self.text(tokens)

    def stretch(self, keep: int = KEEP, factor: int = FACTOR) -> None:
        """Stretches the text tower's positions in place (see `stretch_positions`)."""
        tower = self.text.tower
        table = stretch_positions(tower.positional_embedding.detach(), keep, factor)
        tower.positional_embedding = nn.Parameter(table)
        tower.context_length = len(table)
        if hasattr(tower, "num_pos"):
            tower.num_pos = len(table)
        tower.register_buffer(
            "attn_mask", torch.full((len(table),) * 2, -torch.inf).triu_(1).to(table), persistent=False
        )
        self.tokenizer = self.tokenizer.with_context_length(len(table))
        self.config["model_cfg"]["text_cfg"]["context_length"] = len(table)
        self.config["debias_diffusion"] = {"keep": keep, "factor": factor}

    def save(self, folder: str | os.PathLike) -> None:
        """Writes an open_clip folder that `open_clip.create_model("local-dir:" + folder)` loads, and the tokenizer."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state_dict().items()}
        save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=2) + "\n")
        self.tokenizer.tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)


def load_backbone(model: str, pretrained: str | None = None) -> Backbone:
    """Loads a CLIP two-tower.

    Args:
        model: an open_clip name ("ViT-B-16"; "ViT-B-16-quickgelu" for OpenAI's weights), an open_clip folder such as
            training leaves, "hf-hub:owner/name", or "toy/clip".
        pretrained: for a name: an open_clip tag ("openai", "laion2b_s34b_b88k") or a file of weights. None gives random
            weights from torch's current seed.

    Raises:
        UserError: the model or the weights are unknown, or the text tower is not a causal, EOT-pooled CLIP one.
    """
    model = shipped(model)
    config, source = _find_config(model)
    _check_text_config(model, config["model_cfg"])
    if source is None:
        _check_pretrained(model, pretrained)
    elif pretrained is not None:
        raise UserError(f"{model!r} brings its own weights; leave out pretrained={pretrained!r}, or give a model name.")
    with _quiet_logging():
        try:
            clip = open_clip.create_model(source or model, pretrained=pretrained, weights_only=True)
        except Exception as error:  # whatever a wrong or hostile file makes the libraries raise
            reason = str(error).splitlines()[0][:300]
            raise UserError(
                f"The weights of {model!r} (pretrained={pretrained!r}) could not be loaded: {reason}"
            ) from error
    config.setdefault("preprocess_cfg", open_clip.get_model_preprocess_cfg(clip))
    _check_blocks(model, getattr(clip, "text", clip))
    context_length = config["model_cfg"]["text_cfg"].get("context_length", open_clip.tokenizer.DEFAULT_CONTEXT_LENGTH)
    tokenizer = CaptionTokenizer(_tokenizer(source, context_length), context_length)
    return Backbone(clip, tokenizer, config, random_weights=source is None and pretrained is None)


def _find_config(model: str) -> tuple[dict, str | None]:
    """(contents of open_clip_config.json, open_clip's name of the folder or hub repository; None for a plain name)."""
    if model.startswith("hf-hub:"):
        return {"model_cfg": deepcopy(open_clip.factory._get_hf_config(model[7:])["model_cfg"])}, model
    folder = Path(model.removeprefix("local-dir:"))
    if (folder / CONFIG_FILE).is_file():
        return json.loads((folder / CONFIG_FILE).read_text()), f"local-dir:{folder}"
    if folder.is_dir() or model.startswith("local-dir:"):
        raise UserError(f"The folder {os.fspath(folder)!r} holds no {CONFIG_FILE}; give an open_clip folder.")
    model_cfg = open_clip.get_model_config(model)
    if model_cfg is None:
        raise UserError(
            f"Unknown model {model!r}.{near_matches(model, open_clip.list_models())} Give an open_clip model name "
            "(`python -c 'import open_clip; print(open_clip.list_models())'` lists them) or an open_clip folder."
        )
    return {"model_cfg": deepcopy(model_cfg)}, None


def _check_text_config(model: str, model_cfg: dict) -> None:
    text_cfg = model_cfg["text_cfg"]
    unfit = [key for key in ("hf_model_name", "no_causal_mask", "embed_cls") if text_cfg.get(key)]
    if text_cfg.get("pool_type", "argmax") != "argmax":
        unfit.append(f"pool_type={text_cfg['pool_type']}")
    if "multimodal_cfg" in model_cfg:
        unfit.append("multimodal_cfg")
    if unfit:
        raise UserError(
            f"The text tower of {model!r} cannot be used ({', '.join(unfit)}): it must have a causal mask and pool at "
            "EOT, as OpenAI's and LAION's CLIP models do, for example ViT-B-16 or ViT-L-14."
        )


def _check_blocks(model: str, tower: nn.Module) -> None:
    if not all(type(block) is ResidualAttentionBlock for block in tower.transformer.resblocks):
        raise UserError(f"The text tower of {model!r} has blocks of its own kind; only plain CLIP blocks can be used.")


def _check_pretrained(model: str, pretrained: str | None) -> None:
    """Weights must exist, and fit the model's activation: a state dict cannot tell QuickGELU from GELU."""
    if pretrained is None or os.path.isfile(pretrained):
        return
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained not in tags:
        raise UserError(
            f"No weights {pretrained!r} for {model!r}.{near_matches(pretrained, tags)} "
            f"Give a file or one of: {', '.join(tags) or '(no tags for this model)'}."
        )
    quick = open_clip.get_pretrained_cfg(model, pretrained).get("quick_gelu", False)
    if quick != bool(open_clip.get_model_config(model).get("quick_gelu")):
        other = f"{model}-quickgelu" if quick else model.removesuffix("-quickgelu")
        raise UserError(
            f"The weights {pretrained!r} were trained {'with' if quick else 'without'} QuickGELU, which {model!r} "
            f"{'lacks' if quick else 'has'}. Use --model {other}."
        )


def _tokenizer(source: str | None, context_length: int):
    """The tokenizer saved beside the weights, or CLIP's own."""
    folder = Path((source or "").removeprefix("local-dir:")) / TOKENIZER_FOLDER
    if source and folder.is_dir():
        return load_tokenizer(folder)
    return clip_tokenizer(context_length)


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """open_clip warns that random weights are random; whoever asked for them knows."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous)
