"""What a step holds in memory as the batch grows: whole, and in chunks of 64.

    python benchmarks/memory.py [--most 4096] [--whole 512]

The toy CLIP on random uint8 images and captions of ShareGPT4V's lengths; by how much the memory of the process (or the
device) grows during forward and backward: activations and whatever else depends on the batch. Batches above
`--whole` are only made in chunks. Prints a table and writes it to benchmarks/results/.
"""

import ctypes

from accelerate import Accelerator
from harness import PeakMemory, publish, read_options
from train_step import make_batch

from debias_diffusion.devices import seconds
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.eval.report import Table
from debias_diffusion.methods import find_method
from debias_diffusion.training.step import backward

CHUNK = 64
_M_MMAP_THRESHOLD = -3


def main() -> None:
    arguments = read_options(__doc__, most=4096, whole=512)
    # Blocks from 64 kB on go back to the system when freed; else the holes between blocks of ever other sizes count.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    accelerator, recipe = Accelerator(), find_method("debias-clip")
    backbone = load_two_tower("toy/clip")
    backbone.stretch()
    backbone.to(accelerator.device).train()
    memory = PeakMemory(accelerator.device)
    sizes = [64 * 2**power for power in range(20) if 64 * 2**power <= arguments.most]
    rows = []
    backward(backbone, recipe, make_batch(backbone, 64, 0), accelerator)  # gradients exist from here on
    for size in sizes:
        batch = make_batch(backbone, size, 0)
        row = {"batch": size, "pixels_mb": round(batch.images.nbytes / 1e6, 1)}
        for name, chunk in (("whole", None), ("chunks", CHUNK)):
            if chunk is None and size > arguments.whole:
                continue
            memory.start()
            taken = seconds(
                lambda batch=batch, chunk=chunk: backward(backbone, recipe, batch, accelerator, chunk=chunk),
                accelerator.device,
            )
            row |= {f"{name}_mb": round(memory.read() / 1e6, 1), f"{name}_seconds": round(taken, 2)}
        rows.append(row)
    table = Table(list(rows[0]), [[row.get(name) for name in rows[0]] for row in rows])
    device = accelerator.device
    publish(f"memory-toy-{device.type}", {"chunk": CHUNK, "rows": rows}, table, device=device)


if __name__ == "__main__":
    main()
