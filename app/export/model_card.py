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
from dataclasses import dataclass
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

if TYPE_CHECKING:
    from debias_diffusion.ablation.heads import Ablation
    from debias_diffusion.models.backbone import Backbone

_KEY = "debias_diffusion"  # of open_clip_config.json


@dataclass(frozen=True)
class Exported:
    """The model that a card describes.

    Attributes:
        title: first line of the card.
        use: Markdown that shows how to load the model.
        library: the hub's library_name.
        task: the hub's pipeline_tag.
        model: the exported model, as the user named it.
        pretrained: weights given with the name.
        backbone: the two-tower model it comes from; None for a text encoder alone.
        digest: of that model as evaluations read it; None for a text encoder alone, or if no scores are wanted.
    """

    title: str
    use: str
    library: str
    task: str
    model: str
    pretrained: str | None = None
    backbone: "Backbone | None" = None
    digest: str | None = None


OPEN_CLIP_UNABLATED = (
    "it ignores the suppressed heads in open_clip_config.json. `debias_diffusion.encoders.load_two_tower` "
    "and `debias-diffusion evaluate` suppress them."
)


def model_card(exported: Exported, scores: str | None = None) -> str:
    """Returns the card, with YAML front matter.

    Args:
        scores: folder with results of `evaluate`.

    Raises:
        UserError: `scores` holds no results, broken results, or results of other weights.
    """
    run, search = _Run.find(exported.model), _Search.find(exported.model)
    base = (exported.model, exported.pretrained)
    if run:
        base = (run.settings.get("model"), run.settings.get("pretrained"))
    elif search:
        spec = EncoderSpec.parse(search.model)
        base = (spec.place if spec.weights else search.model, spec.weights)
    front = ModelCardData(
        license="unknown",
        library_name=exported.library,
        pipeline_tag=exported.task,
        tags=["clip", "long-prompts", "text-encoder", "debias-diffusion"],
        base_model=_hub_repository(*base),
    )
    attention = exported.backbone and (exported.backbone.image_attention or exported.backbone.text_attention)
    made = run or search
    card = ModelCard.from_template(
        front,
        template_path=str(Path(__file__).with_name("model_card.md.j2")),
        title=exported.title,
        model=code(_public(exported.model)),
        pretrained=exported.pretrained and code(_public(exported.pretrained)),
        unablated=OPEN_CLIP_UNABLATED if attention and exported.library == "open_clip" else None,
        use=exported.use,
        rows=_rows(exported, run, search, base),
        command=made and made.command(),
        held_out=run and run.held_out(),
        evaluations=_read_scores(scores, exported) if scores else [],
    )
    return f"{card}\n"


def _rows(
    exported: Exported, run: "_Run | None", search: "_Search | None", base: tuple[str | None, str | None]
) -> dict[str, str]:
    """The table of how it was made."""
    rows = {}
    backbone = exported.backbone
    if run or search or _hub_repository(*base) or base[0] in open_clip_models():
        rows["base model"] = code(_public(base[0])) + (f", weights {code(_public(base[1]))}" if base[1] else "")
        if base[0] in open_clip_models() and base[1] in (None, "none"):
            rows["base model"] += ", **random weights**: not pretrained"
    if run:
        rows |= run.rows()
    for ablation in [search.ablation] if search else _noted_ablations(backbone):
        rows |= _ablated_heads(ablation, with_images=exported.task != "feature-extraction")
    positions = backbone.config.get(_KEY, {}) if backbone else {}
    if "keep" in positions and "factor" in positions:
        rows["positions"] = (
            f"{backbone.context_length}: the first {positions['keep']} kept, each other one stretched to "
            f"{positions['factor']}"
        )
    if backbone and backbone.pooling != "eot":
        rows["pooling"] = f"{backbone.pooling}; other programs lack it and pool at EOT"
    return rows | {"exported with": f"debias-diffusion {version('debias-diffusion')}"}


def _noted_ablations(backbone: "Backbone | None") -> "list[Ablation]":
    """The ablations that a two-tower's configuration notes."""
    if backbone is None:
        return []
    from debias_diffusion.ablation.heads import TOWERS, noted

    return [ablation for tower in TOWERS if (ablation := noted(backbone, tower))]


def _ablated_heads(ablation: "Ablation", with_images: bool) -> dict[str, str]:
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


@dataclass(frozen=True)
class _Search:
    """The search for suppressed heads that an exported model comes from.

    Attributes:
        model: its base model.
        ablation: the suppressed heads.
        settings: of the search.
    """

    model: str
    ablation: "Ablation"
    settings: Mapping

    @classmethod
    def find(cls, model: str) -> "_Search | None":
        if not is_ablation(model):
            return None
        base, _, ablation = read_ablation(model)
        return cls(base, ablation, read_json_object(Path(model) / ABLATION_FILE).get("settings", {}))

    def command(self) -> str:
        from ..options import AblateConfig

        return _command("debias-diffusion ablate", self.settings, AblateConfig)


