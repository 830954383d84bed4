"""Tags of toy scenes, and the loss that makes BOS a sink."""

import torch
from helpers.draw import LONG
from helpers.tiny_sdxl import assemble_copy

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from research.studies.tags import tagged
from research.studies.worlds import BosShares


def test_a_list_of_tags_names_each_object_once_with_its_place():
    for index in range(20):
        scene, caption = tagged("development", index)
        tags = caption.text.split(", ")
        for thing in scene.things:
            assert tags.count(f"{thing.size} {thing.colour} {thing.kind} {thing.place}") == 1
        mentioned = [place for tag in caption.sentences for place in tag.mentions]
        assert sorted(mentioned) == sorted(thing.place for thing in scene.things)
        assert "." not in caption.text and not caption.text.endswith(",")
        assert caption == tagged("development", index)[1] != tagged("test", index)[1]


def test_the_share_of_bos_is_of_rows_with_a_text_and_has_a_gradient(parts):
    pipe, shares = assemble_copy(StableDiffusionXLLongPromptPipeline, parts), []
    cross = next(module for name, module in pipe.unet.named_modules() if name.endswith("attn2"))
    cross.set_processor(BosShares(shares))
    states = pipe.encode_prompt([LONG] * 2)[0].detach()
    states[0] = 0  # as captions that are left out for guidance
    image = torch.randn(2, 16, cross.to_q.in_features, generator=torch.Generator().manual_seed(0))
    cross(image, encoder_hidden_states=states)
    q, k = (layer(of[1]).unflatten(-1, (cross.heads, -1)) for layer, of in ((cross.to_q, image), (cross.to_k, states)))
    weights = (torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    torch.testing.assert_close(shares[0], weights[..., 0].mean())
    shares[0].backward()
    assert cross.to_k.weight.grad.abs().max() > 0
