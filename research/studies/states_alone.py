"""The state term of `debias-clip-sdxl` without its contrast: a recipe to compare with, `states-alone`."""

from collections.abc import Sequence
from dataclasses import dataclass

from debias_diffusion.methods import KeepStates, Term
from debias_diffusion.methods.dual_caption import DualCaption


@dataclass(frozen=True)
class StatesAlone(DualCaption):
    """Only the hidden states are trained: nothing compares a caption with its image."""

    @property
    def terms(self) -> Sequence[Term]:
        return [KeepStates(self.keep_states)]


STATES_ALONE = StatesAlone(sampling="random", padding="random", short_weight=0.1, keep_states=3.0)
