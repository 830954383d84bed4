"""Options of `evaluate masked-retrieval`."""

from dataclasses import dataclass

from debias_diffusion.eval.options import RobustnessConfig


@dataclass
class MaskedRetrievalConfig(RobustnessConfig):
    """Retrieval recall where captions are compared with images under the captions' masks (SmartCLIP).

    Encoders without a mask network, which runs of smart-clip have, are compared as by `evaluate retrieval`. SmartCLIP's
    published scores are without masks. Give either `data` (with `images`), your own pairs, or a benchmark, `dataset`
    with `root`.
    """
