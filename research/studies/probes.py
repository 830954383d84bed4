"""Do the toy encoders know which colour belongs to which object, and what "it" is?

    python -m research.studies.probes [--models toy/clip] [--bases toy/sdxl] [--steps 1500]

Of pooled features (--models): scenes of two objects, of which something is exchanged or changed in the caption; how
often the image is nearer to its own caption. A guess has 50%.

Of the hidden states that a UNet reads (--bases, SDXL checkpoints: the first encoder, the second, and both): a network
of two layers with one query for each place learns to say what stands there, from captions of one to three objects. In
percent of the places with an object, kind and colour right, for objects described in one sentence and for those
described by reference; and of the empty places, how many are said to be filled. Captions are truncated at 77 tokens;
objects whose sentences lie beyond do not count.

Prints tables and writes them to research/results/ as binding. A probe takes two minutes on two cores.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
import transformers
from diffusers import StableDiffusionXLPipeline
from diffusers.utils import logging
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.eval.report import Table
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.grammar import full_caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import COLOURS, KINDS, PLACES, Scene, Thing, draw_scene, generator
from debias_diffusion.toyworld.shipped import shipped
from research.toymodels.clip import encode

from ..referring.grammar import STYLES
from ..referring.mentions import sentences_by_chunk, sentences_needed
from .harness import publish, read_options

SPLIT = "development-binding"
WIDTH, HEADS, BATCH = 128, 4, 128
LEARNED_FROM, ASKED = 6000, 1000  # captions
NOBODY = 0  # the class of an empty place


# ---- pooled features


def exchange(name: str) -> Callable[[Thing, Thing, random.Random], tuple[Thing, Thing]]:
    return lambda a, b, rng: (replace(a, **{name: getattr(b, name)}), replace(b, **{name: getattr(a, name)}))


def change(name: str, values: Sequence[str]) -> Callable[[Thing, Thing, random.Random], tuple[Thing, Thing]]:
    def changed(a: Thing, b: Thing, rng: random.Random) -> tuple[Thing, Thing]:
        free = [value for value in values if value not in (getattr(a, name), getattr(b, name))]
        return replace(a, **{name: rng.choice(free)}), b

    return changed


EDITS = {f"{name} exchanged": exchange(name) for name in ("colour", "kind", "place")}
EDITS |= {"another place": change("place", list(PLACES)), "another colour": change("colour", list(COLOURS))}


def nearer(model: str, scenes: int) -> dict[str, float]:
    """By edit, the percentage of images that are nearer to their own caption than to the edited one."""
    backbone, shares = load_two_tower(model), {}
    for name, edit in EDITS.items():
        images, captions, edited = [], [], []
        for index in range(scenes):
            rng = generator(SPLIT, index, name)
            scene = two_objects(rng)
            other = Scene(scene.background, edit(*scene.things, rng))
            seed = rng.random()  # the same wording in both
            images.append(render(scene))
            captions.append(full_caption(scene, random.Random(seed)).text)
            edited.append(full_caption(other, random.Random(seed)).text)
        image, text = encode(backbone, images, captions + edited)
        right, wrong = F.cosine_similarity(image, text[:scenes]), F.cosine_similarity(image, text[scenes:])
        shares[name] = 100 * (right > wrong).float().mean().item()
    return shares


def two_objects(rng: random.Random) -> Scene:
    """Two objects that differ in kind and colour."""
    while True:
        scene = draw_scene(rng, 2, 2)
        if all(len({getattr(thing, name) for thing in scene.things}) == 2 for name in ("kind", "colour")):
            return scene


# ---- hidden states


class Probe(nn.Module):
    """Queries of nine places attend to hidden states twice, as a UNet's places do -> kinds and colours there."""

    def __init__(self, channels: int):
        super().__init__()
        self.inwards = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, WIDTH))
        self.places = nn.Parameter(torch.randn(len(PLACES), WIDTH) / 2)
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)
        self.kinds, self.colours = nn.Linear(WIDTH, len(KINDS) + 1), nn.Linear(WIDTH, len(COLOURS) + 1)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        there = self.layers(self.places.expand(len(hidden_states), -1, -1), self.inwards(hidden_states))
        return self.kinds(there), self.colours(there)


