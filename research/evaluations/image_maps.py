"""Where an image fits a text, and what regional prompts look at (Fix-CLIP, sections 10 and 11, Figures 8 and 9).

The paper defines neither. Here the similarity of a patch is the cosine of its state after the last block, through the
norm and projection of CLS, with the text's feature; the response of a prompt is its attention in the last block to all
patches, mean over heads, without the mask that keeps it to its band.
"""

import os
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.blocks import before_attention
from debias_diffusion.data.images import open_image
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.eval.report import Table
from debias_diffusion.eval.session import Session

from .options import MapsConfig

_PAD = 0.35  # opacity outside of a prompt's band


@torch.inference_mode()
def image_maps(backbone: Backbone, image: str | os.PathLike, text: str) -> dict:
    """Maps over the patches of an image, [rows][columns] each.

    Returns:
        "similarity", to the text; "prompts", one map of each regional prompt, which sums to 1; "band", how many patches
        in reading order belong to each prompt, 0 where prompts attend to all; "pixels", uint8 [height, width, 3], the
        image as the tower reads it.

    Raises:
        UserError: the image cannot be read, or the tower is none that pools at CLS.
    """
    tower, visual, device = backbone.image, backbone.model.visual, backbone.logit_scale.device
    if visual.attn_pool is not None or visual.pool_type != "tok":
        raise UserError("The image tower does not pool at CLS, so its patches have no features. Give another encoder.")
    with explain_failure(f"The image {os.fspath(image)!r} cannot be read", "Give another one."):
        pixels = backbone.read_pixels(open_image(image)).to(device)
    after = tower.embed(backbone.as_floats(pixels[None]))
    for block in range(tower.depth):
        states, after = after, tower.run_block(block, after)
    features = F.normalize(tower.project(after[0, 1:, None]), dim=-1)  # each patch in the place of CLS
    wanted = F.normalize(backbone.encode_text(backbone.tokenize([text]).to(device)), dim=-1)
    maps = {"similarity": (features @ wanted[0]).view(visual.grid_size).tolist(), "prompts": [], "band": 0}
    if tower.prompts:
        last, settings = tower.transformer.resblocks[-1], tower.prompts.settings
        query, _, _ = before_attention(last, tower.prompts.prompts[-1])  # [count, heads, head_dim]
        _, key, _ = before_attention(last, states[0, 1:])
        weights = (torch.einsum("chd,nhd->chn", query, key) / query.shape[-1] ** 0.5).softmax(dim=-1).mean(dim=1)
        maps["prompts"] = weights.view(-1, *visual.grid_size).tolist()
        maps["band"] = tower.patches // settings.count if settings.mask == "bands" else 0
    return maps | {"pixels": pixels.permute(1, 2, 0).cpu().numpy()}


def evaluate_maps(config: MapsConfig) -> dict:
    """Maps of one image by each encoder; writes `image-maps.json` and `image-maps.png` and prints a table.

    Returns:
        The content of the file, see `Session.report`; by encoder `image_maps` without its pixels.

    Raises:
        UserError: the image or an encoder cannot be used.
    """
    session, drawn = Session("image-maps", config, None), {}

    def evaluate(label: str, backbone: Backbone) -> dict:
        drawn[label] = image_maps(backbone, config.image, config.text)
        return {name: part for name, part in drawn[label].items() if name != "pixels"}

    results = session.by_encoder(evaluate)
    return session.report(tables, figures, results, saved={"image-maps.png": plot_maps(drawn)})


def tables(report: dict) -> list[Table]:
    """The range of each map of similarity, over the patches of the image."""
    rows = []
    for label, numbers in report["encoders"].items():
        values = np.asarray(numbers["similarity"])
        rows.append([label, *(f"{value:.3f}" for value in (values.min(), values.mean(), values.max()))])
    return [Table(["cosine of a patch with the text", "least", "mean", "largest"], rows)]


def figures(report: dict) -> dict[str, Figure]:
    """None: they need the image."""
    return {}


def plot_maps(results: Mapping[str, dict]) -> Figure:
    """A row for each encoder, of `{label: image_maps(...)}`: similarity to the text, and each prompt's response.

    Patches outside of a prompt's band are faint. Every map has its own scale.
    """
    columns = 2 + max(len(maps["prompts"]) for maps in results.values())
    figure = Figure(figsize=(2.4 * columns, 2.7 * len(results)), layout="constrained", dpi=150)
    for panels, (label, maps) in zip(
        figure.subplots(len(results), columns, squeeze=False), results.items(), strict=True
    ):
        height, width, _ = maps["pixels"].shape
        named = {label: None, "similarity": maps["similarity"]}
        named |= {f"prompt {number}": of_prompt for number, of_prompt in enumerate(maps["prompts"], 1)}
        for axes in panels:
            axes.axis("off")
        for prompt, (axes, (title, values)) in enumerate(zip(panels, named.items(), strict=False), -2):
            axes.imshow(maps["pixels"], extent=(0, width, height, 0))
            axes.set_title(title, fontsize="small")
            if values is not None:
                patches, band = np.arange(np.size(values)).reshape(np.shape(values)), maps["band"]
                shown = np.full(patches.shape, True) if prompt < 0 or not band else patches // band == prompt
                opacity = np.where(shown, 0.75, _PAD)
                axes.imshow(np.asarray(values), alpha=opacity, extent=(0, width, height, 0), cmap="viridis")
    return figure
