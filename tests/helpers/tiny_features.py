"""Feature networks of the real classes with random weights."""

from pathlib import Path

import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import ViTConfig, ViTModel

PHOTOGRAPHS = Path(__file__).parents[1] / "photographs" / "captions.json"


class UntrainedInception(FeatureExtractorInceptionV3):
    """torch-fidelity's Inception as its constructor leaves it before it loads a file."""

    def load_state_dict(self, state_dict):
        pass


def save_inception(folder):
    """A weights file with torch-fidelity's names and shapes, and random values that keep features of everyday size."""
    torch.save({}, folder / "random.pth")
    torch.manual_seed(0)
    network = UntrainedInception("inception", ["2048"], folder / "random.pth")
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    torch.save(network.state_dict(), folder / "random.pth")
    return folder / "random.pth"


def save_dino(folder):
    """A folder with a vision transformer of DINO's class, of 32 pixels and 24 features."""
    torch.manual_seed(0)
    size = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    config = ViTConfig(**size, image_size=32, patch_size=8, initializer_range=0.2)
    ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    return str(folder)
