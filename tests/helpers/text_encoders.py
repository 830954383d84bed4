"""Text encoders in the layouts that people publish, and what each must compute."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import open_clip
import torch
from helpers.released import two_tables
from helpers.tiny_clip import CONFIG, tiny_clip
from helpers.vocabulary import tiny_tokenizer
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.encoders import hub
from debias_diffusion.text.tokens import CaptionTokenizer

CAPTIONS = [
    "A cat sits on a red mat. " * 60,
    "A dog.",
    "Two birds fly over a blue house, and a small man in a green coat looks up at them. " * 6,
]


def text_backbone(
    text_cfg: dict,
    embed_dim: int,
    quick_gelu: bool,
    seed: int = 0,
    vocabulary: Callable[[int], CLIPTokenizer] = tiny_tokenizer,
) -> Backbone:
    """A two-tower with open_clip's text tower of these sizes, stretched, and the smallest of image towers.

    `vocabulary`: `clip_tokenizer` where a single file of the encoder is read, which takes CLIP's own alone.
    """
    tokenizer = vocabulary(77)
    text_cfg = {"context_length": 77, "vocab_size": len(tokenizer)} | text_cfg
    config = deepcopy(CONFIG) | {"embed_dim": embed_dim, "text_cfg": text_cfg, "quick_gelu": quick_gelu}
    torch.manual_seed(seed)
    model = open_clip.CLIP(**deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))  # biases too, which begin as zeros
    backbone = Backbone(model, CaptionTokenizer(tokenizer, 77), {"model_cfg": config, "preprocess_cfg": {}}, True)
    backbone.stretch()
    return backbone.eval()


def long_clip(**settings) -> Backbone:
    backbone = tiny_clip(**settings)
    backbone.stretch()
    return backbone.eval()


# The text towers of open_clip's ViT-bigG-14 and of a ViT-L-14, a tenth as wide.
BIGG = {"width": 128, "heads": 2, "layers": 32}
SMALL = {"width": 64, "heads": 1, "layers": 12}


class Expected:
    """The states and features of open_clip's own forward pass for a few captions."""

    def __init__(self, backbone, captions=CAPTIONS[:2]):
        self.captions, self.rows = captions, backbone.tokenize(captions).padded()
        with torch.inference_mode():
            self.states, self.features = open_clip_states(backbone.model, self.rows)

    def check(self, encoder, tokenizer):
        """The encoder's hidden states and, if it has a projection, features are those, and the tokenizer's ids."""
        inputs = tokenizer(self.captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
        is_text = self.rows != 0
        assert torch.equal(inputs[is_text], self.rows[is_text])
        assert not encoder.training and tokenizer.model_max_length == encoder.config.max_position_embeddings
        with torch.inference_mode():
            output = encoder(inputs, output_hidden_states=True)
        for states, expected in zip(output.hidden_states, self.states, strict=True):
            torch.testing.assert_close(states[is_text], expected[is_text], rtol=0, atol=1e-5)
        if isinstance(encoder, CLIPTextModelWithProjection):
            torch.testing.assert_close(output.text_embeds, self.features, rtol=0, atol=1e-5)


def open_clip_states(model, rows):
    """(the input and every block's output of open_clip's own text tower, the text features)"""
    return block_states(getattr(model, "text", model).transformer, lambda: model.encode_text(rows))


def block_states(transformer, forward):
    """(the input and every block's output of open_clip's transformer in `forward()`, the result of that)"""
    states = []
    hooks = [block.register_forward_hook(lambda *call: states.append(call[2])) for block in transformer.resblocks]
    hooks.append(transformer.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0])))
    result = forward()
    for hook in hooks:
        hook.remove()
    return states, result


def text_state(backbone):
    return {name: tensor for name, tensor in backbone.model.state_dict().items() if not name.startswith("visual.")}


def long_clip_state(backbone):
    """As Long-CLIP's training leaves it: two tables, of which other rows count."""
    state = text_state(backbone)
    return state | two_tables(state["positional_embedding"])


class Runs:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (Path.touch, (Path(self.trace),))


def hub_repository(cache: Path, name: str, commit: str = "0" * 40, revision: str = "main") -> Path:
    """An empty repository of the hub's cache on this machine, or another commit in one."""
    hub._repository.cache_clear()  # of another test
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    (folder := repository / "snapshots" / commit).mkdir(parents=True)
    return folder
