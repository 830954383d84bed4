"""Which models are in memory at once."""

import weakref

from debias_diffusion.pipelines.rendering import renderer as rendering


class Watched:
    """Whether a generator and a network that scores are ever in memory together.

    Attributes:
        generators, networks: how many were loaded.
    """

    def __init__(self, monkeypatch, network: type):
        self.generators = self.networks = 0
        self._generator = self._network = lambda: None  # the last of each
        load, init = rendering.load_pipeline, network.__init__

        def load_watched(*arguments):
            assert self._network() is None, "a network is still in memory"
            pipe = load(*arguments)
            self.generators, self._generator = self.generators + 1, weakref.ref(pipe.unet)
            return pipe

        def init_watched(built, *arguments, **options):
            assert self._generator() is None, "a generator is still in memory"
            init(built, *arguments, **options)
            self.networks, self._network = self.networks + 1, weakref.ref(built.model)

        monkeypatch.setattr(rendering, "load_pipeline", load_watched)
        monkeypatch.setattr(network, "__init__", init_watched)
