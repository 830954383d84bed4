"""The attention from EOT to every position of long captions (Figures 1b and S6 to S8 of the paper)."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, product

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import CLIPTokenizer

from debias_diffusion.ablation.heads import fold_text_heads
from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.weight_files import model_digest
from debias_diffusion.encoders.spec import EncoderSpec, Kind
from debias_diffusion.encoders.text_encoders import TextEncoder
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import json_digest
from debias_diffusion.text.tokens import CaptionTokenizer

from .caption_edits import edit_caption
from .eot_attention import check_reads_eot, eot_attention
from .intervals import group_numbers, mean_interval
from .options import AttentionConfig
from .report import FEW, Table, draw_by_position
from .session import Pairs, Session, read_source

# By the names of `caption_edits.EDITS`: the captions as they are, and Figure S7's.
EDITS = {"keep": "captions as they are", "move4": "sentences 1 and 4 swapped"}
QUANTITIES = {"before_softmax": "before the softmax", "after_softmax": "after the softmax"}
# First and last position, SOT being 0. On DOCCI the summary ends at about the 25th (section E.3).
BANDS = ((1, 25), (26, 50), (51, 100), (101, None))
NOTE = (
    "Before the softmax attention is in standard deviations from its mean, both over each caption's text, because the "
    "scale of q k differs by encoder."
)


@dataclass(frozen=True)
class CaptionReader:
    """A text encoder with its tokenizer.

    Attributes:
        encoder: in evaluation mode, on `device`.
        tokenizer: for the encoder's context length.
        device: where it runs.
    """

    encoder: Backbone | TextEncoder
    tokenizer: CaptionTokenizer
    device: torch.device

    @cached_property
    def digest(self) -> str:
        """See `model_digest`."""
        return model_digest(self.encoder, self.encoder.config, self.tokenizer.tokenizer)

    def depends(self, captions: Sequence[str]) -> dict:
        """Everything that affects the attention in these captions, for the cache."""
        return {"encoder": self.digest, "captions": json_digest({"all": list(captions)})}


def load_caption_reader(spec: EncoderSpec, device: torch.device) -> CaptionReader:
    """Loads a text encoder; two-towers of open_clip without conversion.

    Raises:
        UserError: the encoder cannot be loaded, pools another token than EOT, or has suppressed heads that no weights
            can express.
    """
    if spec.kind is Kind.OPEN_CLIP:
        encoder = spec.load_two_tower()
        fold_text_heads(encoder)  # attention is measured with the plain attention, as in `load_text_encoder`
        captions = encoder.tokenizer
    else:
        encoder, tokenizer = spec.load_text_encoder()
        with explain_failure(f"The tokenizer of {spec.name!r} cannot be used"):
            captions = CaptionTokenizer(tokenizer, encoder.config.max_position_embeddings)
    check_reads_eot(encoder)
    return CaptionReader(encoder.to(device).eval(), captions, device)


def look_at_captions(
    reader: CaptionReader, captions: Sequence[str], groups: Sequence[Hashable], batch_size: int, title: str
) -> dict:
    """The numbers of one encoder's attention in `captions`, cut at the context length. Shows a progress bar.

    SOT and EOT have numbers of their own, and count as no text (as EOT does in equation 3); the lists of positions
    begin with position 1. Bands of positions have means over all text in them, with 95% intervals; None if no text
    reaches them.

    Args:
        groups: of the captions, see `intervals.Groups`.

    Raises:
        UserError: no caption holds any text.
    """
    tokenizer, numbers = reader.tokenizer, torch.from_numpy(group_numbers(groups))
    batches, ends = [], {name: {"sot": [], "eot": []} for name in QUANTITIES}
    for start in tqdm(range(0, len(captions), batch_size), desc=title):
        batch = slice(start, start + batch_size)
        attention = eot_attention(reader.encoder, tokenizer(list(captions[batch])).to(reader.device))
        caption, position = attention.is_text.nonzero(as_tuple=True)
        batches.append({"position": position, "group": numbers[batch][caption]})
        for name in QUANTITIES:
            values = getattr(attention, name).double()
            batches[-1][name] = values[caption, position]
            ends[name]["sot"] += values[:, 0].tolist()
            ends[name]["eot"] += values[torch.arange(len(values)), attention.ends - 1].tolist()
    # Of each position that holds text, [T]: it, its caption's group, and the attention to it.
    at_text = {name: torch.cat([batch[name] for batch in batches]).numpy() for name in batches[0]}
    if not len(at_text["position"]):
        raise UserError("No caption holds any text. Give other data.")
    counts = np.bincount(at_text["position"])[1:]
    result = {
        "window": tokenizer.context_length,
        "cut_captions": sum(tokenizer.count(caption) > tokenizer.context_length for caption in captions),
        "captions_at_position": counts.tolist(),
    }
    for name, of_ends in ends.items():
        positions = (np.bincount(at_text["position"], at_text[name])[1:] / counts).tolist()  # equation 3
        means = {end: float(np.mean(values)) for end, values in of_ends.items()}
        result[name] = means | _bands(at_text, name) | {"positions": positions}
    return result


def _bands(at_text: dict[str, np.ndarray], name: str) -> dict[str, dict]:
    means, intervals = {}, {}
    for first, last in BANDS:
        inside = (at_text["position"] >= first) & (at_text["position"] <= (last or np.inf))
        values, band = at_text[name][inside], f"{first}-{last or ''}"
        means[band] = float(values.mean()) if len(values) else None
        intervals[band] = mean_interval(values, at_text["group"][inside].tolist()) if len(values) else None
    return {"bands": means, "band_intervals": intervals}


def split_words(tokenizer: CLIPTokenizer, ids: Sequence[int]) -> list[tuple[str, int]]:
    """(word, its number of tokens) for each word; CLIP's tokens mark where a word ends."""
    ends = [end for end, token in enumerate(tokenizer.convert_ids_to_tokens(list(ids)), 1) if token.endswith("</w>")]
    ends = list(dict.fromkeys([0, *ends, len(ids)]))
    return [(tokenizer.decode(ids[start:end]).strip(), end - start) for start, end in pairwise(ends)]