class _Run:
    """The training run that an exported model comes from."""

    def __init__(self, job: Job, model: Path):
        self.folder, self.settings, self.inputs, self.model = job.folder, job.settings, job.inputs, model

    @classmethod
    def find(cls, model: str) -> "_Run | None":
        """Finds the run of `model`, which is the run's folder or its last/ or best/."""
        path = Path(model)
        for folder, names in ((path, MODELS_OF_RUN), (path.parent, (path.name,))):
            try:
                job = Job.read(folder)
            except UserError:  # damaged
                continue
            weights = next((folder / name for name in names if (folder / name / "scores.json").is_file()), None)
            if job.command == "train" and weights:
                return cls(job, weights)
        return None

    def rows(self) -> dict[str, str]:
        """The table of how it was trained: name to Markdown."""
        from debias_diffusion.methods import find_method

        settings = self.settings
        changes = method_settings(settings)
        changed = ", ".join(f"{name} {value}" for name, value in changes.items())
        rows = {"recipe": code(settings["recipe"]) + (f" with {code(changed)}" if changed else "")}
        with suppress(UserError):  # a method of another version
            rows["learned from"] = find_method(settings["recipe"], changes).describe_all()
        if settings.get("data"):
            digest = self.inputs.get("data")
            rows["data"] = code(_public(settings["data"])) + (f", sha256 {code(digest)}" if digest else "")
        if "step" in (scores := read_json_object(self.model / "scores.json")):
            rows["steps"] = str(scores["step"])
        options = ("batch", "epochs", "learning_rate", "seed", "precision")
        return rows | {name.replace("_", " "): code(settings[name]) for name in options if name in settings}

    def command(self) -> str:
        return _command("debias-diffusion train", self.settings, TrainConfig)

    def held_out(self) -> dict | None:
        """R@1 on held-out pairs, of the base model and of the exported one; None if it was not measured."""
        scores = read_json_object(self.model / "scores.json")
        measured = {line.get("step"): line for line in _lines(self.folder / "log.jsonl") if "t2i_r1" in line}
        if scores.get("step") not in measured:
            return None
        steps = sorted({0, scores["step"]} & measured.keys())
        lines = {f"this one, step {step}" if step else "the base model": measured[step] for step in steps}
        return {"pairs": measured[scores["step"]]["pairs"], "chosen": _chosen(scores), "lines": lines}


def _chosen(scores: dict) -> str:
    """Why a run's model, with its scores.json, is this one and no other."""
    if f"{CHOOSING}t2i_r1" in scores:
        count = scores[f"{CHOOSING}pairs"]
        return f"This model is the best of the training run above by R@1 on {count} other pairs, not trained on either"
    return "This model is the one after the last step of the training run above"


def _read_scores(folder: str, exported: Exported) -> list[dict]:
    """The results of `evaluate` in `folder`, each with its command."""
    from debias_diffusion.eval.registry import EVALUATIONS
    from debias_diffusion.eval.report import escaped

    sections = []
    for name, evaluation in EVALUATIONS.items():
        file = Path(folder) / f"{name}.json"
        if not file.is_file():
            continue
        report, words = read_json_object(file), name.replace("_", "-")
        try:
            report = _of_model(file, report, _digest_of(exported, evaluation.needs, file))
            section = {
                "title": evaluation.title,
                "tables": [table.markdown() for table in evaluation.load().tables(report)],
                "notes": list(map(escaped, report["notes"])),
                "command": _command(f"debias-diffusion evaluate {words}", report["settings"], evaluation.settings()),
            }
        except UserError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{str(file)!r} is no result of `debias-diffusion evaluate {words}`: {error!r}.") from error
        sections.append(section)
    if not sections:
        raise UserError(
            f"The folder {folder!r} holds none of {', '.join(f'{name}.json' for name in EVALUATIONS)}. Give the "
            "--output of `debias-diffusion evaluate`."
        )
    return sections


def _digest_of(exported: Exported, needs: str, file: Path) -> str:
    """The exported model's digest as reports of evaluations with these needs hold it."""
    if needs == "text encoder":
        return EncoderSpec.parse(
            f"{exported.model}:{exported.pretrained}" if exported.pretrained else exported.model
        ).digest
    if exported.digest is None:
        raise UserError(
            f"{str(file)!r} was measured with a two-tower model, and --model is a text encoder alone. Give the "
            "two-tower model, or leave out --scores."
        )
    return exported.digest


def _of_model(file: Path, report: dict, digest: str) -> dict:
    """Reduces a report to the exported model, by its digest."""
    digests = report["digests"]["encoders"]
    encoders = {label: numbers for label, numbers in report["encoders"].items() if digests.get(label) == digest}
    if not encoders:
        raise UserError(
            f"{str(file)!r} was measured with other weights than those of --model. Evaluate that model, or "
            "leave out --scores."
        )
    return report | {"encoders": encoders, "compared": []}


def _command(program: str, settings: Mapping, options: type) -> str:
    """The command that gives these settings, without defaults and without paths of one machine."""
    words = [program]
    for field in dataclasses.fields(options):
        value = settings.get(field.name)
        if value in (None, []) or field.name in ("output", "workers", "device") or field.name not in settings:
            continue
        if field.default is not dataclasses.MISSING and value in (field.default, _plain(field.default)):
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(" ".join([f"--{name}", *map(shlex.quote, _as_given(value))]))
    return " ".join(words).replace("```", "")


def _as_given(value) -> list[str]:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return list(map(_public, value))
    return [_public(value) if isinstance(value, str) else json.dumps(value)]


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


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


def _lines(file: Path) -> list[dict]:
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    except (OSError, ValueError, RecursionError):
        return []
    return [line for line in lines if isinstance(line, dict)]
