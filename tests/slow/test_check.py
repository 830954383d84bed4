"""`check` with the toy SDXL: sharpening as it is asked for, and a check that fails."""

import json
import sys

import pytest
import torch
from helpers.modules import ROOT

from debias_diffusion.app.check import check, most_memory
from debias_diffusion.app.prompt_options import CheckConfig
from debias_diffusion.errors import FailedError
from debias_diffusion.pipelines.long_prompt import SDXLLongPromptMixin


def test_sharpening_is_checked_where_it_is_asked_for(tmp_path):
    check(CheckConfig(base="toy/sdxl", output=str(tmp_path), limit=1, steps=1, device="cpu", sharpen=1.0))
    checks = json.loads((tmp_path / "check.json").read_text())["checks"]
    assert "not asked for" in checks["sharpening differs and leaves no trace"]["result"]


def test_a_failure_says_what_differs_and_the_other_checks_go_on(tmp_path, monkeypatch):
    encode = SDXLLongPromptMixin.encode_prompt

    def wrong(self, prompt, *args, **kwargs):
        states, *others = encode(self, prompt, *args, **kwargs)
        return (states + 0.5 if kwargs.get("clip_skip") else states, *others)

    monkeypatch.setattr(SDXLLongPromptMixin, "encode_prompt", wrong)
    with pytest.raises(FailedError, match="1 of 7 checks failed: short"):
        check(CheckConfig(base="toy/sdxl", output=str(tmp_path), limit=1, steps=1, device="cpu"))
    result = json.loads((tmp_path / "check.json").read_text())
    assert (tmp_path / "contact-sheet.png").is_file() and result["versions"] and result["machine"] and result["base"]
    checks = result["checks"]
    assert list(checks["where attention goes, by positions"]["result"]["rows"]) == ["77", "152", "227"]
    costs = checks["time and memory, by positions"]["result"]
    assert list(costs) == ["stock, 77", "ours, 77", "ours, 227", "ours, 527"]
    assert "latents differ by" in checks["sharpening differs and leaves no trace"]["result"]
    failed = checks["short prompts equal stock diffusers"]["failed"]
    assert "'clip_skip': 1} differ by 0.5" in failed and sum("result" in value for value in checks.values()) == 6


def test_memory_is_what_counting_each_tensor_gives(monkeypatch):
    """Of SDXL's true configuration, decoded in float32: within 1% of the tensors that are alive at once."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from generate import random_sdxl

    counted = json.loads((ROOT / "benchmarks" / "results" / "sdxl-memory-counted.json").read_text())
    parameters, peaks = counted["parameters"], counted["peaks"]
    pipe = random_sdxl(torch.device("meta"), torch.float16)
    decoding = 2 * parameters["vae"] + peaks["vae, fp32"]  # the float16 weights once more, as float32
    step = 2 * parameters["unet"] + counted["rows"]["227"]["unet_peak"]
    whole, alone = most_memory(pipe, 1024 * 1024)
    assert whole == pytest.approx((2 * sum(parameters.values()) + decoding) / 1e9, rel=0.01)
    assert alone == pytest.approx(step / 1e9, rel=0.01)
