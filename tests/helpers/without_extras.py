"""Runs the code on its standard input where no optional library can be imported, as after a plain `pip install`."""

import sys

from debias_diffusion.errors import EXTRAS


class Hiding:
    """A finder of modules that does not see the optional libraries."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in EXTRAS else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
exec(compile(sys.stdin.read(), "<without extras>", "exec"))
