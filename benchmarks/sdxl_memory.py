"""The memory that an image by SDXL takes, counted without weights: parameters, and the most each part holds at once.

    python benchmarks/sdxl_memory.py [--measured]

SDXL's true configuration at 1024 x 1024 in half precision, one image with guidance (two rows), on the meta device: each
tensor made while a part runs is counted for as long as it lives. Attention is counted as a fused kernel, which holds no
scores. A GPU takes more: the allocator rounds and keeps gaps, convolutions may use workspaces, CUDA itself needs some.
With --measured, what whole calls take instead, from the prompt to the image, on a GPU with random weights (on the CPU
the toy SDXL): the most that PyTorch's allocator gave out at once. What it holds in reserve, and CUDA, come on top.
Prints Markdown, and writes benchmarks/results/sdxl-memory-counted.json, or sdxl-memory-measured-DEVICE.json.
"""

import weakref
from collections.abc import Callable
from unittest.mock import patch

import torch
from accelerate import Accelerator
from generate import COUNTED, STOCK, WINDOW, prompt_of, random_sdxl, unet_inputs
from harness import PeakMemory, publish, read_options
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from debias_diffusion.eval.report import Table
from debias_diffusion.pipelines.rendering.loading import load_pipeline

PARTS = ("text_encoder", "text_encoder_2", "unet", "vae")
GB = 1e9
STEPS = 3  # of a measured call


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made in this block that are alive, and the most there were at once, in `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(outputs):
            if torch.is_tensor(leaf) and leaf.untyped_storage()._cdata not in self.alive | inputs:
                self.add(leaf.untyped_storage())
        return outputs

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.alive.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.remove, key, size)

    def remove(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


def fused_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_, **__) -> torch.Tensor:
    """The output of a kernel that holds no scores, without values."""
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@torch.no_grad()
def peak_bytes(run: Callable[[], object]) -> int:
    with patch("torch.nn.functional.scaled_dot_product_attention", fused_attention), LiveBytes() as live:
        run()
    return live.peak


def count() -> dict:
    pipe = random_sdxl(torch.device("meta"), torch.float16)
    weights = {part: sum(p.numel() for p in getattr(pipe, part).parameters()) for part in PARTS}
    rows = {}
    for positions in COUNTED:
        one_row = unet_inputs(pipe, positions)
        conditions = one_row.pop("added_cond_kwargs")
        inputs = {name: tensor.half() for name, tensor in one_row.items() if tensor.dim()}
        inputs = {name: tensor.repeat(2, *(tensor.dim() - 1) * [1]) for name, tensor in inputs.items()}
        conditions = {name: tensor.half().repeat(2, 1) for name, tensor in conditions.items()}

        def step(inputs=inputs, conditions=conditions, timestep=one_row["timestep"]):
            return pipe.unet(**inputs, timestep=timestep, added_cond_kwargs=conditions)

        rows[positions] = {"unet_peak": peak_bytes(step), "embeddings": inputs["encoder_hidden_states"].nbytes}
    ids = torch.empty(2, WINDOW, dtype=torch.long, device="meta")
    chunks = torch.empty(2 * 6, 77, dtype=torch.long, device="meta")
    latents = torch.empty(1, 4, 128, 128, dtype=torch.float16, device="meta")
    peaks = {
        "text_encoder": peak_bytes(lambda: pipe.text_encoder(ids, output_hidden_states=True)),
        "text_encoder_2": peak_bytes(lambda: pipe.text_encoder_2(chunks, output_hidden_states=True)),
        "vae": peak_bytes(lambda: pipe.vae.decode(latents)),
    }
    pipe.vae.float()
    peaks["vae, fp32"] = peak_bytes(lambda: pipe.vae.decode(latents.float()))
    return {"parameters": weights, "rows": rows, "peaks": peaks}


def tables(result: dict) -> list[Table]:
    peaks, stock = result["peaks"] | {"unet": result["rows"][77]["unet_peak"]}, result["rows"][77]["unet_peak"]
    parts = [
        [part, f"{parameters / 1e6:,.1f}", 2 * parameters / GB, peaks[part] / GB]
        for part, parameters in result["parameters"].items()
    ]
    parts.append(["vae in fp32", "", "", peaks["vae, fp32"] / GB])
    steps = []
    for positions, row in result["rows"].items():
        step, share = f"{row['unet_peak'] / 1e6:,.0f}", f"{100 * (row['unet_peak'] / stock - 1):+.2f}%"
        steps.append([str(positions), step, share, f"{row['embeddings'] / 1e6:.1f}"])
    return [
        Table(["part", "parameters, millions", "fp16 GB", "most at once beside weights, GB"], parts),
        Table(["positions", "most at once in a step, MB", "to 77", "embeddings, MB"], steps),
    ]


def measure(device: torch.device) -> dict[str, float]:
    """GB that whole calls take at most, weights among them, by what is made."""
    toy = device.type == "cpu"
    pipe = load_pipeline("toy/sdxl", "toy/debias-clip", device) if toy else random_sdxl(device, torch.float16)
    pipe.set_progress_bar_config(disable=True)
    weights = sum(weight.nbytes for part in PARTS for weight in getattr(pipe, part).parameters())
    memory, measured = PeakMemory(device), {"weights": weights / GB}

    def call(name: str, positions: int, output_type: str = "pil") -> None:
        prompt = prompt_of(pipe, positions)
        memory.start()
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else weights
        pipe(prompt, num_inference_steps=STEPS, output_type=output_type)
        measured[f"{name}, {positions} positions"] = (before + memory.read()) / GB

    for positions in (STOCK, WINDOW, 2 * WINDOW - 2):
        call("latents", positions, "latent")
        call("image", positions)  # diffusers decodes in fp32, as the configuration of SDXL's autoencoder asks
    pipe.vae.register_to_config(force_upcast=False)
    call("image decoded in fp16", WINDOW)
    return measured


if __name__ == "__main__":
    if read_options(__doc__, measured=False).measured:
        device = Accelerator().device
        measured = measure(device)
        table = Table(["whole call", "GB at most"], [[*row] for row in measured.items()])
        publish(f"sdxl-memory-measured-{device.type}", {"gigabytes": measured}, table, device=device)
    else:
        counted = count()
        publish("sdxl-memory-counted", counted, *tables(counted))
