"""Renders scenes, large and then scaled down, so that edges are smooth."""

import math

from PIL import Image, ImageDraw

from .scenes import BACKGROUNDS, COLOURS, PLACES, SIZES, Scene, Thing

SIZE = 48  # pixels
_OVERSAMPLING = 4


def render(scene: Scene, size: int = SIZE) -> Image.Image:
    """The scene as an RGB image of `size` x `size` pixels."""
    large = size * _OVERSAMPLING
    image = Image.new("RGB", (large, large), BACKGROUNDS[scene.background])
    draw = ImageDraw.Draw(image)
    for thing in scene.things:
        _render_thing(draw, thing, large / 3, scene.background)
    return image.resize((size, size), Image.Resampling.BOX)


def _render_thing(draw: ImageDraw.ImageDraw, thing: Thing, third: float, background: str) -> None:
    column, row = PLACES[thing.place]
    x, y = (column + 0.5) * third, (row + 0.5) * third
    radius = SIZES[thing.size] * third / 2
    colour = COLOURS[thing.colour]
    if thing.kind == "circle":
        draw.ellipse(_box(x, y, radius), fill=colour)
    elif thing.kind == "ring":
        draw.ellipse(_box(x, y, radius), fill=colour)
        draw.ellipse(_box(x, y, 0.55 * radius), fill=BACKGROUNDS[background])
    elif thing.kind == "square":
        draw.rectangle(_box(x, y, 0.84 * radius), fill=colour)
    elif thing.kind == "cross":
        arm = 0.3 * radius
        draw.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
        draw.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
    elif thing.kind == "triangle":
        draw.polygon([(x, y - radius), (x + radius, y + 0.8 * radius), (x - radius, y + 0.8 * radius)], fill=colour)
    else:  # star
        corners = ((i * math.pi / 5, 0.42 * radius if i % 2 else radius) for i in range(10))
        points = [(x + r * math.sin(angle), y - r * math.cos(angle)) for angle, r in corners]
        draw.polygon(points, fill=colour)


def _box(x: float, y: float, radius: float) -> tuple[float, float, float, float]:
    return (x - radius, y - radius, x + radius, y + radius)
