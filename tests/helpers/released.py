"""Checkpoints in the layouts of released Long-CLIP and DeBias-CLIP weights."""

import json
from copy import deepcopy

import open_clip
import torch
from helpers.modules import ROOT
from helpers.tiny_clip import CONFIG, everyday, tiny_clip

from debias_diffusion.text.tokens import clip_tokenizer

# OpenAI's number of blocks, and one head for each 64 of the width.
DEEP = CONFIG | {
    "vision_cfg": CONFIG["vision_cfg"] | {"layers": 12},
    "text_cfg": CONFIG["text_cfg"] | {"layers": 12, "width": 64, "heads": 1},
}
# What is known of the file of DeBias-CLIP's authors.
INVENTORY = json.loads((ROOT / "tests" / "data" / "debias_vitb_3e.json").read_text())
INVENTORY["tensors"] = {  # a name with * is that of every block
    name.replace("*", str(block)): shape
    for name, shape in INVENTORY["tensors"].items()
    for block in range(INVENTORY["blocks"] if "*" in name else 1)
}
TEXT = ("positional_embedding", "token_embedding.", "transformer.", "ln_final.", "text_projection")
CAPTIONS = ["a red cat. " * 40, "a dog"]


def two_tables(table):
    """Long-CLIP's two tables of positions, of which other rows count."""
    noise, kept = torch.randn(table.shape), (torch.arange(len(table)) < 20)[:, None]
    return {"positional_embedding": table.where(kept, noise), "positional_embedding_res": table.where(~kept, noise)}


def checkpoint(state):
    """A training's checkpoint with the top-level keys of INVENTORY."""
    adamw = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": INVENTORY["optimizer_groups"]}
    rest = {"optimizer": adamw, "scaler": {"scale": 65536.0, "_growth_tracker": 7}}
    named = {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}
    content = {name: INVENTORY[name] for name in ("epoch", "name")} | named | rest
    assert list(content) == INVENTORY["top_level_keys"]
    return content


def released(folder, prefix, first_table=False):
    """(a file with the text tower's names under `prefix`, the features of CAPTIONS)

    Args:
        prefix: "text." for the released DeBias-CLIP, "" for Long-CLIP.
        first_table: whether the features are those of the first table of positions alone.
    """
    torch.manual_seed(0)
    config = deepcopy(DEEP) | {"quick_gelu": True}
    config["text_cfg"]["context_length"] = 248
    clip = everyday(open_clip.CLIP(**config)).eval()
    state = dict(clip.state_dict())
    state |= two_tables(state["positional_embedding"])
    if first_table:
        clip.positional_embedding.data = state["positional_embedding"].clone()
    state = {(prefix if name.startswith(TEXT) else "") + name: tensor for name, tensor in state.items()}
    if prefix:
        assert state.keys() == INVENTORY["tensors"].keys()
        content = checkpoint(state)
    else:
        state["attn_mask"] = torch.full((248, 248), -torch.inf).triu_(1)
        state["mask_net.attn_pool.attention.weight"] = torch.ones(1, 64)  # as in SmartCLIP's checkpoints
        assert {"visual.conv1.weight", "positional_embedding_res"} <= state.keys()
        content = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save(content, folder / "debias_vitb_3e.pt")
    tokens = tiny_clip(context_length=248, tokenizer=clip_tokenizer(248)).tokenize(CAPTIONS)
    return folder / "debias_vitb_3e.pt", clip.encode_text(tokens.padded()).detach()
