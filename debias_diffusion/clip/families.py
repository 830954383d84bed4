"""How the families of two-towers differ: the one place that says it.

open_clip's model configuration has sizes, parts and activations. A family adds how a caption becomes a row of ids,
which slots of the row a state depends on, and which loss the features were trained for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from open_clip.tokenizer import get_clean_fn
from transformers import AutoTokenizer, CLIPTokenizer, PreTrainedTokenizerBase

from ..errors import UserError, explain_failure
from ..registry import Registry
from ..text.tokens import CaptionTokenizer, Markers, clean, clip_tokenizer, count_ids, save_tokenizer
from .text_tower import PaddedTextTower, TextTower

TOKENIZER_FOLDER = "tokenizer"

# mT5's vocabulary ends with ids that no text produces; SigLIP's multilingual towers have no rows for them.
_SENTINELS = 100
_TOKENIZER_SETTINGS = ({}, {"clean": "canonicalize"}, {"clean": "lower"}, {"clean": "whitespace"})


@dataclass(frozen=True)
class Family:
    """How a family of two-towers reads captions, and the loss it was trained with.

    Attributes:
        name: as messages call it, "CLIP" or "SigLIP".
        causal: whether a token sees only the tokens before it. Rows are then `[SOT, PAD .., text, EOT, PAD ..]`, pooled
            at EOT, and otherwise `[PAD .., text, EOT, PAD ..]`, pooled at the last slot, pad or not.
        loss: "softmax" (InfoNCE), or "sigmoid" (each pair by itself, with a bias).
        cleaning: the function that cleans a caption before the tokenizer.
        text_tower: the class that encodes captions with the model's weights.
        hub_tokenizer: the hub repository of the tokenizer; None for CLIP's, which comes with open_clip.
    """

    name: str
    causal: bool
    loss: str
    cleaning: Callable[[str], str]
    text_tower: type[TextTower]
    hub_tokenizer: str | None = None

    def caption_tokenizer(self, tokenizer: PreTrainedTokenizerBase, text_cfg: dict) -> CaptionTokenizer:
        """The tokenizer for the context length and the vocabulary of `text_cfg`.

        Raises ValueError if it lacks an id that the layout needs, or has more ids than the tower.
        """
        vocabulary, context_length = text_cfg["vocab_size"], text_cfg["context_length"]
        if (ids := count_ids(tokenizer)) > vocabulary + (_SENTINELS if self.hub_tokenizer else 0):
            raise ValueError(f"the tokenizer has {ids} ids, the text tower {vocabulary}")
        if self.causal:
            return CaptionTokenizer(tokenizer, context_length, cleaning=self.cleaning)
        ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        if None in ids:
            raise ValueError(f"a {self.name} tokenizer must have eos_token_id and pad_token_id, this one has {ids}")
        return CaptionTokenizer(tokenizer, context_length, Markers(None, *ids), self.cleaning)

    def load_tokenizer(self, model: str, folder: Path | None, text_cfg: dict) -> CaptionTokenizer:
        """The tokenizer in `folder` or its `tokenizer/`, else the family's. No code from a folder or hub is run."""
        place = folder and folder / TOKENIZER_FOLDER
        if place and not place.is_dir():
            place = folder if self.hub_tokenizer and (folder / "tokenizer.json").is_file() else None
        where, advice = place or self.hub_tokenizer or "CLIP's", ""
        if self.hub_tokenizer and not place:
            advice = (
                f"On a machine with a network run `hf download {where} --include '*token*' --local-dir "
                f"{TOKENIZER_FOLDER}`, and put the folder `{TOKENIZER_FOLDER}` beside the weights."
            )
        with explain_failure(f"The tokenizer of {model!r} ({where}) cannot be used", advice):
            if self.hub_tokenizer:
                tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
            else:
                length = text_cfg["context_length"]
                tokenizer = CLIPTokenizer.from_pretrained(place) if place else clip_tokenizer(length)
            return self.caption_tokenizer(tokenizer, text_cfg)

    def save_tokenizer(self, tokenizer: CaptionTokenizer, folder: Path) -> None:
        """Saves where `load_tokenizer` and open_clip's `get_tokenizer("local-dir:...")` look."""
        save_tokenizer(tokenizer.tokenizer, folder / TOKENIZER_FOLDER if self.hub_tokenizer is None else folder)


def _clip(model_cfg: dict) -> Family | None:
    text_cfg = model_cfg["text_cfg"]
    if text_cfg.get("no_causal_mask") or _pool(text_cfg) != "argmax" or text_cfg.get("hf_tokenizer_name"):
        return None
    return Family("CLIP", causal=True, loss=_loss(model_cfg), cleaning=clean, text_tower=TextTower)


def _siglip(model_cfg: dict) -> Family | None:
    text_cfg, loss = model_cfg["text_cfg"], _loss(model_cfg)
    hub_tokenizer = text_cfg.get("hf_tokenizer_name")
    if not (text_cfg.get("no_causal_mask") and _pool(text_cfg) == "last" and hub_tokenizer and loss == "sigmoid"):
        return None
    cleaning = get_clean_fn((text_cfg.get("tokenizer_kwargs") or {}).get("clean", "whitespace"))
    return Family("SigLIP", False, loss, cleaning, PaddedTextTower, hub_tokenizer)


# Each makes its family of an open_clip configuration, or gives None for one of another family.
FAMILIES: Registry[Callable[[dict], Family | None]] = Registry("family", {"CLIP": _clip, "SigLIP": _siglip})


def find_family(model: str, model_cfg: dict) -> Family:
    """The first of `FAMILIES` that a model is of, by its open_clip configuration."""
    text_cfg = model_cfg["text_cfg"]
    unfit = [key for key in ("hf_model_name", "embed_cls", "output_tokens", "tokenizer_mode") if text_cfg.get(key)]
    unfit += ["multimodal_cfg"] * ("multimodal_cfg" in model_cfg)
    # open_clip passes all other settings on to the tokenizer, even code from a hub.
    if (settings := text_cfg.get("tokenizer_kwargs") or {}) not in _TOKENIZER_SETTINGS:
        unfit.append(f"tokenizer_kwargs: {settings}")
    if not unfit and (family := next(filter(None, (find(model_cfg) for find in FAMILIES.values())), None)):
        return family
    unfit += ["no_causal_mask"] if text_cfg.get("no_causal_mask") else []
    unfit += [f"pool_type: {_pool(text_cfg)}", f"hf_tokenizer_name: {text_cfg.get('hf_tokenizer_name')}"]
    raise UserError(
        f"The text tower of {model!r} cannot be used ({'; '.join(unfit)}; {_loss(model_cfg)} loss). Give one of "
        "open_clip's with a causal mask, EOT pooling and CLIP's tokenizer (ViT-B-16, ViT-L-14, ...), or one without a "
        "mask that is pooled at the last slot and trained with the sigmoid loss (ViT-B-16-SigLIP, ViT-B-16-SigLIP2, "
        "...)."
    )


def _pool(text_cfg: dict) -> str:
    return text_cfg.get("pool_type", "argmax")


def _loss(model_cfg: dict) -> str:
    return "softmax" if model_cfg.get("init_logit_bias") is None else "sigmoid"
