"""Import paths of earlier releases. They work for one more release, with a warning."""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_loader

MOVED = {
    "app.contact_sheet": "app.generate.contact_sheet",
    "app.demo.drawing": "app.demo.live_generation",
    "app.demo.examples": "app.demo.example_prompts",
    "app.demo.reading": "app.demo.analysis",
    "app.demo.requests": "app.demo.checks",
    "app.demo.scenes": "app.demo.toy_scenes",
    "app.demo.waiting": "app.demo.fair_queue",
    "app.generate.config": "app.generate.options",
    "app.drawing": "app.generate.rendering",
    "app.hub": "app.export.hub",
    "app.model_card": "app.export.model_card",
    "app.pictures": "app.generate.png_settings",
    "app.prompts": "app.generate.prompts",
    "backbones": "models.backbone",
    "captions": "methods.sampling",
    "drawing_limits": "limits",
    "eval.attention": "eval.text_image.attention",
    "eval.classification": "eval.text_image.classification",
    "eval.dpg_bench": "eval.pictures.dpg_bench",
    "eval.drawing": "eval.pictures.drawing",
    "eval.encoders": "eval.common.encoders",
    "eval.feature_networks": "eval.pictures.networks",
    "eval.generation": "eval.pictures.generation",
    "eval.generation_figures": "eval.pictures.figures",
    "eval.image_features": "eval.text_image.image_features",
    "eval.inputs": "eval.common.inputs",
    "eval.intervals": "eval.common.intervals",
    "eval.pages": "eval.common.pages",
    "eval.parts": "eval.common.cache",
    "eval.picture_scores": "eval.pictures.scores",
    "eval.processes": "eval.common.processes",
    "eval.report": "eval.common.report",
    "eval.retrieval": "eval.text_image.retrieval",
    "eval.robustness": "eval.text_image.robustness",
    "eval.toy_objects": "eval.pictures.toy_objects",
    "families": "models.families",
    "interchange.encoders": "interchange.text_encoders",
    "model_files": "models.model_files",
    "objectives": "methods.objectives",
    "pipelines.windows": "chunks",
    "positions": "models.positions",
    "recipes": "methods.dual_caption",
    "text_tower": "models.text_tower",
    "toyworld.build": "toymodels.build",
    "toyworld.clip": "toymodels.clip",
    "toyworld.features": "toymodels.feature_network",
    "toyworld.fine_tuned": "models.weight_difference",
    "toyworld.fine_tuning": "toymodels.fine_tuning",
    "toyworld.scores": "toymodels.scores",
    "toyworld.sdxl": "toymodels.sdxl",
    "toyworld.second_text_encoder": "toymodels.second_text_encoder",
    "toyworld.shipped": "models.shipped",
    "toyworld.stage": "toymodels.stage",
    "toyworld.unet": "toymodels.unet",
    "toyworld.vae": "toymodels.vae",
    "training.features": "training.feature_cache",
    "weights": "models.weights",
}


class _MovedModules(MetaPathFinder, Loader):
    """Finds a module of `MOVED` under its old name: the same module object, not a copy."""

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.partition(".")
        return spec_from_loader(name, self) if package == __package__ and module in MOVED else None

    def exec_module(self, module):
        old, new = module.__name__, _new_name(module.__name__)
        warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)

    def get_code(self, name):  # for `python -m`
        run = f"import runpy; runpy.run_module({_new_name(name)!r}, run_name='__main__', alter_sys=True)"
        return compile(run, name, "exec")


def _new_name(name: str) -> str:
    return f"{__package__}.{MOVED[name.partition('.')[2]]}"


def keep_old_names() -> None:
    """Makes the old import paths work."""
    sys.meta_path.append(_MovedModules())
