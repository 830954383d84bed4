"""Suppression: in chosen heads, all tokens but the first count less (AAT, section 4.1).

In an ablated head the attention's columns 1 and on are multiplied by beta, then each row is normalised again. With the
ordinary output o of a row, the weight p0 of its column 0 and the value v0 of token 0, that is

    (beta * o + (1 - beta) * p0 * v0) / (beta + (1 - beta) * p0)

because the other weights of the row sum to 1 - p0 and carry o - p0 * v0. No matrix of weights is needed: p0 is what a
further channel of the values becomes that is 1 for token 0 and 0 for all others. So one attention serves every beta.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..clip.blocks import Attention, full_attention


def attend_with_share(query: Tensor, key: Tensor, value: Tensor, attend: Attention) -> tuple[Tensor, Tensor]:
    """The attended values and the weight of token 0 in them.

    Args:
        query, key, value: [..., tokens, heads, head_dim]; `query` may have fewer tokens.
        attend: the ordinary attention.

    Returns:
        attended [..., heads, head_dim] of the query's shape, share [..., heads, 1].
    """
    # Fast kernels want queries, keys and values of one width, a multiple of 8. Zeros add nothing to a product, and the
    # query makes up for the scale, the root of the width.
    width = value.shape[-1]
    more = 8 - width % 8
    query = F.pad(query * math.sqrt(1 + more / width), (0, more))
    first = torch.zeros_like(value[..., :more])
    first[..., 0, :, 0] = 1
    attended = attend(query, F.pad(key, (0, more)), torch.cat([value, first], dim=-1))
    return attended[..., :width], attended[..., width : width + 1]


def suppress(attended: Tensor, share: Tensor, first_value: Tensor, beta: Tensor) -> Tensor:
    """The attended values of heads that are ablated with `beta`, see the module's docstring.

    Args:
        attended, share: from `attend_with_share`.
        first_value: the value of token 0, [..., 1, heads, head_dim].
        beta: from 0 to 1, of each head, [heads]; 1 leaves a head as it is, 0 gives `first_value`.
    """
    exact = torch.promote_types(attended.dtype, torch.float32)  # a quotient of small numbers
    beta, share, kept = beta.to(exact)[:, None], share.to(exact), first_value.to(exact)
    of_first = (1 - beta) * share
    # Where beta is 0 a share may be too small to divide by, and the result is known.
    is_zero = beta == 0
    suppressed = (beta * attended.to(exact) + of_first * kept) / torch.where(is_zero, 1.0, beta + of_first)
    return torch.where(is_zero, kept, suppressed).to(attended.dtype)


@dataclass(frozen=True)
class Suppressed:
    """The attention of a block some of whose heads are ablated; an `Attention`.

    Attributes:
        beta: of each head, [heads].
        attend: the ordinary attention.
    """

    beta: Tensor
    attend: Attention = full_attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended, share = attend_with_share(query, key, value, self.attend)
        return suppress(attended, share, value[..., :1, :, :], self.beta.to(value.device))
