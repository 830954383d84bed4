"""Steps of two models that must be the same: features and gradients."""

import torch
from helpers.tiny_clip import tiny_clip, tiny_siglip


def gradients(backbone, loss):
    backbone.zero_grad()
    loss.backward()
    text = {n: p.grad.clone() for n, p in backbone.model.named_parameters() if p.grad is not None}
    assert text
    return text


TINY = {"clip": tiny_clip, "siglip": tiny_siglip}


def pairs_of(backbone, sizes):
    """Batches of random images and captions, every caption but the first with pads in front."""
    side = backbone.model.visual.image_size[0]
    for size in sizes:
        images = torch.randint(0, 256, (4, 3, side, side), dtype=torch.uint8)
        ids = backbone.tokenizer.text_ids(["the cat " * (size + index) for index in range(4)])
        yield images, backbone.tokenizer.batch(ids, [index * size for index in range(4)])


def assert_same_steps(plain, other, sizes, **tolerances):
    """Both give the same features and gradients for batches of captions of `sizes` words and more."""
    for images, tokens in pairs_of(plain, sizes):
        results = []
        for backbone in (plain, other):
            features = torch.cat([backbone.encode_image(images), backbone.encode_text(tokens)])
            results.append((features, gradients(backbone, features.square().sum())))
        (features, expected), (other_features, other_gradients) = results
        torch.testing.assert_close(other_features, features, **tolerances)
        assert other_gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            tolerance = tolerances["rtol"] * max(1.0, gradient.abs().max().item())
            torch.testing.assert_close(other_gradients[name], gradient, rtol=0, atol=tolerance, msg=name)
    assert plain.state_dict().keys() == other.state_dict().keys()
