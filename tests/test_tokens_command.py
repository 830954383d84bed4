"""`tokens`: where each program cuts a prompt, shown without any model's weights."""

import json
import shutil
import sys

import pytest
import torch

from debias_diffusion.app import cli
from debias_diffusion.pipelines.rendering.checkpoints import DENOISER
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.pipelines.rendering.prompts import cleaned
from debias_diffusion.toyworld.shipped import shipped

# Tokens: 48 that end with a sentence, 16 that end with a comma, 7 words, 5 in brackets, and 2 words.
PROMPT = 6 * "A red star above a blue ring. " + 4 * "a blue ring, " + "a red star above a blue ring (and a zzz) a ring"
WEIGHTED = 20 * "A (red star:1.3) [above] a blue ring. " + "BREAK And \x1b[2J."


@pytest.fixture
def show(capsys):
    def show(*arguments, base="toy/sdxl"):  # what is printed, or why it is refused
        try:
            cli.main(["tokens", *arguments, "--base", str(base)])
        except SystemExit as exit:
            assert exit.code == 2
        return "".join(capsys.readouterr())

    return show


@pytest.mark.parametrize(("encoder", "emphasis"), [(None, None), ("toy/debias-clip", "comfyui")])
def test_a_pipeline_of_the_same_encoders_says_the_same(show, tmp_path, encoder, emphasis):
    base = shutil.copytree(shipped("toy/sdxl"), tmp_path / "sdxl", ignore=shutil.ignore_patterns("*.safetensors"))
    options = ["--encoder", encoder or "null", "--emphasis", emphasis or "null"]
    shown = json.loads(show(WEIGHTED, "--json", *options, base=base))
    pipe = load_pipeline("toy/sdxl", encoder, torch.device("cpu"), without=DENOISER)
    for reading in ("overlap", "separate", "cut", "a1111", "kohya", "comfyui"):
        pipe.set_long_prompt(reading=reading, emphasis=emphasis)
        layout = pipe.prompt_layout(cleaned(WEIGHTED, pipe._long_prompt), do_classifier_free_guidance=False)
        assert shown.pop(reading) == json.loads(json.dumps(layout._asdict())), reading
    assert not shown


def test_a_prompt_that_is_read_alike_is_shown_once(show):
    alike, kohya = show("A red ring.").split("\n\n")
    assert alike.startswith("overlap (overlapping chunks), separate (") and "(as ComfyUI): 4 tokens, 77 pos" in alike
    assert kohya.startswith("kohya (as kohya): 4 tokens, 227 positions")
    assert show(PROMPT).count("both text encoders") == 5  # in chunks that end with sentences, overlapping or not


def test_cuts_are_marked_and_coloured_only_on_a_terminal(show, monkeypatch):
    assert " a blue ring , |\n     14  a red star above" in show(PROMPT, "--reading=a1111")
    assert "it changes with [ring:two stars:0.5]\n" in show("a [ring:two stars:0.5]", "--reading=a1111")
    shown = show("a cat AND a dog: 1.2 # why", "--reading=a1111")
    assert "  taken out: # why\n  taken out: : 1.2\n" in shown and "'AND' does not join two prompts" in shown
    plain = show(WEIGHTED, "--encoder=kohya:toy/clip")
    assert plain.startswith("kohya (as kohya): ") and "cut off: " in plain and "\x1b" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    coloured = show(WEIGHTED, "--reading=kohya")
    assert "\x1b[32ma ( red" in coloured and "cut off: \x1b[31m" in coloured and "and \ufffd" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert show(WEIGHTED, "--reading=kohya") == plain


def test_what_cannot_be_shown_is_refused(show, tmp_path):
    assert "reading is 'compel', but must be overlap or separate" in show("a ring", "--reading=compel")
    assert "both say how prompts are read" in show("a ring", "--reading=cut", "--encoder=kohya:toy/clip")
    assert "The prompt cannot be read: the weight of 'a' is 200" in show("(a:200)", "--reading=a1111")
    lacking = shutil.copytree(shipped("toy/sdxl"), tmp_path / "sdxl", ignore=shutil.ignore_patterns("tokenizer_2"))
    assert "holds no tokenizer" in show("a ring", base=lacking)
