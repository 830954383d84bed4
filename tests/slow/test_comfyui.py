"""The ComfyUI node in processes of its own: without the package, and in ComfyUI's server with files of true size.

Like test_comfyui.py, most of it needs a checkout of ComfyUI, named by the environment variable COMFYUI; `make comfyui`
runs both.
"""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from helpers.comfyui import COMFYUI, SENTENCE, importable_comfyui
from helpers.modules import ROOT
from PIL import Image

from debias_diffusion.app.cli import main
from debias_diffusion.app.comfyui.schema import LongPromptEncode
from debias_diffusion.app.written_folder import MARK

pytestmark = pytest.mark.usefixtures("no_grad")

NODE_ID = "DebiasLongPromptEncode"


AS_COMFYUI_LOADS = """
import importlib.util, sys
sys.modules["debias_diffusion"] = None  # as if it were not installed
for path in sys.argv[1:]:
    name = path.replace(".", "_x_")  # as in ComfyUI
    spec = importlib.util.spec_from_file_location(name, path + "/__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(list(module.NODE_DISPLAY_NAME_MAPPINGS.values()))
"""


def test_a_folder_written_by_a_bare_interpreter_works_without_the_package(tmp_path, capsys):
    bare, written = tmp_path / "bare", tmp_path / "written"
    script = [sys.executable, "-S", "-E", ROOT / "app" / "comfyui" / "write.py", bare]  # the standard library alone
    subprocess.run(script, check=True)
    main(["comfyui", "--output", str(written)])
    packs = [
        {path.relative_to(pack): path.read_bytes() for path in pack.rglob("*") if path.is_file() and path.name != MARK}
        for pack in (bare, written)
    ]
    assert packs[0] == packs[1] and len(packs[0]) == 12
    done = subprocess.run([sys.executable, "-c", AS_COMFYUI_LOADS, bare, written], capture_output=True, text=True)
    assert done.stdout == "['CLIP Text Encode (long prompt)']\n" * 2, done.stderr
    refused = subprocess.run(script, capture_output=True, text=True)
    assert refused.returncode == 2 and f"{bare} exists. Move it away" in refused.stderr
    main(["comfyui", "--output", str(written)])  # an earlier copy is replaced
    assert (written / "chunks.py").exists()
    (written / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit):
        main(["comfyui", "--output", str(written)])
    assert "which `comfyui` did not write" in capsys.readouterr().err and (written / "mine.txt").exists()


@pytest.fixture(scope="module")
def true_size(tmp_path_factory):
    """ComfyUI's folder with the node and random models of true size, 2 GB."""
    with importable_comfyui():
        folder = tmp_path_factory.mktemp("comfyui")
        path = os.pathsep.join([COMFYUI, os.environ.get("PYTHONPATH", "")])
        maker = [sys.executable, ROOT / "tests" / "helpers" / "comfyui_models.py", folder / "models"]
        subprocess.run(maker, env=os.environ | {"PYTHONPATH": path}, check=True)
        main(["comfyui", "--output", str(folder / "custom_nodes" / "long_prompt")])
        yield folder


# Of a pack that does not load, and of an `embedding:` without a file.
COMPLAINTS = r"IMPORT FAILED|Error while calling|does not exist, ignoring"


class Server(NamedTuple):
    """ComfyUI's server, and its folder of models, nodes and images."""

    address: str
    process: subprocess.Popen
    folder: Path

    def ask(self, path, data=None, seconds=300):
        """What the server answers, once it does."""
        for _ in range(seconds):
            try:
                with urllib.request.urlopen(urllib.request.Request(self.address + path, data)) as answer:
                    return answer.read().decode()
            except urllib.error.HTTPError:
                raise
            except OSError:
                assert self.process.poll() is None, "the server has ended"
                time.sleep(1)
        pytest.fail(f"{path} does not answer")

    def run(self, workflow):
        """The outputs of the nodes of a workflow in the API format."""
        queued = json.loads(self.ask("/prompt", json.dumps({"prompt": workflow}).encode()))["prompt_id"]
        while not (history := json.loads(self.ask(f"/history/{queued}"))):
            time.sleep(0.5)
        assert history[queued]["status"]["status_str"] == "success", history
        return history[queued]["outputs"]

    def draw(self, workflow):
        """The pixels of the images that a workflow saves: [images, height, width, 3]."""
        saved = [image["filename"] for output in self.run(workflow).values() for image in output["images"]]
        return np.stack([np.asarray(Image.open(self.folder / "output" / name)) for name in saved])


@pytest.fixture(scope="module")
def server(true_size):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "main.py", "--cpu", "--disable-api-nodes", "--base-directory", true_size]
    command += ["--database-url", "sqlite:///:memory:", "--listen", "127.0.0.1", "--port", str(port)]
    log = true_size / "log"
    with log.open("w") as file, subprocess.Popen(command, cwd=COMFYUI, stdout=file, stderr=file) as process:
        try:
            yield Server(f"http://127.0.0.1:{port}", process, true_size)
        finally:
            process.terminate()
    assert not [line for line in log.read_text().splitlines() if re.search(COMPLAINTS, line)]


def test_the_server_knows_the_node_its_page_and_its_workflows(server):
    declared = json.loads(server.ask(f"/object_info/{NODE_ID}"))[NODE_ID]
    assert declared["display_name"].startswith("CLIP Text Encode") and declared["output_name"][1] == "chunks"
    assert declared["input"] == json.loads(json.dumps(LongPromptEncode.INPUT_TYPES()))
    assert server.ask(f"/extensions/long_prompt/docs/{NODE_ID}.md").startswith("#")
    assert "long_prompt_248" in json.loads(server.ask("/api/workflow_templates"))["long_prompt"]


SIZES = {"width": 512, "height": 768, "crop_w": 0, "crop_h": 32, "target_width": 1024, "target_height": 640}


def test_only_the_class_changes_in_a_workflow_of_comfyui(server):
    """Short prompts, and long ones in ComfyUI's reading: the same image to the bit."""
    workflow, drawn = json.loads((ROOT / "examples" / "comfyui" / "long_prompt_248.json").read_text()), []
    workflow["2"]["inputs"]["clip_name1"] = "clip_l.safetensors"  # of 77 positions
    workflow["5"]["inputs"] |= {"width": 64, "height": 64}
    workflow["6"]["inputs"]["steps"] = 2
    for theirs, inputs in (
        ("CLIPTextEncode", {"text": "a (red:1.2) cat, embedding:style on a sofa"}),
        ("CLIPTextEncodeSDXL", {"text_l": "a (red:1.2) cat", "text_g": "on a sofa", **SIZES}),
        ("CLIPTextEncode", {"text": SENTENCE * 6, "reading": "comfyui"}),
    ):
        workflow["3"] = {"class_type": NODE_ID, "inputs": {"clip": ["2", 0], **inputs}}
        drawn.append(server.draw(workflow))
        inputs.pop("reading", None)
        workflow["3"] = {"class_type": theirs, "inputs": {"clip": ["2", 0], **inputs}}
        assert np.array_equal(drawn[-1], server.draw(workflow)), theirs
    assert not any(np.array_equal(*pair) for pair in itertools.combinations(drawn, 2))
