"""What torch.compile makes of tiny towers."""

import os
import shutil

import pytest
import torch
from helpers.same_steps import TINY, assert_same_steps

BACKEND = "inductor" if shutil.which("c++") else "aot_eager"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", TINY)
def test_compiled_towers_give_the_same(family, checkpointing):
    assert BACKEND == "inductor" or "CI" not in os.environ, "no C++ compiler: what torch.compile builds goes UNTESTED"
    plain, other = TINY[family](), TINY[family]()
    if checkpointing:
        other.checkpoint_activations()
    torch.compiler.reset()
    other.compile(backend="aot_eager" if checkpointing else BACKEND)
    graphs = torch._dynamo.utils.counters["stats"]
    assert_same_steps(plain, other, [2], rtol=1e-4, atol=1e-4)
    assert (before := graphs["unique_graphs"]) > 0
    assert_same_steps(plain, other, [3, 5, 9], rtol=1e-4, atol=1e-4)
    assert graphs["unique_graphs"] == before  # no length is compiled anew
