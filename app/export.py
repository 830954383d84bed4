"""From a training run to a folder that diffusers and transformers load."""

from dataclasses import dataclass
from pathlib import Path

from debias_diffusion.backbones import CONFIG_FILE, load_backbone
from debias_diffusion.errors import UserError
from debias_diffusion.files import whole_folder
from debias_diffusion.interchange import export_text_encoder
from debias_diffusion.pipelines.custom_pipeline import write_custom_pipeline

_CARD = """\
---
library_name: transformers
pipeline_tag: feature-extraction
---

# A CLIP text encoder that reads {window} tokens

A `transformers.{kind}` of width {width} with {window} positions, from `{source}`, exported by debias-diffusion.
Nothing of debias-diffusion is needed to load it:

```python
from transformers import CLIPTextModel, CLIPTokenizer

text_encoder = CLIPTextModel.from_pretrained("this folder", subfolder="text_encoder")
tokenizer = CLIPTokenizer.from_pretrained("this folder", subfolder="tokenizer")
```
{pipeline}
The licence and the terms of the base model and of the training data apply to the weights.
"""

_PIPELINE = """
In SDXL (whose first text encoder has width 768, as this one must), with `pipeline.py` of this folder:

```python
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained(
    "stabilityai/stable-diffusion-xl-base-1.0", text_encoder=text_encoder, tokenizer=tokenizer,
    custom_pipeline="this folder/pipeline.py", trust_remote_code=True,
)
```
"""


@dataclass
class ExportConfig:
    """Export a trained text encoder as an ordinary transformers folder.

    Attributes:
        model: Folder of a training run (its best model is taken), an open_clip folder, or an open_clip model name.
        output: Folder to write: text_encoder/, tokenizer/, README.md and pipeline.py.
        pretrained: Tag or file of weights, for a model given by name.
        projection: Export a CLIPTextModelWithProjection, whose text_embeds are the trained features. SDXL's first
            encoder must be without.
    """

    model: str
    output: str
    pretrained: str | None = None
    projection: bool = False


def export(config: ExportConfig) -> Path:
    """Writes the folder, whole or not at all, and says what to do with it.

    Raises:
        UserError: the model cannot be loaded, or the output is a folder of something else.
    """
    output = Path(config.output)
    if output.exists() and not (output / "text_encoder" / "config.json").is_file() and any(output.iterdir()):
        raise UserError(f"The output {config.output!r} exists and is no exported encoder. Give a new folder.")
    model = _best_of_run(config.model)
    backbone = load_backbone(model, config.pretrained).eval()
    with whole_folder(output) as folder:
        export_text_encoder(backbone, folder, config.projection)
        width = backbone.text.tower.token_embedding.embedding_dim
        if not config.projection:
            write_custom_pipeline(folder / "pipeline.py")
        (folder / "README.md").write_text(
            _CARD.format(
                window=backbone.context_length,
                width=width,
                kind="CLIPTextModelWithProjection" if config.projection else "CLIPTextModel",
                source=Path(model).name,
                pipeline="" if config.projection else _PIPELINE,
            )
        )
    print(f"Wrote {output}: a text encoder of width {width} that reads {backbone.context_length} tokens.")
    print(f"Next: debias-diffusion generate 'a long prompt' --base SDXL_FOLDER --encoder {output}")
    return output


def _best_of_run(model: str) -> str:
    """The best model's folder where `model` is a training run, else `model` itself."""
    folder = Path(model)
    if (folder / CONFIG_FILE).is_file():
        return model
    for name in ("best", "last"):
        if (folder / name / CONFIG_FILE).is_file():
            return str(folder / name)
    return model
