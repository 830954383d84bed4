"""Steps shared by the processes that `torch.distributed.run` starts; each saves the gradients it ends with."""

import sys
from itertools import product

from accelerate import Accelerator
from helpers.steps import CASES, gradients, rich_setup, step_setup
from safetensors.torch import save_file

from debias_diffusion.training.step import backward

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    assert accelerator.num_processes == 2
    for case in CASES:
        for chunk in (None, 2):
            backbone, recipe, batch = step_setup(case, size=3, first=3 * rank)
            backward(backbone, recipe, batch, accelerator, chunk=chunk)
            save_file(gradients(backbone), f"{sys.argv[1]}/{case}-{chunk}-{rank}.safetensors")
    for name, chunk in product(("rich", "kept"), (None, 2)):
        backbone, method, batch, modules = rich_setup(kept=name == "kept", size=3, first=3 * rank)
        backward(backbone, method, batch, accelerator, chunk=chunk, modules=modules)
        save_file(gradients(backbone, modules), f"{sys.argv[1]}/{name}-{chunk}-{rank}.safetensors")
    accelerator.end_training()
