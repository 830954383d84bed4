"""One training step, ours against a padded one, at ShareGPT4V-like lengths.

    python benchmarks/train_step.py [--model ViT-B-16] [--batch 8] [--compile] [--peer FOLDER] [--fix-clip]

(a) padded    open_clip's own forward passes on rows padded to the window, long and short captions one after the other,
              and an SVD for the components
(b) ours      captions up to their EOT, the shared beginning once
    compiled  the same compiled, with --compile
(c) kept      ours with --keep-states, of every fourth sample, the share that training draws
(d) frozen    ours with a frozen image tower whose features are at hand
(e) peer      Long-CLIP's released model and losses, where FOLDER is a checkout of github.com/beichenzbc/Long-CLIP; it
              has QuickGELU, so take a model with it (ViT-B-16-quickgelu)

With --fix-clip, the parts of Fix-CLIP instead, each against long-clip's step: masks, with masked views and short
positions (Table 4, row 1); four regional prompts and the last three of six groups of blocks; all of fix-clip, with
masked patches replaced and discarded (Table 5).

Same weights, samples, dtype and optimizer; (a) to (d) use PyTorch's scaled_dot_product_attention, (e) what it uses.
On a GPU each turn is five steps in a row, as `train` makes them: a batch lies in pinned memory, and the host waits for
a step when it has given the next; idle is the share of a step in which no kernel runs. Memory is what a step takes
beside weights and AdamW's averages. They take turns, so that what else the machine does falls on all. Prints a
table and writes it to benchmarks/results/.
"""

import argparse
import importlib.util
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from harness import PeakMemory, by_turns, publish, read_options
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.packing import arranged
from debias_diffusion.devices import autocast, seconds
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.eval.report import Table
from debias_diffusion.methods import Batch, find_method
from debias_diffusion.methods.dual_caption import DualCaption
from debias_diffusion.methods.keep_states import SHARE
from debias_diffusion.methods.objectives import contrastive_loss
from debias_diffusion.text.chunks import Cut
from debias_diffusion.training.optimizer import AdamW, Optimizer
from debias_diffusion.training.progress import Moment
from debias_diffusion.training.step import backward

# ShareGPT4V's captions: 173 tokens and 9 sentences on average.
SENTENCES, SENTENCE_TOKENS = (6, 12), (12, 26)
IN_A_ROW = 5  # steps of a turn on a GPU
# Dense FLOP/s in half precision, from the makers' data sheets.
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s that the device can do in half precision; None where that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def random_sentences(rng: random.Random, words: int) -> list[list[int]]:
    """Token ids below `words`, by sentence."""
    return [
        [rng.randrange(1, words) for _ in range(rng.randint(*SENTENCE_TOKENS))] for _ in range(rng.randint(*SENTENCES))
    ]


def random_images(backbone: Backbone, size: int, seed: int) -> torch.Tensor:
    shape, generator = (size, 3, *backbone.model.visual.image_size), torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def as_batch(images: torch.Tensor, tokens, views: dict[str, torch.Tensor]) -> Batch:
    return Batch(list(map(str, range(len(images)))), images, tokens, [], views)


def make_batch(backbone: Backbone, size: int, seed: int) -> Batch:
    """Random images and token ids, with captions sampled and padded as DeBias-CLIP's recipe does.

    Of every fourth sample, the long caption's states are compared where a method keeps states.
    """
    rng, tokenizer, long_ids, short_ids = random.Random(seed), backbone.tokenizer, [], []
    compared = torch.full((size, 2, tokenizer.context_length - 2), -1)
    for sample in range(size):
        sentences = random_sentences(rng, tokenizer.markers.sot)
        sampled = rng.sample(sentences[1:], rng.randint(1, len(sentences) - 1))
        for ids, parts in ((long_ids, sentences), (short_ids, sampled)):
            ids.append([*chain(*parts)][: tokenizer.context_length - 2])
        if sample % round(1 / SHARE) == 0:
            cuts = [cut for part in sentences for cut in [Cut.TOKEN] * (len(part) - 1) + [Cut.SENTENCE]]
            ids = long_ids[-1]
            compared[sample, :, : len(ids)] = torch.tensor([ids, cuts[: len(ids)]])
    n_pre = [0] * size + [rng.randint(0, tokenizer.n_post(ids)) for ids in short_ids]
    tokens = tokenizer.batch(long_ids + short_ids, n_pre)
    return as_batch(random_images(backbone, size, seed), tokens, {"state_tokens": compared})


def as_loaded(batch: Batch, backbone: Backbone, device: torch.device, precision: str) -> Batch:
    """As training's workers and loader leave it to a step."""
    on_gpu = device.type == "cuda"
    if backbone.family.causal:
        batch = replace(batch, tokens=arranged(batch.tokens, is_ragged=on_gpu and precision != "fp32"))
    return batch.pin_memory() if on_gpu else batch


