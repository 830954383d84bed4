"""`synthesize` shared by processes."""

import os
import subprocess
import sys

from helpers import tiny_llava
from helpers.processes import as_options

from research.synthesize.command import synthesize
from research.synthesize.options import SynthesizeConfig

# accelerate's own launcher starts several processes on GPUs only; underneath it is this one.
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "research"]


def test_two_processes_synthesize_as_one(tmp_path):
    tiny_llava.build(tmp_path / "model")
    (images := tmp_path / "images").mkdir()
    for index, picture in enumerate(tiny_llava.scenes()[0]):
        for size in ((48, 48), (100, 40)):
            picture.resize(size).save(images / f"{index}-{size[0]}.png")
    options = {"model": str(tmp_path / "model"), "images": str(images), "per_part": 2, "batch": 2, "workers": 0}
    synthesize(SynthesizeConfig(**options, device="cpu", output=str(tmp_path / "whole")))
    command = [*LAUNCHER, "synthesize", *as_options(options | {"output": tmp_path / "shared"})]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=os.environ | {"ACCELERATE_USE_CPU": "true"}, timeout=300, **pipes)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "each of 2 processes" in done.stdout and done.stdout.count("Kept") == 1
    for name in ("captions.jsonl", "removed.jsonl", "report.html"):
        assert (tmp_path / "shared" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "shared" / "captions.jsonl").read_text()
