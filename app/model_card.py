"""The README.md of an exported folder: a model card with what is known about the weights.

The facts come from the files of the training run, from results of `evaluate` and from open_clip's table of pretrained
weights. Cards get published, so an absolute path is reduced to its last part.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData

from debias_diffusion.ablation.saved import FILE as ABLATION_FILE
from debias_diffusion.ablation.saved import read_ablation
from debias_diffusion.encoders.resolve import MODELS_OF_RUN, may_be_hub_id, open_clip_models, resolve
from debias_diffusion.encoders.spec import READINGS, EncoderSpec
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import read_file, read_json_object
from debias_diffusion.jobs import Job
from debias_diffusion.training.config import CHOOSING, TrainConfig, method_settings

from .command_line import flag
from .options import ExportConfig

if TYPE_CHECKING:
    from debias_diffusion.clip.backbone import Backbone

OPEN_CLIP_UNABLATED = (
    "it ignores the suppressed heads in open_clip_config.json. `debias_diffusion.encoders.spec.load_two_tower` "
    "and `debias-diffusion evaluate` suppress them."
)

BLOCK_CARD = """---
library_name: diffusers
license: apache-2.0
tags: [modular-diffusers, stable-diffusion-xl, long-prompts, debias-diffusion]
---

# Prompts of any length for Stable Diffusion XL

The blocks of diffusers' modular SDXL, with a text step that truncates nothing. Prompts within 77 tokens give the same
images as diffusers' step. Longer ones are read by SDXL's own text encoders in overlapping chunks, or by a text encoder
of 248 positions in one piece.

```python
from diffusers import ModularPipelineBlocks

blocks = ModularPipelineBlocks.from_pretrained("{place}", trust_remote_code=True)
pipe = blocks.init_pipeline("stabilityai/stable-diffusion-xl-base-1.0")
pipe.load_components()
image = pipe(prompt="A street at night. A man in a green coat waits. ...", output="images")[0]
```

More arguments of the call: `emphasis="comfyui"` reads `(word:1.3)`, `word++` and BREAK; `reading="separate"` reads each
chunk by itself; `positions=227` fixes the length of all embeddings; `strict=True` refuses what takes two chunks.
"""


def model_card(
    config: ExportConfig,
    title: str,
    encoder: str | None = None,
    backbone: "Backbone | None" = None,
    digest: str | None = None,
    fits_sdxl: bool = False,
) -> str:
    """The card of an export, with YAML front matter.

    Args:
        encoder: transformers' class of the text encoder; None where both towers are exported.
        backbone: the two-tower that is exported; None for a text encoder alone.
        digest: of the two-tower as evaluations read it; None for a text encoder alone, or if no scores are wanted.
        fits_sdxl: whether an SDXL checkpoint reads a text encoder of these sizes.

    Raises:
        UserError: the folder of scores holds no results, broken results, or results of other weights.
    """
    run, base, command, ablations = _read_run(config.model), (config.model, config.pretrained), None, []
    if run:
        base = (run["settings"].get("model"), run["settings"].get("pretrained"))
        command = shell_command("debias-diffusion train", run["settings"], TrainConfig)
    if (file := Path(config.model) / ABLATION_FILE).is_file():
        name, _, ablation = read_ablation(config.model)
        found, ablations = resolve(name), [ablation]
        base = (found.location if found.weights else name, found.weights)
        command = read_json_object(file).get("command")
    elif backbone:
        from debias_diffusion.ablation.heads import TOWERS, suppressed_heads  # with open_clip, which is optional

        ablations = [ablation for tower in TOWERS if (ablation := suppressed_heads(backbone, tower))]
    repository, is_named = _hub_repository(*base), base[0] in open_clip_models()
    front = ModelCardData(
        license="unknown",
        library_name="open_clip" if config.to == "open_clip" else "transformers",
        pipeline_tag="feature-extraction" if encoder else "zero-shot-image-classification",
        tags=["clip", "long-prompts", "text-encoder", "debias-diffusion"],
        base_model=repository,
    )
    card = ModelCard.from_template(
        front,
        template_path=str(Path(__file__).with_name("model_card.md.j2")),
        config=config,
        title=title,
        encoder=encoder,
        fits_sdxl=fits_sdxl,
        backbone=backbone,
        folder=config.push_to_hub or "this folder",
        unablated=OPEN_CLIP_UNABLATED,
        base=base if command or repository or is_named else None,
        is_random=is_named and base[1] in (None, "none"),
        run=run,
        ablations=ablations,
        positions=backbone and backbone.config.get("debias_diffusion"),  # of open_clip_config.json
        version=version("debias-diffusion"),
        command=command,
        evaluations=_read_scores(config, digest) if config.scores else [],
        code=code,
    )
    return f"{card}\n"


def _read_run(model: str) -> dict | None:
    """What is known of the training run of `model`, which is the run's folder or its last/ or best/."""
    path = Path(model)
    for folder, names in ((path, MODELS_OF_RUN), (path.parent, (path.name,))):
        with suppress(UserError):  # damaged
            job = Job.read(folder)
            scores = next(filter(None, (read_json_object(folder / name / "scores.json") for name in names)), None)
            if job.command == "train" and scores:
                break
    else:
        return None
    from debias_diffusion.methods import find_method  # with open_clip, which is optional

    changes, learned_from, measured = method_settings(job.settings), None, {}
    with suppress(UserError):  # a method of another version
        learned_from = find_method(job.settings["recipe"], changes).describe()
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):  # a kill or a damaged disk
        for line in map(json.loads, read_file(folder / "log.jsonl").decode().splitlines()):
            measured |= {line["step"]: line} if "t2i_r1" in line else {}
    step = scores.get("step")
    return {
        "settings": job.settings,
        "changes": ", ".join(f"{name} {value}" for name, value in changes.items()),
        "learned_from": learned_from,
        "data_digest": job.inputs.get("data"),
        "step": step,
        # R@1 of the base model and of this one
        "held_out": {at: measured[at] for at in sorted({0, step} & measured.keys())} if step in measured else None,
        "chosen_by": scores.get(f"{CHOOSING}pairs"),
    }