def padded_backward(backbone: Backbone, method: DualCaption, batch: Batch, rows: torch.Tensor, precision: str) -> dict:
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
    loss = w * short + (1 - w) * long
    loss.backward()
    return {"loss": loss.detach(), "gradient_norm": loss.detach()}  # the paper's step needs no norm


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


# ---- Fix-CLIP

FIX_CLIP = {
    "long-clip": ("long-clip", {}),
    "masks": ("fix-clip", {"groups": 0, "prompts": 0}),
    "prompts+hierarchy": ("long-clip", {"groups": 6, "prompts": 4}),
    "all": ("fix-clip", {}),
    "all, discarded": ("fix-clip", {"masked_patches": "discard"}),
}


class FixClipSteps:
    """The model, method and optimizer of one row."""

    def __init__(self, row: str, options: argparse.Namespace, accelerator: Accelerator):
        torch.manual_seed(0)
        recipe, changes = FIX_CLIP[row]
        method = find_method(recipe)
        method = replace(method, **{"components": min(method.components, max(0, options.batch - 2))} | changes)
        self.accelerator, self.precision = accelerator, options.precision
        self.backbone = load_backbone(options.model)
        self.backbone.stretch()
        self.method = method.prepare(self.backbone)
        self.backbone.to(accelerator.device).train()
        modules = self.method.modules(self.backbone)
        self.modules = torch.nn.ModuleDict(modules).to(accelerator.device) if modules else None
        named = dict(self.backbone.model.named_parameters())
        if self.modules is not None:
            named |= {f"method/{name}": parameter for name, parameter in self.modules.named_parameters()}
        self.optimizer = AdamW(named, weight_decay=1e-2, betas=(0.9, 0.999), eps=1e-8)

    def batch(self, size: int, seed: int) -> Batch:
        """Random images and token ids; the short caption is the first sentence."""
        rng, tokenizer, method = random.Random(seed), self.backbone.tokenizer, self.method
        sentences = [random_sentences(rng, tokenizer.markers.sot) for _ in range(size)]
        long_ids = [[*chain(*parts)][: tokenizer.context_length - 2] for parts in sentences]
        images = random_images(self.backbone, size, seed)
        views = [method.views(images[at], "", tokenizer, seed, 0, str(at)) for at in range(size)]
        views = {name: torch.stack([view[name] for view in views]) for name in views[0]}
        is_short = [False] * size + [method.has_own_positions] * size
        tokens = tokenizer.batch(long_ids + [parts[0] for parts in sentences], is_short=is_short)
        return as_loaded(as_batch(images, tokens, views), self.backbone, self.accelerator.device, self.precision)

    def step(self, batch: Batch) -> Moment:
        report = backward(self.backbone, self.method, batch, self.accelerator, self.precision, modules=self.modules)
        return update(self.optimizer, report)


def update(optimizer: AdamW, report: dict[str, torch.Tensor]) -> Moment:
    """Applies the gradients. Returns when that is done and the numbers are on the host, as in a run."""
    numbers = torch.stack([optimizer.step(1e-6, report), *report.values()])
    numbers.to("cpu", non_blocking=numbers.is_cuda)
    return Moment(numbers.device)


def in_a_row(step: Callable[[], Moment], count: int) -> None:
    """The step so many times, each given before the host waits for the one before it."""
    made = step()
    for _ in range(count - 1):
        before, made = made, step()
        before.wait()


def by_turns_with_memory(steps_of: Callable[[int], dict], repeats: int, device: torch.device) -> tuple[dict, dict]:
    """(seconds, bytes beside what is there before) of each step in each round; None where memory cannot be read."""
    memory, count = PeakMemory(device), IN_A_ROW if device.type == "cuda" else 1

    def measure(step: Callable[[], Moment]) -> tuple[float, int | None]:
        memory.start()
        return seconds(partial(in_a_row, step, count), device) / count, memory.read()

    measured = by_turns(steps_of, repeats, measure)
    times, peaks = ({name: [pair[at] for pair in pairs] for name, pairs in measured.items()} for at in (0, 1))
    return times, peaks


