"""OneTrainer on captions that `debias-diffusion encode --to kohya` has read whole: LoRAs and fine-tuning of SDXL UNets.

OneTrainer cuts captions at 77 tokens before its text encoders read them. This program starts its training with another
data module in their place, which takes the embeddings from the files beside the images. All else is OneTrainer's, whose
folder and environment it runs in (commit 23df383, mgds 3a6994a):

    PYTHONPATH=.:scripts python .../examples/onetrainer_whole_captions.py --config-path training.json

Clear OneTrainer's cache when the files are made again: it keeps a copy, and does not compare. Text encoders are not
trained. Its own samples during training are still cut: draw with `with_long_prompts`.
"""

import os

import numpy as np
import torch
from mgds.PipelineModule import PipelineModule
from mgds.pipelineModules.EncodeClipText import EncodeClipText
from mgds.pipelineModuleTypes.RandomAccessPipelineModule import RandomAccessPipelineModule
from modules.dataLoader.BaseDataLoader import BaseDataLoader
from modules.dataLoader.StableDiffusionXLBaseDataLoader import StableDiffusionXLBaseDataLoader
from modules.util import factory
from modules.util.enum.ModelType import ModelType
from modules.util.enum.TrainingMethod import TrainingMethod

# OneTrainer's names of what the files hold: [positions, 768], [positions, 1280] and [1280].
NAMES = {
    "text_encoder_1_hidden_state": "hidden_state1",
    "text_encoder_2_hidden_state": "hidden_state2",
    "text_encoder_2_pooled_state": "pool2",
}


class WholeCaptions(PipelineModule, RandomAccessPipelineModule):
    """Gives each image the embeddings in NAME_te_outputs.npz beside it."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def length(self) -> int:
        return self._get_previous_length("image_path")

    def get_inputs(self) -> list[str]:
        return ["image_path"]

    def get_outputs(self) -> list[str]:
        return [*NAMES]

    def get_item(self, variation: int, index: int, requested_name: str | None = None) -> dict[str, torch.Tensor]:
        image = self._get_previous_item(variation, "image_path", index)
        with np.load(os.path.splitext(image)[0] + "_te_outputs.npz") as file:
            states = {name: torch.from_numpy(file[key]) for name, key in NAMES.items()}
        return {name: state.to(self.pipeline.device, self.dtype) for name, state in states.items()}


# Before the loader of all methods, `create_data_loader` looks for one of the training method.
@factory.register(BaseDataLoader, ModelType.STABLE_DIFFUSION_XL_10_BASE, TrainingMethod.LORA)
@factory.register(BaseDataLoader, ModelType.STABLE_DIFFUSION_XL_10_BASE, TrainingMethod.FINE_TUNE)
class WholeCaptionsDataLoader(StableDiffusionXLBaseDataLoader):
    def _preparation_modules(self, config, model):
        if config.train_text_encoder_or_embedding() or config.train_text_encoder_2_or_embedding():
            raise SystemExit("Stored embeddings cannot train text encoders or embeddings: turn their training off.")
        modules = super()._preparation_modules(config, model)
        kept = [module for module in modules if not isinstance(module, EncodeClipText)]
        return [*kept, WholeCaptions(model.train_dtype.torch_dtype())]


if __name__ == "__main__":
    import train  # of OneTrainer's scripts/

    train.main()
