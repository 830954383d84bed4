"""The ComfyUI node in processes of its own: without the package, and in ComfyUI's server with files of true size.

Like test_comfyui.py, most of it needs a checkout of ComfyUI, named by the environment variable COMFYUI.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from helpers.comfyui import COMFYUI, LONG, difference, importable_comfyui, sdxl_pipeline
from helpers.modules import ROOT
from PIL import Image

from debias_diffusion import load_text_encoder
from debias_diffusion.app.cli import main
from debias_diffusion.app.comfyui.long_prompt_node import LongPromptEncode
from debias_diffusion.app.comfyui.write import WORKFLOWS
from debias_diffusion.app.written_folder import MARK

pytestmark = pytest.mark.usefixtures("no_grad")


AS_COMFYUI_LOADS = """
import importlib.util, sys
sys.modules["debias_diffusion"] = None  # as if it were not installed
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location(path, path + "/__init__.py")
    sys.modules[path] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(list(module.NODE_DISPLAY_NAME_MAPPINGS.values()))
"""


def test_a_written_folder_works_without_the_package(tmp_path, capsys):
    folder, lacking = tmp_path / "long_prompt", tmp_path / "lacking"
    for copy in (folder, lacking):
        main(["comfyui", "--output", str(copy)])
    (lacking / "chunks.py").unlink()
    command = [sys.executable, "-c", AS_COMFYUI_LOADS, folder, lacking]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "['CLIP Text Encode (long prompt)']\n"
    assert "ImportError: the long-prompt node lacks `chunks.py`" in done.stderr
    main(["comfyui", "--output", str(lacking)])  # an earlier copy is replaced
    assert (lacking / "chunks.py").exists()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit):
        main(["comfyui", "--output", str(folder)])
    assert "which `comfyui` did not write" in capsys.readouterr().err and (folder / "mine.txt").exists()


def test_a_bare_interpreter_writes_the_same_pack_from_a_checkout(tmp_path):
    bare, written = tmp_path / "bare", tmp_path / "written"
    script = [sys.executable, "-S", "-E", ROOT / "app" / "comfyui" / "write.py", bare]  # the standard library alone
    subprocess.run(script, check=True)
    main(["comfyui", "--output", str(written)])
    (written / MARK).unlink()
    packs = [
        {path.relative_to(pack): path.read_bytes() for path in pack.rglob("*") if path.is_file()}
        for pack in (bare, written)
    ]
    assert packs[0] == packs[1] and len(packs[0]) == 10
    loaded = subprocess.run([sys.executable, "-c", AS_COMFYUI_LOADS, bare], capture_output=True, text=True, check=True)
    assert loaded.stdout == "['CLIP Text Encode (long prompt)']\n"
    refused = subprocess.run(script, capture_output=True, text=True)
    assert refused.returncode == 2 and f"{bare} exists. Move it away" in refused.stderr


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


def test_files_of_true_size(true_size):
    from comfy import sd

    folder = true_size / "models" / "text_encoders"
    files = [str(folder / f"{name}.safetensors") for name in ("debias_clip_l", "clip_g")]
    pipe, prompt = sdxl_pipeline([load_text_encoder(file)[0] for file in files]), LONG.replace(")?", ":1.2)?")
    embeds, _, pooled, _ = pipe.encode_prompt(prompt, negative_prompt="")
    pipe.text_encoder = pipe.text_encoder_2 = None
    clip = sd.load_clip(files, clip_type=sd.CLIPType.STABLE_DIFFUSION)
    ours, _ = LongPromptEncode().encode(clip, prompt, multiple_of_77=False)
    assert ours[0][0].shape == (1, 152, 2048) and embeds.std() > 0.1
    assert difference(ours, embeds, pooled) < 1e-4


def test_the_workflow_in_comfyuis_server(true_size):
    workflow = json.loads((true_size / "custom_nodes" / "long_prompt" / WORKFLOWS / "long_prompt_248.json").read_text())
    workflow["5"]["inputs"] |= {"width": 64, "height": 64}
    workflow["6"]["inputs"]["steps"] = 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "main.py", "--cpu", "--disable-api-nodes", "--base-directory", true_size]
    command += ["--database-url", "sqlite:///:memory:", "--listen", "127.0.0.1", "--port", str(port)]
    with (true_size / "log").open("w") as log, subprocess.Popen(command, cwd=COMFYUI, stdout=log, stderr=log) as server:
        try:
            prompt = json.dumps({"prompt": workflow}).encode()
            queued = ask(f"http://127.0.0.1:{port}/prompt", prompt, server)["prompt_id"]
            while not (history := ask(f"http://127.0.0.1:{port}/history/{queued}", None, server)):
                time.sleep(1)
        finally:
            server.terminate()
    assert history[queued]["status"]["status_str"] == "success"
    (image,) = history[queued]["outputs"]["8"]["images"]
    pixels = np.asarray(Image.open(true_size / "output" / image["filename"]))
    assert pixels.shape == (64, 64, 3) and pixels.std() > 10


def ask(address, data, server, seconds=300):
    """The JSON that ComfyUI's server answers, once it does."""
    for _ in range(seconds):
        try:
            with urllib.request.urlopen(urllib.request.Request(address, data)) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert server.poll() is None, "the server has ended"
            time.sleep(1)
    pytest.fail(f"{address} does not answer")