@torch.no_grad()
def hidden_states(base: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Of captions of both styles.

    Returns:
        by encoder, what the UNet reads, [N, 77, channels] in bfloat16; the answers [N, 9, 2], kind and colour; and
        whether each object is described by reference, [N, 9].
    """
    pipe, texts = StableDiffusionXLPipeline.from_pretrained(shipped(base)), []
    answers = torch.full((LEARNED_FROM + ASKED, len(PLACES), 2), NOBODY)
    by_reference = torch.zeros(answers.shape[:2], dtype=torch.bool)
    styles = [*STYLES.values()]
    for index in range(len(answers)):
        rng = generator(SPLIT, index, "probe")
        scene = draw_scene(rng, 1, 3)
        caption = full_caption(scene, rng, styles[index % len(styles)])
        read = set(sentences_by_chunk(caption, lambda text: len(pipe.tokenizer(text).input_ids) - 2, "cut")[0])
        needed = sentences_needed(caption)
        for thing in scene.things:
            if needed[thing.place] <= read:
                place = list(PLACES).index(thing.place)
                kind_and_colour = [1 + KINDS.index(thing.kind), 1 + list(COLOURS).index(thing.colour)]
                answers[index, place] = torch.tensor(kind_and_colour)
                by_reference[index, place] = len(needed[thing.place]) > 1
        texts.append(clean(caption.text))
    batches = tqdm(range(0, len(texts), 250), desc="encoding")
    encoded = (pipe.encode_prompt(texts[at : at + 250], do_classifier_free_guidance=False)[0] for at in batches)
    both, first = torch.cat([states.bfloat16() for states in encoded]), pipe.text_encoder.config.hidden_size
    return {"first": both[..., :first], "second": both[..., first:], "both": both}, answers, by_reference


def probe(states: Tensor, answers: Tensor, by_reference: Tensor, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    network, rng = Probe(states.shape[-1]), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps, pct_start=0.1)
    with sdpa_kernel(SDPBackend.MATH):
        for _ in tqdm(range(steps), desc="probing"):
            chosen = torch.randint(LEARNED_FROM, (BATCH,), generator=rng)
            with torch.autocast("cpu", torch.bfloat16):
                kinds, colours = network(states[chosen].float())
            pairs = zip((kinds, colours), answers[chosen].unbind(-1), strict=True)
            sum(F.cross_entropy(logits.float().flatten(0, 1), asked.flatten()) for logits, asked in pairs).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with torch.no_grad():
            kinds, colours = (logits.argmax(-1) for logits in network.eval()(states[LEARNED_FROM:].float()))
    asked, by_reference = answers[LEARNED_FROM:], by_reference[LEARNED_FROM:]
    there, right = asked[..., 0] != NOBODY, (kinds == asked[..., 0]) & (colours == asked[..., 1])
    groups = {"told alone": right[there & ~by_reference], "by reference": right[by_reference]}
    groups["empty places filled"] = kinds[~there] != NOBODY
    return {name: 100 * values.float().mean().item() for name, values in groups.items()}


def main() -> None:
    arguments = read_options(__doc__, models=["toy/clip"], bases=["toy/sdxl"], scenes=400, steps=1500)
    for library in (logging, transformers.logging):  # that captions are cut at 77 tokens is meant here
        library.set_verbosity_error()
    pooled, probed = {model: nearer(model, arguments.scenes) for model in arguments.models}, {}
    for base in arguments.bases:
        states, *answers = hidden_states(base)
        for encoder, of_encoder in states.items():
            probed[f"{base}, {encoder}"] = probe(of_encoder, *answers, arguments.steps)
    titles = ["kind and colour right, %", "described alone", "by reference", "empty places filled"]
    tables = [
        Table(["nearer to its own caption, %", *EDITS], [[model, *row.values()] for model, row in pooled.items()]),
        Table(titles, [[name, *row.values()] for name, row in probed.items()]),
    ]
    publish("binding", {"settings": vars(arguments), "nearer": pooled, "probed": probed}, *tables)


if __name__ == "__main__":
    main()