def _read_scores(config: ExportConfig, digest: str | None) -> list[dict]:
    """The results of `evaluate`, of the exported model alone, each with its command."""
    from debias_diffusion.eval.registry import with_reports
    from debias_diffusion.eval.report import escaped

    sections, evaluations = [], with_reports()
    for name, evaluation in evaluations.items():
        file = Path(config.scores, f"{name}.json")
        if not file.is_file():
            continue
        wanted = digest or ""  # nothing measures two towers of a text encoder alone
        if evaluation.needs == "text encoder":
            wanted = EncoderSpec.parse(":".join(filter(None, (config.model, config.pretrained)))).digest
        report = read_json_object(file)
        with explain_failure(f"{str(file)!r} is no result of `debias-diffusion evaluate {name}`"):
            digests = report["digests"]["encoders"]
            encoders = {label: one for label, one in report["encoders"].items() if digests.get(label) == wanted}
            if not encoders:
                raise UserError(
                    f"{str(file)!r} was measured with another model than --model, by weights, configuration and "
                    f"tokenizer. Evaluate that model ({evaluation.needs}), or leave out --scores."
                )
            section = {
                "title": evaluation.title,
                "tables": evaluation.tables(report | {"encoders": encoders, "compared": []}),
                "notes": list(map(escaped, report["notes"])),
                "command": shell_command(f"debias-diffusion evaluate {name}", report["settings"], evaluation.options),
            }
        sections.append(section)
    if not sections:
        raise UserError(
            f"The folder {config.scores!r} holds none of {', '.join(f'{name}.json' for name in evaluations)}. Give the "
            "--output of `debias-diffusion evaluate`."
        )
    return sections


def shell_command(program: str, settings: Mapping, options: type) -> str:
    """The command that gives these settings, without defaults and without paths of one machine."""
    words = [program]
    for field in dataclasses.fields(options):
        value, default = settings.get(field.name), field.default
        default = list(default) if isinstance(default, tuple) else default
        if value in (None, [], default) or field.name in ("output", "workers", "device"):
            continue
        option = flag(field.name)
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
            continue
        given = value if isinstance(value, list) and all(isinstance(part, str) for part in value) else [value]
        texts = (_public(part) if isinstance(part, str) else json.dumps(part) for part in given)
        words.append(" ".join([option, *map(shlex.quote, texts)]))
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
    return model if may_be_hub_id(model) and not model.startswith("toy/") else None


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
    """A value or name as one line of Markdown code that cannot end the code or a table cell."""
    text = "".join(character if character.isprintable() else " " for character in _public(str(value)))
    return f"`{text.replace('`', chr(39)).replace('|', '/')}`"
