"""One training step, ours against a padded one, at ShareGPT4V-like lengths.

    python benchmarks/train_step.py [--model ViT-B-16] [--batch 8] [--repeats 3] [--peer FOLDER]

(a) padded    open_clip's own forward passes on rows padded to the window, long and short captions one after the other,
              and an SVD for the components
(b) ours      captions up to their EOT, the shared beginning once
(c) kept      ours with --keep-states, of every fourth sample, the share that training draws
(d) frozen    ours with a frozen image tower whose features are at hand
(e) peer      Long-CLIP's released model and losses, where FOLDER is a checkout of github.com/beichenzbc/Long-CLIP; it
              has QuickGELU, so take a model with it (ViT-B-16-quickgelu)

Same weights, samples, dtype and optimizer; (a) to (d) use PyTorch's scaled_dot_product_attention, (e) what it uses.
Memory is what a step takes beside weights and AdamW's averages. They take turns, so that what else the machine does
falls on all. Prints a table and writes it to benchmarks/results/.
"""

import argparse
import importlib.util
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from machine import PeakMemory, machine, peak_flops, seconds
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from debias_diffusion.chunks import Cut
from debias_diffusion.methods import Batch, find_method
from debias_diffusion.methods.dual_caption import DualCaption
from debias_diffusion.methods.keep_states import SHARE, KeepStates
from debias_diffusion.methods.objectives import contrastive_loss
from debias_diffusion.models.backbone import Backbone, load_backbone
from debias_diffusion.training.step import Optimizer, autocast, backward

RESULTS = Path(__file__).parent / "results"
# ShareGPT4V's captions: 173 tokens and 9 sentences on average.
SENTENCES, SENTENCE_TOKENS = (6, 12), (12, 26)


