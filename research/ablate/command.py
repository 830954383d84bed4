"""`python -m research ablate`: searches for heads whose suppression makes a CLIP retrieve better."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from debias_diffusion.ablation.heads import Ablation, tower_shape
from debias_diffusion.ablation.saved import FILE, MEANS_FILE, read_ablation
from debias_diffusion.app.model_card import shell_command
from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.image_tower import PROMPTS_AND_ATTENTION
from debias_diffusion.clip.weight_files import save_tensors
from debias_diffusion.data.bad_records import check_share, print_left_out
from debias_diffusion.data.retrieval import embed_texts, encode_images, images_digest
from debias_diffusion.data.seen import add_seen, read_seen, write_seen
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders.spec import EncoderSpec, Kind
from debias_diffusion.errors import UserError
from debias_diffusion.eval.caption_edits import edit_caption
from debias_diffusion.eval.report import Table, write_png
from debias_diffusion.eval.session import read_source
from debias_diffusion.files import atomic_file, read_json, read_json_object, sha256, write_json
from debias_diffusion.jobs import Job
from debias_diffusion.text.sentences import split_sentences
from debias_diffusion.text.tokens import TokenBatch

from ..options import AblateConfig
from .backprop import descend, image_features
from .population import Population, head_means
from .problems import (
    Problem,
    better_alone,
    every_mask,
    fittest,
    genetic_search,
    probe,
    recalls,
)

FITNESS = {"margin": ("keep",), "robust": ("keep", "move4", "remove")}  # edits of the captions
SEARCH = "search"  # the item with its time
ABLATED = 0.5  # heads with a lower beta count as ablated, where each has a beta of its own
PROBE_FILE, PICTURE = "probe.json", "heads.png"
_WITHOUT_EFFECT = ("output", "model", "data", "images", "root", "device", "batch", "max_bad")  # paths are inputs
# Why the recall may fall all the same, and what to do.
_FELL = {
    "naive": "though each of these heads alone raises it. Try single or ga.",
    "bp": "though the contrastive loss fell. Try ga, or a lower --learning-rate.",
}
_MARGIN_FELL = (
    "though the fitness rose: with all features alike the margin is 0, more than that of a model that errs. Try a "
    "larger beta, or naive."
)


def ablate(config: AblateConfig) -> Path:
    """Searches, writes the result, and prints what it changes on the pairs that it was searched on.

    Returns:
        The output folder.

    Raises:
        UserError: the model or the data cannot be used, or the folder belongs to another search.
    """
    search = _Search(config)
    settings = {name: value for name, value in asdict(config).items() if name not in _WITHOUT_EFFECT}
    digests = search.backbone.digest(), search.pairs.digest, images_digest(search.pairs.records, search.pairs.images)
    inputs = dict(zip(("model", "data", "set of images"), digests, strict=True))
    with Job.open(config.output, "ablate", settings, inputs) as search.job:
        search.run()
    return Path(config.output)


class _Search:
    """One search, which continues from the finished items of `job`."""

    job: Job
    means: Tensor | None = None  # of way mean

    def __init__(self, config: AblateConfig):
        self.config, self.output = config, Path(config.output)
        self.score = "mean_r" if config.recall == "both" else f"mean_r_{config.recall}"
        spec = EncoderSpec.parse(config.model)
        self.seen_before = read_seen(spec)
        self.device = pick_device(config.device)
        self.backbone = spec.load_two_tower().to(self.device).eval()
        self.shape = tower_shape(self.backbone, config.tower)
        # the latter in an open_clip folder with suppressed heads
        if spec.kind is Kind.ABLATION or self.backbone.image_attention or self.backbone.text_attention:
            raise UserError(f"{config.model!r} is ablated already. Give the model that it was made from.")
        if config.tower == "image" and self.backbone.prompt_settings is not None:
            raise UserError(f"{config.model!r}: {PROMPTS_AND_ATTENTION}")
        self.pairs = read_source(config)
        sentences = (len(split_sentences(record.caption)) for record in self.pairs.records)
        if config.fitness == "robust" and max(sentences) < 2:
            raise UserError(
                "fitness robust moves and removes sentences, and no caption has two. Use margin, or captions with more."
            )

    @torch.inference_mode()
    def run(self) -> None:
        config = self.config
        if config.search == "probe":
            self._show_probe()
            return
        is_finished = False
        with suppress(UserError):  # where it is damaged
            is_finished = self.job.is_whole(FILE) and bool(read_ablation(self.output))
        if not is_finished:
            problem = self._problem()
            if recalls(problem.untouched)[0]["mean_r"] == 0:
                raise UserError(
                    f"Which heads hurt cannot be known from these {len(self.pairs.records)} pairs: the model finds "
                    "none of them (mean-R 0.0), as where images or captions are alike. Give other pairs."
                )
            beta = self._timed_search(problem)
            if not (beta < 1).any():
                print("On these pairs no ablation is better than none: nothing is ablated.")
                return
            self._write(problem, beta)
        content = read_json_object(self.output / FILE)
        before, after = content["recall"]["before"], content["recall"]["after"]
        rows = [[name, before[name], after[name]] for name in before]
        print("\n" + Table(["on the pairs of the search", "before", "after"], rows).markdown())
        if after[self.score] < before[self.score]:
            print(
                f"\nmean-R fell from {before[self.score]:.1f} to {after[self.score]:.1f}, "
                f"{_FELL.get(config.search, _MARGIN_FELL)}"
            )
        print(f"\nAblated: {', '.join(content['heads']) or 'none'}\nNext: debias-diffusion evaluate all --encoders "
              f"{config.model} {self.output}")  # fmt: skip

    def _write(self, problem: Problem, beta: Tensor) -> None:
        """Writes the ablation with these betas, [blocks, heads], and the recalls before and after."""
        config, ablation = self.config, Ablation.of_rows(self.config.tower, beta.tolist(), self.means)
        if config.search == "bp":
            parts = [image_features(self.backbone.image, part, beta) for part in problem.images.split(config.batch)]
            encoded, heads = (torch.cat(parts)[None], problem.untouched[1]), ablation.names_below(ABLATED)
        else:
            encoded, heads = problem.encode((beta < 1).flatten()[None]), ablation.names
        write_png(self.output / PICTURE, draw_heads(ablation.beta, f"beta of each head of the {config.tower} tower"))
        recall = {"before": recalls(problem.untouched)[0], "after": recalls(encoded)[0]}
        more = {
            "heads": heads,
            "command": shell_command("python -m research ablate", asdict(config), AblateConfig),
            "seconds": self.job.notes(SEARCH)["seconds"],
            "settings": asdict(config),
            "recall": recall,
        }
        write_seen(self.output, add_seen([self.seen_before], self.pairs.digest, range(len(self.pairs.records))))
        with self.job.write(FILE) as temporary:
            write_ablation(temporary, config.model, self.backbone, ablation, **more)

    def _problem(self) -> Problem:
        """The pairs whose image can be read, encoded as far as every ablation shares."""
        config, backbone, pairs = self.config, self.backbone, self.pairs
        is_image, tower = config.tower == "image", backbone.tower(config.tower)

        def embed(images: Tensor) -> Tensor:
            return backbone.image.embed(images).flatten(1)

        def read(edit: str) -> Tensor | list[TokenBatch]:
            captions = [edit_caption(pairs.records[index].caption, edit) for index in good]
            if is_image:
                return embed_texts(backbone, captions, config.batch, self.device, f"captions, {edit}").to(self.device)
            starts = range(0, len(captions), config.batch)
            return [backbone.tokenize(captions[at : at + config.batch]).to(self.device) for at in starts]

        inputs, encode = (pairs.records, pairs.images, config.batch, self.device), embed if is_image else None
        features, good, bad = encode_images(backbone, *inputs, encode=encode)
        print_left_out(bad)
        check_share(bad, len(pairs.records), config.max_bad)
        images = features.to(self.device)
        images = images.unflatten(1, (1 + tower.patches, -1)) if is_image else images
        texts = {edit: read(edit) for edit in FITNESS[config.fitness]}
        if config.way == "mean":
            self.means = head_means(tower, images.split(config.batch) if is_image else texts["keep"])
        population = Population(tower, config.beta, self.means)
        return Problem(population, images, texts, config.batch, seed=config.seed)

    def _timed_search(self, problem: Problem) -> Tensor:
        """`_search`; notes its seconds, with those of what an earlier run of it has finished."""
        started, before = time.monotonic(), sum(self.job.notes(name).get("seconds", 0) for name in self.job.names())
        beta = self._search(problem)
        if SEARCH not in self.job:  # one that finds nothing is asked again
            self.job.note(SEARCH, seconds=round(before + time.monotonic() - started, 3))
        return beta

    def _search(self, problem: Problem) -> Tensor:
        """[blocks, heads] the betas."""
        config = self.config
        if config.search == "bp":
            pairs = self.backbone.image, problem.images, problem.texts["keep"]
            settings = config.learning_rate, config.epochs, config.bp_batch, config.constant, config.seed
            with torch.inference_mode(False), torch.enable_grad():
                return descend(*pairs, self.backbone.logit_scale.exp(), self.job, *settings)
        match config.search:
            case "single" | "naive":
                mask = better_alone(self._probe(problem).values(), self.score, best=config.search == "single")
            case "all":
                mask = fittest(problem, every_mask(*problem.shape))
            case "ga":
                settings = config.generations, config.efficient, config.seed, self.job, config.population
                mask, _ = genetic_search(problem, *settings)
        return torch.where(mask.view(*problem.shape), config.beta if self.means is None else 0.0, 1.0)

    def _probe(self, problem: Problem | None = None) -> dict[str, dict[str, float]]:
        """The recalls of the untouched model, by "none", then those with each head ablated alone, by its name."""

        def measure(file: Path) -> None:
            write_json(file, {"settings": asdict(self.config), "recall": probe(problem or self._problem())})

        return read_json(self.job.ensure(PROBE_FILE, measure))["recall"]

    def _show_probe(self) -> None:
        by_head = self._probe()
        untouched, *alone = (row[self.score] for row in by_head.values())
        title = f"mean-R with one head suppressed ({untouched:.1f} with none)"
        values = np.reshape(alone, self.shape)
        write_png(self.output / PICTURE, draw_heads(values, title, untouched))
        rows = [[name, *row.values()] for name, row in by_head.items()]
        print("\n" + Table(["ablated head", *by_head["none"]], rows).markdown())


def draw_heads(values: Sequence[Sequence[float]], title: str, around: float | None = None) -> Figure:
    """A map of a tower with a cell for each head, [blocks][heads].

    Args:
        around: the value drawn white, with losses red and gains blue; None draws values from 0 to 1, white to blue.
    """
    values = np.asarray(values, dtype=float)
    blocks, heads = values.shape
    figure = Figure(figsize=(max(6, 2 + 0.45 * heads), max(3, 1.5 + 0.4 * blocks)), layout="constrained", dpi=150)
    axes = figure.subplots()
    if around is None:
        scale = {"cmap": "Blues_r", "vmin": 0, "vmax": 1}
    else:
        most = max(1e-9, float(np.abs(values - around).max()))
        scale = {"cmap": "RdBu", "vmin": around - most, "vmax": around + most}
    figure.colorbar(axes.imshow(values, aspect="auto", **scale), ax=axes)
    axes.set(xticks=range(heads), yticks=range(blocks), xlabel="head", ylabel="block")
    axes.set_title(title, fontsize="medium")
    return figure


def write_ablation(file: Path, model: str, backbone: Backbone, ablation: Ablation, **more) -> None:
    """Writes the content of `ablation.json` to `file`, and beside it the means of an ablation that has some.

    `model` is the base model's name, `backbone` the base model, `more` further entries.
    """
    content = {"model": model, "model_sha256": backbone.digest(), "tower": ablation.tower}
    content |= ablation.description() | {"heads": ablation.names}
    if ablation.means is not None:
        with atomic_file(file.parent / MEANS_FILE) as temporary:
            save_tensors({"means": ablation.means}, temporary)
        content["means_sha256"] = sha256(file.parent / MEANS_FILE)
    write_json(file, content | more)
