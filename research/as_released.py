"""`debias_vitb_3e.pt` as the loader of DeBias-CLIP's authors reads it: their published scores are of such weights.

Of the file's two tables of positions the loader puts the first in the place of the second (commit 18a06c9; the audit in
reyuyu/SAID). Training did not move the first; the trained positions lie in the second.
"""

from dataclasses import dataclass
from pathlib import Path

from debias_diffusion.errors import UserError
from debias_diffusion.limits import Checked


@dataclass
class AsReleasedConfig(Checked):
    """Rewrite the file of DeBias-CLIP's authors with the positions that their loader reads.

    Attributes:
        file: debias_vitb_3e.pt.
        output: File to write, ending in .safetensors.
    """

    file: str
    output: str


def rewrite(config: AsReleasedConfig) -> Path:
    """Writes the file. Raises UserError for a file without two tables of positions."""
    from debias_diffusion.clip.weight_files import read_state, save_tensors  # takes seconds

    state, output = read_state(Path(config.file)), Path(config.output)
    first, second = "text.positional_embedding", "text.positional_embedding_res"
    if second not in state:
        raise UserError(f"{config.file!r} holds no {second}. Give debias_vitb_3e.pt, of DeBias-CLIP's authors.")
    output.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(state | {second: state[first].clone()}, output)
    print(f"Written to {output}. Evaluate it as ViT-B-16-quickgelu:{output}.")
    return output
