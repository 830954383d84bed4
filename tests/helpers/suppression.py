"""Suppression of attention heads as AAT defines it."""

import torch
from torch import Tensor


def literally(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, causal: bool = False) -> Tensor:
    """The paper's two steps on the matrix of weights, [batch, tokens, heads, head_dim] each."""
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.zeros(1, dtype=torch.bool)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    columns = torch.ones_like(weights)
    columns[..., 1:] = beta[:, None, None]
    weights = weights * columns
    return torch.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdim=True), value)
