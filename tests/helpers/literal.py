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


def literal_rebuilt(features, components, parts=1):
    """Features from their first principal components, the basis held fixed; `parts` with components of their own."""
    rebuilt = []
    for part in features.chunk(parts):
        mean = part.mean(0)
        basis = torch.linalg.svd((part - mean).detach(), full_matrices=False).Vh[:components].T
        rebuilt.append(mean + (part - mean) @ basis @ basis.T)
    return torch.cat(rebuilt)


def literal_text(backbone, tokens):
    """open_clip's own forward on literal rows; for average pooling its parts, written out."""
    model, rows = backbone.model, tokens.padded()
    if backbone.pooling == "eot":
        return model.encode_text(rows)
    tower = getattr(model, "text", model)
    states = tower.token_embedding(rows) + tower.positional_embedding
    states = tower.ln_final(tower.transformer(states, attn_mask=tower.attn_mask))
    real = torch.zeros(rows.shape, dtype=states.dtype)
    for row, n_prefix, length in zip(real, tokens.n_prefix, tokens.lengths, strict=True):
        row[n_prefix : n_prefix + length] = 1
        row[0] = max(row[0], float(tokens.shared_sot))
    pooled = torch.einsum("bl,blw->bw", real / real.sum(1, keepdim=True), states)
    projection = tower.text_projection
    return projection(pooled) if callable(projection) else pooled @ projection


def cosine(image, text):
    """0 where one of them is zero."""
    return image @ text / (image.norm() * text.norm()) if image.any() and text.any() else (image * text).sum()


def literal_ranks(images, texts, image_of, masks=None):
    """(each text's rank of its image, each image's best rank of a caption), compared one by one, last among equals.

    `masks`: each image is compared with a text under the text's.
    """
    images, texts = images.double(), texts.double()
    masks = torch.ones_like(texts) if masks is None else masks
    cosines = [[float(cosine(image * mask, text)) for text, mask in zip(texts, masks, strict=True)] for image in images]
    rows = range(len(texts))
    text_ranks = [
        1 + sum(cosines[i][t] >= cosines[owner][t] - 1e-6 for i in range(len(images)) if i != owner)
        for t, owner in enumerate(image_of)
    ]
    image_ranks = [
        min(
            1 + sum(cosines[i][t] >= cosines[i][own] - 1e-6 for t in rows if image_of[t] != i)
            for own in rows
            if image_of[own] == i
        )
        for i in range(len(images))
    ]
    return text_ranks, image_ranks
