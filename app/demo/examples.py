"""Example prompts of the page."""

from .models import DemoModels

# Each has details near its end, which an encoder that cuts the prompt misses.
_PROMPTS = {
    "Harbour": (
        "A small harbour town at first light, seen from a wooden pier. Fishing boats with peeling blue and white "
        "paint rock gently in calm water the colour of pewter. On the left a stack of wicker lobster pots leans "
        "against a stone wall that is green with moss. An elderly woman in a mustard yellow raincoat mends a net, "
        "her silver hair tied back with a red ribbon. Behind her a ginger cat sits on an upturned crate and "
        "watches a gull. Terraced houses climb the hill in rows of pink, cream and pale green. In the far distance"
        " a white lighthouse with a single black stripe stands on a rocky headland. A thin band of orange glows "
        "along the horizon beneath heavy violet clouds. In the lower right corner a brass bell hangs from a post, "
        "and a child's red boot lies beside it."
    ),
    "Workshop": (
        "A watchmaker's workshop filled with warm lamplight. At the centre stands a heavy oak bench, scarred by "
        "decades of use and covered with tiny brass gears. A magnifying lamp on a jointed arm throws a bright "
        "circle on an open pocket watch. To the left, glass jars hold screws sorted by size, each with a "
        "handwritten paper label. On the wall behind hang eleven clocks, no two alike, and one of them is shaped "
        "like an owl. A tortoiseshell cat sleeps on a folded green blanket under the bench. Through the window on "
        "the right, snow falls on a narrow cobbled street with a blue bicycle. A half-eaten apple and a chipped "
        "white cup of tea stand near the edge of the bench. On the floor in front, a single gear has rolled away "
        "and casts a long shadow."
    ),
}
# The encoders differ on the last one as on average: benchmarks/demo_prompt.py.
_SCENES = {"Two rings": 3, "Six on black": 5, "Circles and a star": 14}


def examples(models: DemoModels) -> dict[str, str | int]:
    """Prompts by name; for the toy world, numbers of its scenes, because its models generate nothing else."""
    if models.is_toy:
        return dict(_SCENES)
    return dict(_PROMPTS)
