import pytest

from debias_diffusion.eval.registry import EVALUATIONS
from debias_diffusion.eval.retrieval_sets import BENCHMARKS
from research import extensions


@pytest.fixture(autouse=True)
def extended():
    """What research adds to the package's registries is there in these tests alone."""
    before = [(registry, dict(registry)) for registry in (EVALUATIONS, BENCHMARKS)]
    extensions.register()
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)
    extensions.register.cache_clear()