def look_at_prompt(reader: CaptionReader, prompt: str) -> dict:
    """The attention from EOT to each word of a prompt, cut at the context length; see `look_at_tokens`.

    Raises:
        UserError: the prompt has no words.
    """
    tokenizer = reader.tokenizer
    ids = tokenizer.text_ids([prompt])[0]
    if not ids:
        raise UserError(f"The prompt {prompt!r} holds no words. Give some text.")
    return {"window": tokenizer.context_length, "tokens": tokenizer.count(prompt), **look_at_tokens(reader, ids)}


def look_at_tokens(reader: CaptionReader, ids: list[int], first: int = 1) -> dict:
    """The attention from EOT to each word: the mean over the word's tokens before the softmax, their sum after it.

    Args:
        reader: the encoder.
        ids: of a text without SOT and EOT, at least one, within the context length.
        first: the position that the first token is given.

    Returns:
        `sot` and `eot`, and `words`, in order.
    """
    attention = eot_attention(reader.encoder, reader.tokenizer.batch([ids]).to(reader.device))
    before, after = (getattr(attention, name)[0].double() for name in QUANTITIES)
    words, place = [], 1
    for word, tokens in split_words(reader.tokenizer.tokenizer, ids):
        places = slice(place, place + tokens)
        values = {"before_softmax": before[places].mean().item(), "after_softmax": after[places].sum().item()}
        words.append({"word": word, "position": place + first - 1, "tokens": tokens, **values})
        place += tokens
    sot, eot = ({"before_softmax": before[at].item(), "after_softmax": after[at].item()} for at in (0, -1))
    return {"sot": sot, "eot": eot, "words": words}


def _evaluate(session: Session, pairs: Pairs | None, label: str, reader: CaptionReader) -> dict:
    """The numbers of one encoder, from the cache where they are finished."""
    config, result = session.config, {}
    if pairs:
        groups = {"groups": json_digest({"all": pairs.groups})}
        look = partial(look_at_captions, reader, groups=pairs.groups, batch_size=config.batch_size)
        result["attention"] = {}
        for edit in EDITS:
            captions = [edit_caption(caption, edit) for caption in pairs.captions]
            compute = partial(look, captions, title=f"{label}, {edit}")
            result["attention"][edit] = session.cache.result("attention", reader.depends(captions) | groups, compute)
    if config.prompt is not None:
        depends = reader.depends([config.prompt])
        result["prompt"] = session.cache.result("prompt", depends, partial(look_at_prompt, reader, config.prompt))
    return result


def evaluate_attention(config: AttentionConfig) -> dict:
    """The attention from EOT of several encoders, over captions, in one prompt, or both.

    Writes `attention.json`, `attention.png` (of captions) and `attention_prompt.png` (of a prompt) into
    `config.output`, and prints tables.

    Returns:
        The content of the JSON, see `Session.report`, with the number of captions; by encoder the numbers of each edit
        ("attention") and the words of the prompt ("prompt"), where requested. Numbers are shares, not percent.

    Raises:
        UserError: the data or an encoder cannot be used.
    """
    pairs = read_source(config, config.labelled, config.held_out, only_captions=True) if config.has_captions else None
    session = Session("attention", config, pairs)
    results = session.by_encoder(partial(_evaluate, session, pairs), load_caption_reader)
    captions = len(pairs.captions) if pairs else 0
    return session.report(tables, figures, results, notes=[NOTE], captions=captions)


