"""The README.md of an exported folder: a model card with what is known about the weights.

The facts come from the files of the training run, from results of `evaluate` and from open_clip's table of pretrained
weights. Cards get published, so an absolute path is reduced to its last part.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData

from debias_diffusion.ablation.saved import FILE as ABLATION_FILE
from debias_diffusion.ablation.saved import is_ablation, read_ablation
from debias_diffusion.encoders import MODELS_OF_RUN, READINGS, EncoderSpec, open_clip_models
from debias_diffusion.errors import UserError
from debias_diffusion.files import read_json_object
from debias_diffusion.jobs import Job
from debias_diffusion.training.config import CHOOSING, TrainConfig, method_settings

from .options import AblateConfig, ExportConfig

if TYPE_CHECKING:
    from debias_diffusion.ablation.heads import Ablation
    from debias_diffusion.models.backbone import Backbone

OPEN_CLIP_UNABLATED = (
    "it ignores the suppressed heads in open_clip_config.json. `debias_diffusion.encoders.load_two_tower` "
    "and `debias-diffusion evaluate` suppress them."
)


def model_card(
    config: ExportConfig,
    title: str,
    encoder: str | None = None,
    backbone: "Backbone | None" = None,
    digest: str | None = None,
) -> str:
    """Returns the card, with YAML front matter.

    Args:
        config: of the export.
        title: first line of the card.
        encoder: transformers' class of the text encoder; None where both towers are exported.
        backbone: the two-tower that is exported; None for a text encoder alone.
        digest: of the two-tower as evaluations read it; None for a text encoder alone, or if no scores are wanted.

    Raises:
        UserError: the folder of scores holds no results, broken results, or results of other weights.
    """
    run, base, command, ablations = _find_run(config.model), (config.model, config.pretrained), None, []
    rows, held_out = {}, None
    if run:
        base = (run[0].settings.get("model"), run[0].settings.get("pretrained"))
        command = _command("debias-diffusion train", run[0].settings, TrainConfig)
        rows, held_out = _describe_run(*run), _held_out(*run)
    if is_ablation(config.model):
        name, _, ablation = read_ablation(config.model)
        spec, ablations = EncoderSpec.parse(name), [ablation]
        base = (spec.place if spec.weights else name, spec.weights)
        search = read_json_object(Path(config.model) / ABLATION_FILE).get("settings", {})
        command = _command("debias-diffusion ablate", search, AblateConfig)
    elif backbone:
        from debias_diffusion.ablation.heads import TOWERS, noted

        ablations = [ablation for tower in TOWERS if (ablation := noted(backbone, tower))]
    for ablation in ablations:
        rows |= _describe_heads(ablation, with_images=encoder is None)
    if command or _hub_repository(*base) or base[0] in open_clip_models():
        weights = f", weights {code(_public(base[1]))}" if base[1] else ""
        if base[0] in open_clip_models() and base[1] in (None, "none"):
            weights += ", **random weights**: not pretrained"
        rows = {"base model": code(_public(base[0])) + weights} | rows
    positions = backbone.config.get("debias_diffusion", {}) if backbone else {}  # of open_clip_config.json
    if "keep" in positions and "factor" in positions:
        stretched = f"each other one stretched to {positions['factor']}"
        rows["positions"] = f"{backbone.context_length}: the first {positions['keep']} kept, {stretched}"
    if backbone and backbone.pooling != "eot":
        rows["pooling"] = f"{backbone.pooling}; other programs lack it and pool at EOT"
    front = ModelCardData(
        license="unknown",
        library_name="open_clip" if config.to == "open_clip" else "transformers",
        pipeline_tag="feature-extraction" if encoder else "zero-shot-image-classification",
        tags=["clip", "long-prompts", "text-encoder", "debias-diffusion"],
        base_model=_hub_repository(*base),
    )
    card = ModelCard.from_template(
        front,
        template_path=str(Path(__file__).with_name("model_card.md.j2")),
        title=title,
        model=code(_public(config.model)),
        pretrained=config.pretrained and code(_public(config.pretrained)),
        format=config.to,
        encoder=encoder,
        ablated=backbone and bool(backbone.image_attention or backbone.text_attention),
        images_ablated=backbone and bool(backbone.image_attention),
        unablated=OPEN_CLIP_UNABLATED,
        folder=config.push_to_hub or "this folder",
        rows=rows | {"exported with": f"debias-diffusion {version('debias-diffusion')}"},
        command=command,
        held_out=held_out,
        evaluations=_read_scores(config, digest) if config.scores else [],
    )
    return f"{card}\n"


def _describe_heads(ablation: "Ablation", with_images: bool) -> dict[str, str]:
    """The table's row of a tower's ablated heads. Where each has a beta of its own, those below 0.5 are named.

    Args:
        with_images: whether the image tower is exported, too.
    """
    from debias_diffusion.ablation.heads import ABLATED

    verb = "suppressed" if ablation.means is None else "replaced"
    betas = sorted({beta for row in ablation.beta for beta in row if beta < 1})
    if ablation.means is not None:
        heads = f"{', '.join(ablation.names)} (by their means, in the weights)"
    elif len(betas) == 1:
        heads = f"{', '.join(ablation.names)} (beta {betas[0]:.3g})"
    else:
        names = ", ".join(ablation.names_below(ABLATED)) or "none"
        heads = f"{len(ablation.names)} with beta {betas[0]:.2g} to {betas[-1]:.2g}; below {ABLATED}: {names}"
    if ablation.tower == "image" and not with_images:
        heads += ": not part of this text encoder, which is that of the base model"
    return {f"{verb} heads of the {ablation.tower} tower": heads}


def _find_run(model: str) -> tuple[Job, Path] | None:
    """The training run of `model`, which is the run's folder or its last/ or best/, and the folder of its model."""
    path = Path(model)
    for folder, names in ((path, MODELS_OF_RUN), (path.parent, (path.name,))):
        with suppress(UserError):  # damaged
            job = Job.read(folder)
            weights = next((folder / name for name in names if (folder / name / "scores.json").is_file()), None)
            if job.command == "train" and weights:
                return job, weights
    return None


