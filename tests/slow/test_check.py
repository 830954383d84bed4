"""`check` with the toy SDXL: sharpening as it is asked for, and a check that fails."""

import json

import pytest

from debias_diffusion.app.check import check
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
