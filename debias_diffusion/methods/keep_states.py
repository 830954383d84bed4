"""A term: the hidden states that a UNet reads stay where the base model has them.

SDXL's UNet was trained on the penultimate hidden states of the base model's text tower. Contrastive training moves them
(drift), because its losses read only EOT's last state, and the UNet then misreads what the encoder has understood. Here
the base model, frozen, reads a text in chunks of 77 positions that overlap, cut at the ends of sentences: as the
pipelines do. The states of the words in the trained tower, which reads the text in one piece, are drawn to these.

It needs no UNet. Where it succeeds, late sentences have states that the UNet has learned to read. Chunks that do not
overlap teach worse: after a cut their states know nothing of what came before, and nothing in a text says where a cut
is. The states of EOT and of the pads after it are left free: contrastive training needs them, and the UNet hardly does.
"""

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..clip.backbone import Backbone
from ..clip.text_tower import TextTower
from ..data.batch import Batch, draw_generator
from ..devices import to_device
from ..errors import UserError
from ..text.chunks import TRAINED_POSITIONS, Cut, Tokens, split_text
from ..text.prompt_tokens import tokenize_text
from ..text.sentences import join_sentences, split_sentences
from ..text.tokens import CaptionTokenizer, TokenBatch
from .base import Losses, Term, at_least_float

SHARE = 0.25  # of the samples, whose states are compared
_PART = 1 / 3  # of these, the share of which some sentences are read, at most one chunk, instead of the whole caption
_FEWEST = 2  # tokens of a text that is compared: the states of a single one have no variance
_NOTHING = -1  # where a row has no token


class Teacher(nn.Module):
    """The base model's text tower, with the positions that it had before stretching.

    Attributes:
        positions: how many.
    """

    def __init__(self, backbone: Backbone):
        super().__init__()
        tower = backbone.text.tower
        self.token_embedding = copy.deepcopy(tower.token_embedding)
        self.transformer = copy.deepcopy(tower.transformer)
        rows = backbone.unstretched_rows
        self.positional_embedding = nn.Parameter(tower.positional_embedding.detach()[rows].clone())
        self.positions = len(rows)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, texts: Sequence[Tokens], tokenizer: CaptionTokenizer) -> tuple[Tensor, Tensor]:
        """Penultimate states of SOT [1, width], and of all texts' tokens [tokens, width], in chunks that overlap."""
        chunks = [(text, chunk) for text in texts for chunk in split_text(text, self.positions - 2)]
        rows = without_eot([[text.ids[at] for at in chunk.read] for text, chunk in chunks], tokenizer)
        sot, states = TextTower(self).token_states(rows.to(self.positional_embedding.device))
        parts = zip(states.split(rows.lengths.tolist()), chunks, strict=True)
        return sot, torch.cat([part[chunk.reread :] for part, (_, chunk) in parts])


def state_errors(
    text_tower: TextTower, teacher: Teacher, texts: Sequence[Tokens], tokenizer: CaptionTokenizer
) -> Tensor:
    """[texts] how far the states are from the teacher's, as a share of the variance of the teacher's.

    The squared difference, mean over SOT and the tokens and over channels, divided by the mean variance of a channel of
    the teacher over the tokens. 0 is the teacher, and 1 as far from it as the mean of the text's states is.

    Args:
        texts: of at least two tokens, and at most as many as the tower reads at once, less SOT and EOT.
    """
    expected_sot, expected = teacher(texts, tokenizer)
    rows = without_eot([text.ids for text in texts], tokenizer)
    sot, states = text_tower.token_states(rows.to(expected.device))
    lengths = rows.lengths.tolist()
    pairs = zip(states.split(lengths), expected.split(lengths), strict=True)
    return torch.stack(
        [relative_error(torch.cat([sot, tokens]), torch.cat([expected_sot, targets])) for tokens, targets in pairs]
    )


def relative_error(states: Tensor, expected: Tensor) -> Tensor:
    """How far the states of one text are from those expected: see `state_errors`.

    Args:
        states, expected: of SOT and at least two tokens, [1 + tokens, width].
    """
    states, expected = at_least_float(states), at_least_float(expected)
    # Not SOT: in trained models its state is far from all others.
    variance = expected[1:].var(dim=0, correction=0).mean()
    return (states - expected).square().mean() / variance


