"""Which models are in memory at once."""

import weakref

from debias_diffusion.pipelines.rendering import renderer as rendering


class Watched:
    """Whether a generator and a network that scores are ever in memory together.

    Attributes:
        generators, networks: how many were loaded.
    """

    def __init__(self, monkeypatch, network: type):
        self._alive = {"generators": [], "networks": []}
        load, init = rendering.load_pipeline, network.__init__

        def load_watched(*arguments):
            self._check("networks")
            pipe = load(*arguments)
            self._alive["generators"].append(weakref.ref(pipe.unet))
            return pipe

        def init_watched(built, *arguments, **options):
            self._check("generators")
            init(built, *arguments, **options)
            self._alive["networks"].append(weakref.ref(built.model))

        monkeypatch.setattr(rendering, "load_pipeline", load_watched)
        monkeypatch.setattr(network, "__init__", init_watched)

    def _check(self, kind: str) -> None:
        assert not any(model() is not None for model in self._alive[kind]), f"{kind} are still in memory"

    @property
    def generators(self) -> int:
        return len(self._alive["generators"])

    @property
    def networks(self) -> int:
        return len(self._alive["networks"])
