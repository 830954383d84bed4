"""What retrieval costs: the similarities of a large benchmark in memory, and the images of a small one in time.

    python benchmarks/retrieval.py [--images 20000] [--captions 50000] [--read 48] [--model ViT-B-16]

Similarities: recall of random features of that many images and captions, 512 numbers each; by how much the memory of
the process grows beside the features, and what the whole matrix would take. The cap is 256 MB;
the allocator's holes, which differ by the run, count.
Images: `--read` JPEG files of 640 x 480 noise, encoded one at a time, as Long-CLIP's scripts do, and in batches while
threads read the next, by an untrained model of that name. Prints both and writes them to benchmarks/results/.
"""

import tempfile
from pathlib import Path

import torch
from harness import CPU, by_turns, publish, read_options
from machine import PeakMemory, machine, seconds
from PIL import Image, ImageFilter

from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.records import Record
from debias_diffusion.devices import pick_device
from debias_diffusion.eval.report import Table
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.retrieval import encode_images, recall_at_k

CAP_MB = 256
DIMENSION = 512


def similarities(images: int, captions: int) -> dict:
    """Seconds and megabytes of the recall of random features."""
    generator = torch.Generator().manual_seed(0)
    image_features = torch.randn(images, DIMENSION, generator=generator)
    text_features = torch.randn(captions, DIMENSION, generator=generator)
    owners = torch.arange(captions) % images
    recall_at_k(image_features[:2048], text_features[:2048])  # what PyTorch keeps for itself is there from here on
    memory = PeakMemory(CPU)
    memory.start()
    taken = seconds(lambda: recall_at_k(image_features, text_features, image_of=owners), CPU)
    peak = memory.read()
    return {
        "images": images,
        "captions": captions,
        "seconds": round(taken, 1),
        "memory_mb": None if peak is None else round(peak / 1e6, 1),
        "features_mb": round((image_features.nbytes + text_features.nbytes) / 1e6, 1),
        "whole_matrix_float32_mb": round(4 * images * captions / 1e6, 1),
    }


def write_pictures(folder: Path, count: int) -> list[Record]:
    for index in range(count):
        noise = Image.effect_noise((640, 480), 60 + index % 7).convert("RGB").filter(ImageFilter.GaussianBlur(2))
        noise.save(folder / f"{index}.jpg", quality=90)
    return [Record(str(index), f"{index}.jpg", "") for index in range(count)]


@torch.inference_mode()
def one_by_one(backbone, records: list[Record], images: ImageFolder, device: torch.device) -> torch.Tensor:
    """Open, preprocess, encode, one image after the other."""
    features = []
    for record in records:
        image = backbone.preprocess(images.open(record.image))[None].to(device)
        features.append(backbone.encode_image(image).float().cpu())
    return torch.cat(features)


def loops(model: str, count: int) -> dict:
    """Images a second of both loops, in turns, the best of three each."""
    device = pick_device(None)
    backbone = load_backbone(model).to(device).eval()
    with tempfile.TemporaryDirectory() as folder:
        records, images = write_pictures(Path(folder), count), ImageFolder(folder)
        runs = {
            "one_by_one": lambda: one_by_one(backbone, records, images, device),
            "batched": lambda: encode_images(backbone, records, images, 64, device, progress=False)[0],
        }
        torch.testing.assert_close(runs["one_by_one"](), runs["batched"](), atol=1e-3, rtol=1e-3)
        taken = by_turns(runs, 3, lambda run: seconds(run, device))
    best = {name: min(times) for name, times in taken.items()}
    return {
        "model": model,
        "device": machine(device),
        "images": count,
        **{f"{name}_per_second": round(count / time, 2) for name, time in best.items()},
        "ratio": round(best["one_by_one"] / best["batched"], 2),
    }


def main() -> None:
    arguments = read_options(__doc__, images=20000, captions=50000, read=48, model="ViT-B-16")
    result = {"similarities": similarities(arguments.images, arguments.captions)}
    result["loops"] = loops(arguments.model, arguments.read)
    tables = [Table([title, ""], list(numbers.items())) for title, numbers in result.items()]
    publish(f"retrieval-{pick_device(None).type}", result, *tables)
    memory = result["similarities"]["memory_mb"]
    if memory is not None and memory > CAP_MB:
        raise SystemExit(f"{memory} MB are above the cap of {CAP_MB} MB.")


if __name__ == "__main__":
    main()