def _of(report: dict, part: str) -> dict[str, dict]:
    """The part "attention" or "prompt" of each encoder's numbers; empty if it was not requested."""
    return {label: numbers[part] for label, numbers in report["encoders"].items() if part in numbers}


def tables(report: dict) -> list[Table]:
    """A report's means by bands of positions, before and after the softmax, and how many captions were cut."""
    results, by_quantity = _of(report, "attention"), []
    bands = [f"{first}-{last or ''}" for first, last in BANDS]
    for quantity, title in QUANTITIES.items() if results else ():
        unit, scale = ("percent", 100.0) if quantity == "after_softmax" else ("standard deviations", 1.0)
        rows = []
        for edit, (label, result) in product(EDITS, results.items()):
            numbers = result[edit][quantity]
            cells = [numbers["sot"], *numbers["bands"].values(), numbers["eot"]]
            scaled = (None if cell is None else scale * cell for cell in cells)
            rows.append([f"{label}, {edit}", result[edit]["cut_captions"], *scaled])
        by_quantity.append(Table([f"attention from EOT {title}, {unit}", "captions cut", "SOT", *bands, "EOT"], rows))
    return by_quantity


def figures(report: dict) -> dict[str, Figure]:
    """The figures of a report, by file name."""
    results, words = _of(report, "attention"), _of(report, "prompt")
    curves = {"attention.png": plot(results, report["captions"])} if results else {}
    return curves | ({"attention_prompt.png": plot_prompt(words)} if words else {})


def plot(results: dict[str, dict], captions: int) -> Figure:
    """The curves of `{label: {edit: numbers}}` without SOT: rows before and after the softmax, columns by edit."""
    figure = Figure(figsize=(11, 6.5), layout="constrained", dpi=150)
    panels = figure.subplots(len(QUANTITIES), len(EDITS), sharex=True, sharey="row", squeeze=False)
    for row, (quantity, title) in zip(panels, QUANTITIES.items(), strict=True):
        scale, unit = (100.0, " (%)") if quantity == "after_softmax" else (1.0, " (deviations)")
        for axes, edit in zip(row, EDITS, strict=True):
            for index, (label, of_edits) in enumerate(results.items()):
                numbers = of_edits[edit]
                heights = [scale * value for value in numbers[quantity]["positions"]]
                name = f"{label} ({numbers['window']} positions)"
                draw_by_position(axes, heights, numbers["captions_at_position"], name, f"C{index}")
            axes.grid(alpha=0.3)
        row[0].set_ylabel(f"attention from EOT,\n{title}{unit}")
    for top, bottom, title in zip(*panels, EDITS.values(), strict=True):
        top.set_title(title)
        bottom.set_xlabel("token position (SOT, 0, is left out)")
    panels[0, 0].legend(fontsize="small")
    figure.suptitle(
        f"Mean over {captions} captions, last layer; dotted where fewer than {FEW:.0%} of them have text",
        fontsize="medium",
    )
    return figure


def plot_prompt(results: dict[str, dict]) -> Figure:
    """The share of the attention after the softmax of each word of `{label: look_at_prompt(...)}`, a row for each."""
    most = max(len(result["words"]) for result in results.values())
    figure = Figure(figsize=(max(8, 2 + 0.16 * most), 2.2 * len(results)), layout="constrained", dpi=150)
    rows = figure.subplots(len(results), sharey=True, squeeze=False)[:, 0]
    for index, (axes, (label, result)) in enumerate(zip(rows, results.items(), strict=True)):
        words, read, tokens = result["words"], result["window"], result["tokens"]
        axes.bar(range(len(words)), [100 * word["after_softmax"] for word in words], color=f"C{index}")
        # parse_math: a dollar sign begins no formula.
        names = {"labels": [word["word"] for word in words], "rotation": 90, "fontsize": 7, "parse_math": False}
        axes.set_xticks(range(len(words)), **names)
        axes.set(xlim=(-1, most), ylabel="attention from EOT,\nlast layer (%)")
        part = f"{tokens} tokens" if tokens <= read else f"the first {read} of {tokens} tokens"
        ends = ", ".join(f"{name.upper()} {result[name]['after_softmax']:.1%}" for name in ("sot", "eot"))
        axes.set_title(f"{label}: {part}; {ends}", fontsize="medium", loc="left")
    return figure
