"""One step shared by the processes that `torch.distributed.run` starts; each saves the gradients it ends with."""

import sys

from accelerate import Accelerator
from safetensors.torch import save_file
from test_step import gradients, step_setup

from debias_diffusion.training.step import backward

if __name__ == "__main__":
    recipe, folder = sys.argv[1:]
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    backbone, recipe, batch = step_setup(recipe, size=3, first=3 * accelerator.process_index)
    backward(backbone, recipe, batch, accelerator)
    save_file(gradients(backbone), f"{folder}/{accelerator.process_index}.safetensors")
    accelerator.end_training()