def without_eot(rows: Sequence[list[int]], tokenizer: CaptionTokenizer) -> TokenBatch:
    """Texts of which only SOT and the tokens are computed; under a causal mask nothing later changes their states."""
    return replace(
        tokenizer.batch([[]] * len(rows)),
        ids=torch.tensor([token for row in rows for token in row], dtype=torch.long),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.long),
    )


@dataclass(frozen=True)
class KeepStates(Term):
    """The mean of `state_errors` over the texts that are drawn.

    Attributes:
        weight: of that mean, above 0.
    """

    weight: float

    def check_base(self, base_model: Backbone) -> None:
        if not base_model.family.causal:
            raise UserError(
                f"keep_states is {self.weight:g}, but no UNet of SDXL reads the text tower of a "
                f"{base_model.family.name}. Leave it out, or train a CLIP."
            )

    def modules(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"teacher": Teacher(backbone)}

    def views(
        self, image: Tensor, caption: str, tokenizer: CaptionTokenizer, seed: int, epoch: int, sample_id: str
    ) -> dict[str, Tensor]:
        """{"state_tokens": [2, context_length - 2]}: ids and cuts, or nothing."""
        rng = draw_generator(seed, epoch, f"{sample_id}/states")
        rows = torch.full((2, tokenizer.context_length - 2), _NOTHING)
        if rng.random() < SHARE:
            tokens = _draw_text(caption, tokenizer, rng)
            ids = torch.tensor([tokens.ids, tokens.cuts], dtype=torch.long)[:, : rows.shape[1]]
            if ids.shape[1] >= _FEWEST:
                rows[:, : ids.shape[1]] = ids
        return {"state_tokens": rows}

    def encode(
        self, backbone: Backbone, batch: Batch, features: Mapping[str, Tensor], modules: Any = None
    ) -> dict[str, Tensor]:
        """{"state_error", 0 where nothing was drawn; "state_drawn", 0 or 1}, [batch] each."""
        rows = batch.views["state_tokens"]
        is_drawn, device = rows[:, 0, 0] != _NOTHING, backbone.logit_scale.device
        counts = to_device(is_drawn.to(backbone.logit_scale.dtype), device)
        errors = torch.zeros_like(counts)
        texts = [_tokens(*row) for row in rows[is_drawn].tolist()]
        if texts:
            drawn_errors = state_errors(backbone.text, modules["teacher"], texts, backbone.tokenizer)
            errors = errors.index_put((to_device(is_drawn.nonzero().flatten(), device),), drawn_errors.to(errors))
        return {"state_error": errors, "state_drawn": counts}

    def losses(self, features: Mapping[str, Tensor], scale: Tensor, bias: Tensor | None = None) -> Losses:
        error = features["state_error"].sum() / features["state_drawn"].sum().clamp(min=1)
        return {"state_loss": self.weight * error}, {"state_error": error.detach()}

    def describe(self) -> str:
        return f"hidden states kept with weight {self.weight:g}"


def _draw_text(caption: str, tokenizer: CaptionTokenizer, rng: random.Random) -> Tokens:
    """The whole caption, or what one chunk holds of some of its sentences, in their order or another."""
    sentences, is_part = split_sentences(caption), rng.random() < _PART
    if is_part and sentences:
        numbers = rng.sample(range(len(sentences)), rng.randint(1, len(sentences)))
        numbers = numbers if rng.random() < 0.5 else sorted(numbers)
        caption = join_sentences([sentences[number] for number in numbers])
    tokens = tokenize_text(tokenizer.cleaning(caption), tokenizer.tokenizer)
    if is_part:
        first = split_text(tokens, TRAINED_POSITIONS - 2, "separate")[0].kept
        tokens = tokens.first(first.stop)
    return tokens


def _tokens(ids: list[int], cuts: list[int]) -> Tokens:
    """What a row of `state_tokens` holds."""
    length = sum(token != _NOTHING for token in ids)
    return Tokens(ids[:length], [Cut(cut) for cut in cuts[:length]], [1.0] * length)
