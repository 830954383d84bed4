"""A plain install: long prompts in a pipeline, loading, export of text encoders; other commands say what they lack."""

import subprocess
import sys

from helpers.modules import ROOT

CODE = """
import contextlib, io, json, pathlib, shlex, sys
sys.path.insert(0, sys.argv[1])
from debias_diffusion.errors import EXTRAS

# As after a plain `pip install`: importing them fails. starlette comes with gradio.
sys.modules |= dict.fromkeys({*EXTRAS, "starlette"})
import diffusers, torch, transformers
from helpers import tiny_sdxl
from debias_diffusion import load_text_encoder
from debias_diffusion.app.cli import COMMANDS, main
from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.text.tokens import clip_tokenizer

base = str(tiny_sdxl.build_tiny_sdxl("base", vocabulary=clip_tokenizer))
pipe = with_long_prompts(diffusers.DiffusionPipeline.from_pretrained(base))
LONG = "A red cat sleeps on a blue sofa, next to a window. " * 12
assert pipe.encode_prompt(LONG)[0].shape[1] == 227
assert pipe(LONG, num_inference_steps=1).images[0].width > 9

encoder, _ = load_text_encoder(f"{base}/text_encoder")
main(["export", "--model", f"{base}/text_encoder", "--output", "folder"])
again, _ = load_text_encoder("folder")
assert all(map(torch.equal, again.state_dict().values(), encoder.state_dict().values()))
main(["generate", LONG, "--base", base, "--encoder", "folder", "--steps", "1", "--output", "a.png"])
assert pathlib.Path("a.png").stat().st_size

INSTALL = ' is not installed: run `pip install -e ".[{}]"` in the checkout.'
for extra, command in {
    "train": "train --data=toy/train --model=toy/clip --output=run",
    "eval": "evaluate attention --encoders=toy/clip --prompt=a --output=scores",
    "app": "app",
}.items():
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            main(command.split())
    except SystemExit as stopped:
        said = errors.getvalue().strip()
        assert stopped.code == 2 and said.startswith("error: ") and said.endswith(INSTALL.format(extra)), said
        assert command != "app" or said.startswith("error: gradio is"), said
    else:
        raise AssertionError(command)
if int(transformers.__version__.split(".")[0]) >= 5:  # which wrote the toy world's tokenizers
    for command in ("generate", "tokens"):  # examples that a plain install can run
        main([command, *shlex.split(COMMANDS[command].example)])
assert not any(map(sys.modules.get, EXTRAS))
"""


def test_a_plain_install_reads_long_prompts_exports_and_says_what_it_lacks(tmp_path):
    command = [sys.executable, "-c", CODE, str(ROOT / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