def make_batch(backbone: Backbone, size: int, seed: int) -> Batch:
    """Random images and token ids, with captions sampled and padded as DeBias-CLIP's recipe does.

    Of every fourth sample, the long caption's states are compared where a method keeps states.
    """
    rng, tokenizer = random.Random(seed), backbone.tokenizer
    words = tokenizer.markers.sot
    long_ids, short_ids = [], []
    compared = torch.full((size, 2, tokenizer.context_length - 2), -1)
    for sample in range(size):
        sentences = [
            [rng.randrange(1, words) for _ in range(rng.randint(*SENTENCE_TOKENS))]
            for _ in range(rng.randint(*SENTENCES))
        ]
        drawn = rng.sample(sentences[1:], rng.randint(1, len(sentences) - 1))
        for ids, parts in ((long_ids, sentences), (short_ids, drawn)):
            ids.append([token for part in parts for token in part][: tokenizer.context_length - 2])
        if sample % round(1 / SHARE) == 0:
            cuts = [cut for part in sentences for cut in [Cut.TOKEN] * (len(part) - 1) + [Cut.SENTENCE]]
            ids = long_ids[-1]
            compared[sample, :, : len(ids)] = torch.tensor([ids, cuts[: len(ids)]])
    n_pre = [0] * size + [rng.randint(0, tokenizer.n_post(ids)) for ids in short_ids]
    side = backbone.model.visual.image_size
    images = torch.randint(256, (size, 3, *side), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    keys = [(0, i, i) for i in range(size)]
    return Batch(
        keys,
        list(map(str, range(size))),
        images,
        tokenizer.batch(long_ids + short_ids, n_pre),
        [],
        {"state_tokens": compared},
    )


def padded_backward(backbone: Backbone, method: DualCaption, batch: Batch, rows: torch.Tensor, precision: str) -> None:
    """The step as it stands in the paper, without sparing anything."""
    model, size = backbone.model, len(batch)
    with autocast(precision, batch.images.device):
        image = backbone.encode_image(batch.images)
        long_text, short_text = model.encode_text(rows[:size]), model.encode_text(rows[size:])
    image, long_text, short_text = (F.normalize(x.float(), dim=-1) for x in (image, long_text, short_text))
    mean = image.mean(0)
    basis = torch.linalg.svd((image - mean).detach(), full_matrices=False).Vh[: method.components].T
    rebuilt = mean + (image - mean) @ basis @ basis.T
    scale, w = model.logit_scale.exp(), method.short_weight
    short = contrastive_loss(rebuilt, short_text, scale, method.label_smoothing)
    long = contrastive_loss(image, long_text, scale, method.label_smoothing)
    (w * short + (1 - w) * long).backward()


def load_peer(folder: Path, backbone: Backbone):
    """Long-CLIP's own model class from its checkout, with our weights."""
    spec = importlib.util.spec_from_file_location("model_longclip", folder / "model" / "model_longclip.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ours, cfg = backbone.model, backbone.config["model_cfg"]
    vision, text = cfg["vision_cfg"], cfg["text_cfg"]
    peer = module.CLIP(
        *(cfg["embed_dim"], vision["image_size"], vision["layers"], vision["width"], vision["patch_size"]),
        *(backbone.context_length, text["vocab_size"], text["width"], text["heads"], text["layers"], False),
    )
    state = {name: tensor for name, tensor in ours.state_dict().items() if name != "attn_mask"}
    state["positional_embedding_res"] = state["positional_embedding"].clone()
    peer.load_state_dict(state)
    if not torch.distributed.is_initialized():  # its losses gather, with however few processes
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return peer.to(ours.logit_scale.device).train()


def peer_backward(peer, images: torch.Tensor, rows: torch.Tensor, precision: str) -> None:
    with autocast(precision, images.device):
        long, short = peer(images, *rows.chunk(2), 0)
    (long + short).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--peer", type=Path)
    arguments = parser.parse_args()

    accelerator = Accelerator()
    device, precision = accelerator.device, arguments.precision
    torch.manual_seed(0)
    backbone = load_backbone(arguments.model)
    backbone.stretch()
    backbone.to(device).train()
    method = find_method("debias-clip")
    method = replace(method, components=min(method.components, arguments.batch - 2))
    keeping = KeepStates(replace(method, keep_states=1.0))
    teacher = keeping.modules(backbone).to(device)
    settings = dict(weight_decay=1e-2, betas=(0.9, 0.999), eps=1e-8)
    optimizer = Optimizer(backbone, **settings)
    backbone.model.visual.requires_grad_(False)
    text_optimizer = Optimizer(backbone, **settings)
    peer = load_peer(arguments.peer, backbone) if arguments.peer else None
    peer_optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-6, weight_decay=1e-2) if peer else None

    def apply(compute_gradients: Callable, step_optimizer: Optimizer) -> None:
        backbone.model.visual.requires_grad_(step_optimizer is optimizer)
        compute_gradients()
        step_optimizer.step(1e-6)

    def apply_peer(images: torch.Tensor, rows: torch.Tensor) -> None:
        peer_backward(peer, images, rows, precision)
        peer_optimizer.step()
        peer_optimizer.zero_grad()

    names = ["padded", "ours", "kept", "frozen"] + ["peer"] * bool(peer)
    times, peaks, flops = ({name: [] for name in names} for _ in range(3))
    computed, literal, memory = 0, 0, PeakMemory(device)
    for repeat in tqdm(range(-1, arguments.repeats), desc="rounds, the first uncounted"):
        batch = make_batch(backbone, arguments.batch, seed=repeat + 1).to(device)
        rows = batch.tokens.padded()
        with torch.no_grad():
            features = backbone.encode_image(batch.images)
            pixels = backbone.normalise(batch.images)
        cached = replace(batch, images=features, cached_features=True)
        steps = {
            "padded": lambda b=batch, r=rows: apply(
                lambda: padded_backward(backbone, method, b, r, precision), optimizer
            ),
            "ours": lambda b=batch: apply(lambda: backward(backbone, method, b, accelerator, precision), optimizer),
            "kept": lambda b=batch: apply(
                lambda: backward(backbone, keeping, b, accelerator, precision, modules=teacher), optimizer
            ),
            "frozen": lambda b=cached: apply(
                lambda: backward(backbone, method, b, accelerator, precision), text_optimizer
            ),
            "peer": lambda p=pixels, r=rows: apply_peer(p, r),
        }
        for name in names:
            if repeat < 0:
                with FlopCounterMode(display=False) as counter:
                    steps[name]()
                flops[name] = counter.get_total_flops()
                continue
            memory.start()
            times[name].append(seconds(steps[name], device))
            peaks[name].append(memory.read())
        computed += len(batch.tokens.prefix_ids) + len(batch.tokens.ids)
        literal += rows.numel()

    medians = {name: statistics.median(values) for name, values in times.items()}
    peak = peak_flops(device)
    result = {
        "machine": machine(device),
        "torch": torch.__version__,
        "model": arguments.model,
        "window": backbone.context_length,
        "batch": arguments.batch,
        "precision": precision,
        "repeats": arguments.repeats,
        "seconds": {name: [round(value, 3) for value in values] for name, values in times.items()},
        "samples_per_second": {name: round(arguments.batch / value, 3) for name, value in medians.items()},
        "ratio_to_padded": {name: round(medians["padded"] / value, 3) for name, value in medians.items()},
        "step_gb": {name: round(max(values) / 1e9, 2) for name, values in peaks.items() if None not in values},
        "share_of_peak_flops": peak and {name: round(flops[name] / medians[name] / peak, 3) for name in names},
        "text_tokens_computed_share": round(computed / literal, 3),
    }
    RESULTS.mkdir(exist_ok=True)
    file = f"train_step-{arguments.model}-{device.type}-{precision}-batch{arguments.batch}.json"
    (RESULTS / file).write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{result['machine']}, {arguments.model}, batch {arguments.batch}, {precision}")
    for name in names:
        share = f", {100 * result['share_of_peak_flops'][name]:.0f}% of peak FLOP/s" if peak else ""
        print(
            f"  {name:<8}{result['samples_per_second'][name]:8.2f} samples/s, {result['ratio_to_padded'][name]:.2f}x "
            f"padded, a step takes {result['step_gb'].get(name, float('nan')):.2f} GB{share}"
        )
    print(f"  ours computes {100 * computed / literal:.0f}% of the padded text tokens")


if __name__ == "__main__":
    main()