def _describe_run(job: Job, model: Path) -> dict[str, str]:
    """The table of how a model was trained: name to Markdown."""
    from debias_diffusion.methods import find_method

    settings = job.settings
    changes = method_settings(settings)
    changed = ", ".join(f"{name} {value}" for name, value in changes.items())
    rows = {"recipe": code(settings["recipe"]) + (f" with {code(changed)}" if changed else "")}
    with suppress(UserError):  # a method of another version
        rows["learned from"] = find_method(settings["recipe"], changes).describe_all()
    if settings.get("data"):
        digest = job.inputs.get("data")
        rows["data"] = code(_public(settings["data"])) + (f", sha256 {code(digest)}" if digest else "")
    if "step" in (scores := read_json_object(model / "scores.json")):
        rows["steps"] = str(scores["step"])
    options = ("batch", "epochs", "learning_rate", "seed", "precision")
    return rows | {name.replace("_", " "): code(settings[name]) for name in options if name in settings}


def _held_out(job: Job, model: Path) -> dict | None:
    """R@1 on held-out pairs, of the base model and of the exported one; None if it was not measured."""
    scores, measured = read_json_object(model / "scores.json"), {}
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):  # a kill or a damaged disk
        for line in map(json.loads, (job.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()):
            measured |= {line.get("step"): line} if "t2i_r1" in line else {}
    if scores.get("step") not in measured:
        return None
    steps = sorted({0, scores["step"]} & measured.keys())
    lines = {f"this one, step {step}" if step else "the base model": measured[step] for step in steps}
    chosen = "the one after the last step of the training run above"
    if f"{CHOOSING}t2i_r1" in scores:
        count = scores[f"{CHOOSING}pairs"]
        chosen = f"the best of the training run above by R@1 on {count} other pairs, not trained on either"
    return {"pairs": measured[scores["step"]]["pairs"], "chosen": chosen, "lines": lines}


def _read_scores(config: ExportConfig, digest: str | None) -> list[dict]:
    """The results of `evaluate`, of the exported model alone, each with its command."""
    from debias_diffusion.eval.registry import EVALUATIONS
    from debias_diffusion.eval.report import escaped

    sections = []
    for name, evaluation in EVALUATIONS.items():
        file = Path(config.scores, f"{name}.json")
        if not file.is_file():
            continue
        if evaluation.needs == "text encoder":
            digest_there = EncoderSpec.parse(":".join(filter(None, (config.model, config.pretrained)))).digest
        elif digest is None:
            raise UserError(
                f"{str(file)!r} was measured with a two-tower model, and --model is a text encoder alone. Give the "
                "two-tower model, or leave out --scores."
            )
        else:
            digest_there = digest
        report, words = read_json_object(file), name.replace("_", "-")
        try:
            digests = report["digests"]["encoders"]
            encoders = {label: one for label, one in report["encoders"].items() if digests.get(label) == digest_there}
            section = {
                "title": evaluation.title,
                "tables": evaluation.load().tables(report | {"encoders": encoders, "compared": []}) if encoders else [],
                "notes": list(map(escaped, report["notes"])),
                "command": _command(f"debias-diffusion evaluate {words}", report["settings"], evaluation.settings()),
            }
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{str(file)!r} is no result of `debias-diffusion evaluate {words}`: {error!r}.") from error
        if not encoders:
            raise UserError(
                f"{str(file)!r} was measured with other weights than those of --model. Evaluate that model, or "
                "leave out --scores."
            )
        sections.append(section)
    if not sections:
        raise UserError(
            f"The folder {config.scores!r} holds none of {', '.join(f'{name}.json' for name in EVALUATIONS)}. Give the "
            "--output of `debias-diffusion evaluate`."
        )
    return sections


def _command(program: str, settings: Mapping, options: type) -> str:
    """The command that gives these settings, without defaults and without paths of one machine."""
    words = [program]
    for field in dataclasses.fields(options):
        value, default = settings.get(field.name), field.default
        default = list(default) if isinstance(default, tuple) else default
        if value in (None, [], default) or field.name in ("output", "workers", "device"):
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        given = value if isinstance(value, list) and all(isinstance(part, str) for part in value) else [value]
        texts = (_public(part) if isinstance(part, str) else json.dumps(part) for part in given)
        words.append(" ".join([f"--{name}", *map(shlex.quote, texts)]))
    return " ".join(words).replace("```", "")


def _hub_repository(model: str | None, pretrained: str | None) -> str | None:
    """The hub repository of a base model, if its name or open_clip's table gives one."""
    if model is None:
        return None
    if model.startswith("hf-hub:"):
        return model.removeprefix("hf-hub:")
    if model in open_clip_models() and pretrained:
        import open_clip

        return (open_clip.get_pretrained_cfg(model, pretrained) or {}).get("hf_hub", "").strip("/") or None
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) and not Path(model).exists() and not model.startswith("toy/")
    return model if is_id else None


def _public(name: str) -> str:
    """A name or path without the folders of this machine."""
    prefix, colon, model = str(name).partition(":")
    if colon and prefix in READINGS:
        return f"{prefix}:{_public(model)}"
    path = Path(name)
    if not path.is_absolute():
        return str(name)
    return f"{path.parent.name}/{path.name}" if path.name in MODELS_OF_RUN else path.name


def code(value) -> str:
    """A value as one line of Markdown code that cannot end the code or a table cell."""
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return f"`{text.replace('`', chr(39)).replace('|', '/')}`"
