"""Searches for heads whose suppression makes a CLIP retrieve better."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.ablation.heads import ABLATED, Ablation, image_means, text_means, tower_shape
from debias_diffusion.ablation.saved import FILE, MEANS_FILE, ablation_content
from debias_diffusion.data.bad_records import check_share, print_left_out
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders import EncoderSpec, Kind
from debias_diffusion.errors import UserError
from debias_diffusion.eval.report import Table, write_png
from debias_diffusion.eval.robustness import edit_caption
from debias_diffusion.eval.session import Pairs, read_source
from debias_diffusion.files import read_json_object, write_json
from debias_diffusion.head_search.backprop import Backprop
from debias_diffusion.head_search.fitness import K1, K2, check_count
from debias_diffusion.head_search.genetic import Generation
from debias_diffusion.head_search.population import Population, TextPopulation, mean_shares
from debias_diffusion.head_search.problems import (
    ImageProblem,
    Problem,
    TextProblem,
    best_alone,
    better_alone,
    every_mask,
    genetic_search,
    probe,
)
from debias_diffusion.jobs import Job
from debias_diffusion.models.image_tower import PROMPTS_AND_ATTENTION
from debias_diffusion.models.weight_files import save_tensors
from debias_diffusion.retrieval import encode_images, encode_texts
from debias_diffusion.sentences import split_sentences
from debias_diffusion.tokens import TokenBatch

from ..options import AblateConfig

FITNESS = {"margin": ("keep",), "robust": ("keep", "move4", "remove")}  # edits of the captions
PROBE_FILE, PICTURE, GENERATION = "probe.json", "heads.png", "generation-"
_WITHOUT_EFFECT = ("output", "model", "data", "images", "root", "device", "batch", "max_bad")  # paths are inputs


def ablate(config: AblateConfig) -> Path:
    """Searches, writes the result, and prints what it changes on the pairs that it was searched on.

    Returns:
        The output folder.

    Raises:
        UserError: the model or the data cannot be used, or the folder belongs to another search.
    """
    search = _Search(config)
    settings = {name: value for name, value in asdict(config).items() if name not in _WITHOUT_EFFECT}
    inputs = {"model": search.backbone.digest(), "data": search.pairs.digest}
    with Job.open(config.output, "ablate", settings, inputs) as search.job:
        search.run()
    return Path(config.output)


def _check_pairs(config: AblateConfig, pairs: Pairs) -> None:
    """Raises UserError for pairs that the search cannot use, before anything is encoded."""
    check_count(len(pairs.records))
    if config.fitness == "robust" and not any(len(split_sentences(record.caption)) > 1 for record in pairs.records):
        raise UserError(
            "fitness robust moves and removes sentences, and no caption has two. Use margin, or captions with more."
        )


def _ablated_already(model: str) -> UserError:
    return UserError(f"{model!r} is ablated already. Give the model that it was made from.")


class _Search:
    """One search, which continues from the finished items of `job`."""

    job: Job

    def __init__(self, config: AblateConfig):
        self.config, self.output = config, Path(config.output)
        spec = EncoderSpec.parse(config.model)
        if spec.kind is Kind.ABLATION:
            raise _ablated_already(config.model)
        self.device = pick_device(config.device)
        self.backbone = spec.load_two_tower().to(self.device).eval()
        self.blocks, self.heads = tower_shape(self.backbone, config.tower)
        if self.backbone.image_attention or self.backbone.text_attention:  # an open_clip folder with suppressed heads
            raise _ablated_already(config.model)
        self.means: Tensor | None = None  # of way mean
        if config.tower == "image" and self.backbone.prompt_settings is not None:
            raise UserError(f"{config.model!r}: {PROMPTS_AND_ATTENTION}")
        self.pairs = read_source(config)
        _check_pairs(config, self.pairs)

    @torch.inference_mode()
    def run(self) -> None:
        config = self.config
        if config.search == "probe":
            self._show_probe(self._problem(self.pairs))
            return
        if self.job.path(FILE, damaged="absent") is None:
            problem = self._problem(self.pairs)
            beta = self._search(problem)
            if not (beta < 1).any():
                print("No head hurts: nothing is ablated.")
                return
            self._write(problem, beta)
        content = read_json_object(self.output / FILE)
        before, after = content["recall"]["before"], content["recall"]["after"]
        rows = [[name, before[name], after[name]] for name in before]
        print("\n" + Table(["on the pairs of the search", "before", "after"], rows).markdown())
        if after["mean_r"] < before["mean_r"]:
            print(
                f"\nmean-R fell from {before['mean_r']:.1f} to {after['mean_r']:.1f}, though the fitness rose: with "
                "all features alike the margin is 0, more than that of a model that errs. Try a larger beta, or naive."
            )
        print(f"\nAblated: {', '.join(content['heads']) or 'none'}\nNext: debias-diffusion evaluate all --encoders "
              f"{config.model} {self.output}")  # fmt: skip

    def _write(self, problem: Problem, beta: Tensor) -> None:
        """Writes what was found, [blocks, heads], with the recalls before and after."""
        config, ablation = self.config, Ablation.of_rows(self.config.tower, beta.tolist())
        if config.search == "bp":
            encoded, heads = problem.encode_betas(beta), ablation.names_below(ABLATED)
        else:
            encoded, heads = problem.encode((beta < 1).flatten()[None]), ablation.names
        if self.means is not None:
            ablation = ablation.with_means(self.means)
            with self.job.write(MEANS_FILE) as temporary:
                save_tensors({"means": ablation.means}, temporary)
        write_png(self.output / PICTURE, draw_heads(ablation.beta, f"beta of each head of the {config.tower} tower"))
        recall = {"before": problem.recalls(problem.untouched)[0], "after": problem.recalls(encoded)[0]}
        more = {"heads": heads, "settings": asdict(config), "data_sha256": self.pairs.digest, "recall": recall}
        with self.job.write(FILE) as temporary:
            write_json(temporary, ablation_content(config.model, self.backbone, ablation, **more))

    def _problem(self, pairs: Pairs) -> Problem:
        """The pairs whose image can be read, encoded as far as every ablation shares."""
        config, backbone = self.config, self.backbone
        of_images = config.tower == "image"
        shape: list[torch.Size] = []

        def embed(images: Tensor) -> Tensor:
            embedded = backbone.image.embed(images)
            shape.append(embedded.shape[1:])
            return embedded.flatten(1)

        features, good, bad = encode_images(
            backbone,
            pairs.records,
            pairs.images,
            config.batch,
            self.device,
            "images",
            encode=embed if of_images else None,
        )
        print_left_out(bad)
        check_share(bad, len(pairs.records), config.max_bad)
        captions = [pairs.records[index].caption for index in good]
        texts = {edit: [edit_caption(text, edit) for text in captions] for edit in FITNESS[config.fitness]}
        if of_images:
            embedded = features.view(-1, *shape[0]).to(self.device)
            encoded = {
                edit: encode_texts(backbone, of_edit, config.batch, self.device, f"captions, {edit}")
                for edit, of_edit in texts.items()
            }
            if config.way == "mean":
                self.means = image_means(backbone.image, embedded, config.batch)
            population = Population(backbone.image, config.beta, config.batch, self.means)
            problem = ImageProblem(population, embedded, {edit: part.to(self.device) for edit, part in encoded.items()})
        else:
            batches = {edit: self._tokenize(of_edit) for edit, of_edit in texts.items()}
            if config.way == "mean":
                self.means = text_means(backbone, batches["keep"])
            population = TextPopulation(backbone.text, config.beta, self.means)
            problem = TextProblem(population, features.to(self.device), batches)
        problem.make_margins(K1, K2, config.seed)
        return problem

    def _tokenize(self, texts: list[str]) -> list[TokenBatch]:
        size = self.config.batch
        parts = (texts[start : start + size] for start in range(0, len(texts), size))
        return [self.backbone.tokenize(part).to(self.device) for part in parts]

    def _search(self, problem: Problem) -> Tensor:
        """[blocks, heads] the betas."""
        config = self.config
        if config.search == "bp":
            with torch.inference_mode(False), torch.enable_grad():
                scale = self.backbone.logit_scale.exp()
                return Backprop(
                    problem,
                    scale,
                    self.job,
                    rate=config.learning_rate,
                    epochs=config.epochs,
                    batch=config.bp_batch,
                    constant=config.constant,
                    seed=config.seed,
                ).run()
        if config.search == "single":
            mask = best_alone(self._probe(problem))
        elif config.search == "naive":
            mask = better_alone(self._probe(problem))
        elif config.search == "all":
            masks = every_mask(*problem.shape)
            parts = tqdm(masks.split(256), desc="sets of heads", unit="part")
            fitness = torch.cat([problem.fitness(problem.encode(part), None) for part in parts])
            mask = masks[fitness.argmax()]
        else:
            made = [self.job.notes(name) for name in self.job.names(GENERATION)]
            history = [_generation(number, **notes) for number, notes in enumerate(made)]
            mask, _ = genetic_search(
                problem, config.generations, config.efficient, config.seed, history, self._note_generation
            )
        return torch.where(mask.view(*problem.shape), config.beta if self.means is None else 0.0, 1.0)

    def _note_generation(self, generation: Generation) -> None:
        masks = ["".join("01"[ablated] for ablated in mask) for mask in generation.masks.tolist()]
        self.job.note(f"{GENERATION}{generation.number:04}", masks=masks, fitness=generation.fitness.tolist())

    def _probe(self, problem: Problem) -> list[dict[str, float]]:
        """The recalls of the untouched model, then those with each head ablated alone."""
        return list(self.job.json(PROBE_FILE, partial(self._measured, problem))["recall"].values())

    def _measured(self, problem: Problem) -> dict:
        names = ["none", *(f"{block}-{head}" for block in range(self.blocks) for head in range(self.heads))]
        by_head = dict(zip(names, probe(problem), strict=True))
        if isinstance(problem, ImageProblem) and self.means is None:
            shares = mean_shares(self.backbone.image, problem.embedded, self.config.beta, self.config.batch)
            for name, before, after in zip(names[1:], *(part.flatten().tolist() for part in shares), strict=True):
                by_head[name] |= {"cls_share": 100 * before, "cls_share_suppressed": 100 * after}
            by_head["none"] |= {"cls_share": None, "cls_share_suppressed": None}
        return {"settings": asdict(self.config), "recall": by_head}

    def _show_probe(self, problem: Problem) -> None:
        self._probe(problem)
        by_head = read_json_object(self.output / PROBE_FILE)["recall"]
        untouched, *alone = (row["mean_r"] for row in by_head.values())
        values = [alone[start : start + self.heads] for start in range(0, len(alone), self.heads)]
        title = f"mean-R with one head suppressed ({untouched:.1f} with none)"
        write_png(self.output / PICTURE, draw_heads(values, title, untouched))
        rows = [[name, *row.values()] for name, row in by_head.items()]
        print("\n" + Table(["ablated head", *by_head["none"]], rows).markdown())


def _generation(number: int, masks: list[str], fitness: list[float]) -> Generation:
    """A generation as it was noted."""
    rows = torch.tensor([[bit == "1" for bit in mask] for mask in masks])
    return Generation(number, rows, torch.tensor(fitness, dtype=torch.float64))


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
    image = axes.imshow(values, aspect="auto", **scale)
    figure.colorbar(image, ax=axes)
    axes.set_xticks(range(heads))
    axes.set_yticks(range(blocks))
    axes.set_xlabel("head")
    axes.set_ylabel("block")
    axes.set_title(title, fontsize="medium")
    return figure