def busy_seconds(step: Callable[[], Moment]) -> float:
    """What a GPU's kernels take of one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        in_a_row(step, IN_A_ROW)
        torch.cuda.synchronize()
    return sum(kernel.self_device_time_total for kernel in profiled.key_averages()) / 1e6 / IN_A_ROW


def publish_steps(
    options: argparse.Namespace, title: str, times: dict, peaks: dict, baseline: str, shares: dict, **further
) -> None:
    """Writes what all steps took: times, bytes, shares by what they are of, and further numbers of the run."""
    device = Accelerator().device
    medians = {name: statistics.median(values) for name, values in times.items()}
    columns = {
        "samples_per_second": {name: round(options.batch / value, 3) for name, value in medians.items()},
        f"seconds_to_{baseline}": {name: round(value / medians[baseline], 3) for name, value in medians.items()},
        "step_gb": {name: round(max(values) / 1e9, 2) for name, values in peaks.items() if None not in values},
    } | shares
    settings = {name: getattr(options, name) for name in ("model", "batch", "precision", "repeats")}
    rounded = {name: [round(value, 3) for value in values] for name, values in times.items()}
    table = Table(["step", *columns], [[name, *(column.get(name) for column in columns.values())] for name in times])
    name = f"{title}-{options.model}-{device.type}-{options.precision}-batch{options.batch}"
    publish(name, settings | {"seconds": rounded} | columns | further, table, device=device)


def fix_clip_steps(options: argparse.Namespace) -> None:
    accelerator = Accelerator()
    rows = {row: FixClipSteps(row, options, accelerator) for row in FIX_CLIP}

    def steps_of(number: int) -> dict[str, Callable]:
        return {row: partial(steps.step, steps.batch(options.batch, seed=number)) for row, steps in rows.items()}

    times, peaks = by_turns_with_memory(steps_of, options.repeats, accelerator.device)
    publish_steps(options, "train_step-fix-clip", times, peaks, "long-clip", {})


def main() -> None:
    options = read_options(
        __doc__,
        model="ViT-B-16",
        batch=8,
        repeats=3,
        precision=("fp32", "bf16"),
        compile=False,
        peer=None,
        fix_clip=False,
    )
    if options.fix_clip:
        fix_clip_steps(options)
        return

    accelerator = Accelerator()
    device, precision = accelerator.device, options.precision
    torch.manual_seed(0)
    backbone = load_backbone(options.model)
    backbone.stretch()
    backbone.to(device).train()
    method = find_method("debias-clip")
    method = replace(method, components=min(method.components, options.batch - 2))
    keeping = replace(method, keep_states=1.0)
    teacher = torch.nn.ModuleDict(keeping.modules(backbone)).to(device)
    settings = dict(weight_decay=1e-2, betas=(0.9, 0.999), eps=1e-8)
    optimizer = Optimizer(backbone, **settings)
    backbone.model.visual.requires_grad_(False)
    text_optimizer = Optimizer(backbone, **settings)
    peer = load_peer(Path(options.peer), backbone) if options.peer else None
    peer_optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-6, weight_decay=1e-2) if peer else None

    if options.compile:
        backbone.compile()

    def step(
        step_optimizer: Optimizer, compute_gradients: Callable, *given, stance="force_eager", **settings
    ) -> Moment:
        backbone.model.visual.requires_grad_(step_optimizer is optimizer)
        with torch.compiler.set_stance(stance):
            return update(step_optimizer, compute_gradients(*given, **settings))

    def peer_step(images: torch.Tensor, rows: torch.Tensor) -> Moment:
        peer_backward(peer, images, rows, precision)
        peer_optimizer.step()
        peer_optimizer.zero_grad()
        return Moment(device)

    computed, padded = [], []

    def steps_of(number: int) -> dict[str, Callable]:
        on_host = make_batch(backbone, options.batch, seed=number)
        batch, loaded = on_host.to(device), as_loaded(on_host, backbone, device, precision)
        rows = batch.tokens.padded()
        computed.append(len(batch.tokens.prefix_ids) + len(batch.tokens.ids))
        padded.append(rows.numel())
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            features = backbone.encode_image(batch.images).cpu()
            pixels = backbone.as_floats(batch.images)
        cached = as_loaded(replace(on_host, images=features, cached_features=True), backbone, device, precision)
        given = accelerator, precision
        steps = {
            "padded": partial(step, optimizer, padded_backward, backbone, method, batch, rows, precision),
            "ours": partial(step, optimizer, backward, backbone, method, loaded, *given),
            "kept": partial(step, optimizer, backward, backbone, keeping, loaded, *given, modules=teacher),
            "frozen": partial(step, text_optimizer, backward, backbone, method, cached, *given),
        }
        if options.compile:
            steps["compiled"] = partial(steps["ours"], stance="default")
        return steps | ({"peer": partial(peer_step, pixels, rows)} if peer else {})

    peak, flops = peak_flops(device), {}
    for name, one in steps_of(0).items() if peak else ():
        if name == "compiled":  # what is counted would be compiled for the count
            flops[name] = flops["ours"]
            continue
        with FlopCounterMode(display=False) as counter:
            one()
        flops[name] = counter.get_total_flops()
    times, peaks = by_turns_with_memory(steps_of, options.repeats, device)
    medians = {name: statistics.median(values) for name, values in times.items()}
    busy = {name: busy_seconds(step) for name, step in steps_of(0).items()} if device.type == "cuda" else {}
    shares = {
        "share_of_peak_flops": {name: round(count / medians[name] / peak, 3) for name, count in flops.items()},
        "share_idle": {name: round(1 - value / medians[name], 3) for name, value in busy.items()},
    }
    share = round(sum(computed) / sum(padded), 3)
    further = {"window": backbone.context_length, "text_tokens_computed_share": share}
    publish_steps(options, "train_step", times, peaks, "padded", shares, **further)


if __name__ == "__main__":
    main()
