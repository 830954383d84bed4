"""Searches for heads whose suppression makes a CLIP retrieve better."""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.ablation.heads import ABLATED, Ablation, image_means, text_means, tower_shape
from debias_diffusion.ablation.saved import write_ablation
from debias_diffusion.data.bad_records import check_share, print_left_out
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders import EncoderSpec, Kind
from debias_diffusion.errors import UserError
from debias_diffusion.eval.inputs import Pairs, read_source
from debias_diffusion.eval.report import Table
from debias_diffusion.eval.robustness import edit_caption
from debias_diffusion.files import folder_lock, read_json_object, write_json
from debias_diffusion.head_search.backprop import Backprop
from debias_diffusion.head_search.fitness import K1, K2, check_count
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
from debias_diffusion.models.image_tower import PROMPTS_AND_ATTENTION
from debias_diffusion.retrieval import encode_images, encode_texts
from debias_diffusion.sentences import split_sentences
from debias_diffusion.tokens import TokenBatch

from ..options import AblateConfig
from .figures import draw_heads

FITNESS = {"margin": ("keep",), "robust": ("keep", "move4", "remove")}  # edits of the captions
LOG, STATE, PROBE_FILE, PICTURE, SETTINGS = "log.jsonl", "bp.safetensors", "probe.json", "heads.png", "settings.json"
_WITHOUT_EFFECT = ("output", "device", "batch", "max_bad")  # settings that a search may continue with others of


def ablate(config: AblateConfig) -> Path:
    """Searches, writes the result, and prints what it changes on the pairs that it was searched on.

    Returns:
        The output folder.

    Raises:
        UserError: the model or the data cannot be used, or the folder belongs to another search.
    """
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    with folder_lock(output, f"Another search works in {config.output!r}. Wait for it, or give another output."):
        return _Search(config, output).run()


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
    def __init__(self, config: AblateConfig, output: Path):
        self.config, self.output = config, output
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
        self._claim()

    def _claim(self) -> None:
        """Writes what decides the result. Raises UserError if the folder holds a search with other settings."""
        settings = {name: value for name, value in asdict(self.config).items() if name not in _WITHOUT_EFFECT}
        settings |= {"model_sha256": self.backbone.digest(), "data_sha256": self.pairs.digest}
        file = self.output / SETTINGS
        earlier = read_json_object(file) if file.exists() else settings
        if different := [name for name, value in settings.items() if earlier.get(name) != value]:
            name = different[0]
            raise UserError(
                f"{str(self.output)!r} holds a search with {name} {earlier.get(name)!r}, and now it is "
                f"{settings[name]!r}. Give the same settings to continue that search, or another output."
            )
        write_json(file, settings)

    @torch.inference_mode()
    def run(self) -> Path:
        problem = self._problem(self.pairs)
        before = problem.recalls(problem.untouched)[0]
        if self.config.search == "probe":
            self._write_probe(probe(problem), problem)
            return self.output
        beta = self._search(problem)
        if not (beta < 1).any():
            print("No head hurts: nothing is ablated.")
            return self.output
        ablation = Ablation.of_rows(self.config.tower, beta.tolist())
        if self.means is not None:
            ablation = ablation.with_means(self.means)
        if self.config.search == "bp":
            encoded, heads = problem.encode_betas(beta), ablation.names_below(ABLATED)
        else:
            encoded, heads = problem.encode((beta < 1).flatten()[None]), ablation.names
        after = problem.recalls(encoded)[0]
        write_ablation(
            self.output,
            self.config.model,
            self.backbone,
            ablation,
            heads=heads,
            settings=asdict(self.config),
            data_sha256=self.pairs.digest,
            recall={"before": before, "after": after},
        )
        draw_heads(ablation.beta, f"beta of each head of the {self.config.tower} tower").savefig(self.output / PICTURE)
        rows = [[name, before[name], after[name]] for name in before]
        print("\n" + Table(["on the pairs of the search", "before", "after"], rows).markdown())
        if after["mean_r"] < before["mean_r"]:
            print(
                f"\nmean-R fell from {before['mean_r']:.1f} to {after['mean_r']:.1f}, though the fitness rose: with "
                "all features alike the margin is 0, more than that of a model that errs. Try a larger beta, or naive."
            )
        print(f"\nAblated: {', '.join(heads) or 'none'}\nNext: debias-diffusion evaluate all --encoders "
              f"{self.config.model},{self.output}")  # fmt: skip
        return self.output

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
                    self.output / STATE,
                    rate=config.learning_rate,
                    epochs=config.epochs,
                    batch=config.bp_batch,
                    constant=config.constant,
                    seed=config.seed,
                ).run()
        if config.search == "single":
            mask = best_alone(probe(problem))
        elif config.search == "naive":
            mask = better_alone(probe(problem))
        elif config.search == "all":
            masks = every_mask(*problem.shape)
            parts = tqdm(masks.split(256), desc="sets of heads", unit="part")
            fitness = torch.cat([problem.fitness(problem.encode(part), None) for part in parts])
            mask = masks[fitness.argmax()]
        else:
            log = self.output / LOG
            mask, _ = genetic_search(problem, log, config.generations, config.efficient, config.seed)
        return torch.where(mask.view(*problem.shape), config.beta if self.means is None else 0.0, 1.0)

    def _write_probe(self, recalls: list[dict[str, float]], problem: Problem) -> None:
        names = ["none", *(f"{block}-{head}" for block in range(self.blocks) for head in range(self.heads))]
        by_head = dict(zip(names, recalls, strict=True))
        if isinstance(problem, ImageProblem) and self.means is None:
            shares = mean_shares(self.backbone.image, problem.embedded, self.config.beta, self.config.batch)
            for name, before, after in zip(names[1:], *(part.flatten().tolist() for part in shares), strict=True):
                by_head[name] |= {"cls_share": 100 * before, "cls_share_suppressed": 100 * after}
            by_head["none"] |= {"cls_share": None, "cls_share_suppressed": None}
        write_json(self.output / PROBE_FILE, {"settings": asdict(self.config), "recall": by_head})
        untouched, *alone = (row["mean_r"] for row in recalls)
        values = [alone[start : start + self.heads] for start in range(0, len(alone), self.heads)]
        draw_heads(values, f"mean-R with one head suppressed ({untouched:.1f} with none)", untouched).savefig(
            self.output / PICTURE
        )
        rows = [[name, *row.values()] for name, row in by_head.items()]
        print("\n" + Table(["ablated head", *by_head["none"]], rows).markdown())
