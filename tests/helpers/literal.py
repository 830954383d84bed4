"""Formulas of the papers, each written out once."""

import torch


def literal_info_nce(image, text, scale, smoothing):
    """Cross-entropies written out, one pair at a time."""
    total, n = 0.0, len(image)
    for rows, columns in ((image, text), (text, image)):
        for i in range(n):
            logits = torch.stack([scale * rows[i] @ columns[j] for j in range(n)])
            log_p = logits - torch.logsumexp(logits, 0)
            target = torch.full((n,), smoothing / n, dtype=torch.float64)
            target[i] += 1 - smoothing
            total = total - (target * log_p).sum() / (2 * n)
    return total


def literal_sigmoid(image, text, scale, bias):
    total = 0.0
    for i in range(len(image)):
        for j in range(len(text)):
            z = 1 if i == j else -1
            total = total + torch.log1p(torch.exp(-z * (scale * image[i] @ text[j] + bias)))
    return total / len(image)
