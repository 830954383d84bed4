"""Where cross-attention goes, against attention written out."""

import pytest
import torch
from helpers.draw import LONG
from helpers.tiny_sdxl import assemble_copy

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.attention_shares import PARTS, attention_shares

pytestmark = pytest.mark.usefixtures("no_grad")


def test_shares_are_those_of_attention_written_out(parts):
    pipe = assemble_copy(StableDiffusionXLLongPromptPipeline, parts)
    before, expected = pipe.unet.attn_processors, {}
    words = len(pipe.tokenizer(LONG, add_special_tokens=False).input_ids)

    def written_out(module, args, kwargs):
        places, text = args[0][-1], kwargs["encoder_hidden_states"][-1]
        q, k = (
            layer(states).unflatten(-1, (module.heads, -1))
            for layer, states in ((module.to_q, places), (module.to_k, text))
        )
        weights = (torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5).softmax(-1).mean((0, 1))
        parts = [weights[0], weights[1 : 1 + words].sum(), weights[1 + words], weights[2 + words :].sum()]
        expected.setdefault(len(places), []).append(torch.stack(parts))

    call = {"height": 32, "width": 32}
    hooks = [
        module.register_forward_pre_hook(written_out, with_kwargs=True)
        for name, module in pipe.unet.named_modules()
        if name.endswith("attn2")
    ]
    rows = attention_shares(pipe, LONG, steps=1, generator=torch.Generator().manual_seed(0), **call)
    for hook in hooks:
        hook.remove()
    assert [row["places"] for row in rows] == sorted(expected, reverse=True) and {row["step"] for row in rows} == {1}
    for row in rows:
        torch.testing.assert_close(
            torch.tensor([row[part] for part in PARTS]), torch.stack(expected[row["places"]]).mean(0)
        )
    assert pipe.unet.attn_processors == before


def test_the_first_a_middle_and_the_last_step_are_watched(parts):
    pipe = assemble_copy(StableDiffusionXLLongPromptPipeline, parts)
    rows = attention_shares(pipe, LONG, steps=5, height=32, width=32)
    assert sorted({row["step"] for row in rows}) == [1, 3, 5]
    assert all(sum(row[part] for part in PARTS) == pytest.approx(1, abs=1e-5) for row in rows)
