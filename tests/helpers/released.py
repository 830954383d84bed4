"""Checkpoints in the layouts of released Long-CLIP and DeBias-CLIP weights."""

from copy import deepcopy

import open_clip
import torch
from helpers.tiny_clip import CONFIG, everyday, tiny_clip

from debias_diffusion.text.tokens import clip_tokenizer

# OpenAI's number of blocks, and one head for each 64 of the width.
DEEP = CONFIG | {"text_cfg": CONFIG["text_cfg"] | {"layers": 12, "width": 64, "heads": 1}}


TEXT = ("positional_embedding", "token_embedding.", "transformer.", "ln_final.", "text_projection")


CAPTIONS = ["a red cat. " * 40, "a dog"]


def two_tables(table):
    """Long-CLIP's two tables of positions, of which other rows count."""
    noise, kept = torch.randn(table.shape), (torch.arange(len(table)) < 20)[:, None]
    return {"positional_embedding": table.where(kept, noise), "positional_embedding_res": table.where(~kept, noise)}


def released(folder, prefix):
    """(a file with the text tower's names under `prefix`, the features of CAPTIONS)"""
    torch.manual_seed(0)
    config = deepcopy(DEEP) | {"quick_gelu": True}
    config["text_cfg"]["context_length"] = 248
    clip = everyday(open_clip.CLIP(**config)).eval()
    state = dict(clip.state_dict())
    state |= two_tables(state["positional_embedding"])
    state = {(prefix if name.startswith(TEXT) else "") + name: tensor for name, tensor in state.items()}
    if not prefix:  # as SmartCLIP's checkpoints
        state["mask_net.attn_pool.attention.weight"] = torch.ones(1, 64)
    state[f"{prefix}attn_mask"] = torch.full((248, 248), -torch.inf).triu_(1)
    assert {"visual.conv1.weight", f"{prefix}positional_embedding_res"} <= state.keys()
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, folder / "debias_vitb_3e.pt")
    tokens = tiny_clip(context_length=248, tokenizer=clip_tokenizer(248)).tokenize(CAPTIONS)
    return folder / "debias_vitb_3e.pt", clip.encode_text(tokens.padded()).detach()
