"""Short prompts as in diffusers and long ones read, in every class; some of the rest, which is in tests/slow."""

import diffusers
import pytest
from helpers.matrix import PART, REFUSED, check

from debias_diffusion.pipelines import with_long_prompts

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(("name", "feature"), PART)
def test_cell(name, feature):
    check(name, feature)


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_encodes_otherwise_is_refused_with_what_works_instead(name):
    cls = getattr(diffusers, name)
    instead = "" if name in ("FluxPipeline", "StableDiffusion3Pipeline") else ".* It can be given .*prompt_embed"
    with pytest.raises(ValueError, match=f"{name} does not encode prompts{instead}"):
        with_long_prompts(cls.__new__(cls))
