"""Training in which one word's embedding is NaN, as after a step that went wrong: no base model may come like that."""

import torch

from debias_diffusion.training import loop

_prepare_backbone = loop.prepare_backbone


def poisoned_by(word: str):
    """A `prepare_backbone` whose backbone does not survive captions with `word`."""

    def prepare_backbone(*arguments):
        backbone = _prepare_backbone(*arguments)
        (token,) = backbone.tokenizer.text_ids([word])[0]
        with torch.no_grad():
            backbone.model.token_embedding.weight[token] = torch.nan
        return backbone

    return prepare_backbone
