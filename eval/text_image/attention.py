"""Where text encoders look: the attention from EOT to every position of long captions (Figures 1b and S6 to S8)."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm
from transformers import CLIPTokenizer

from debias_diffusion.attention import EotAttention, PositionMeans, check_reads_eot, eot_attention
from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError, reason
from debias_diffusion.interchange import best_of_run, load_text_encoder, load_two_tower
from debias_diffusion.interchange.load import model_and_weights
from debias_diffusion.interchange.text_encoders import TextEncoder
from debias_diffusion.models.backbone import CONFIG_FILE, Backbone
from debias_diffusion.models.shipped import shipped
from debias_diffusion.tokens import CaptionTokenizer

from ..common.cache import Parts
from ..common.encoders import check_encoders, labels
from ..common.inputs import Texts, check_batch_size, check_max_bad, check_output, read_texts
from ..common.intervals import mean_interval
from ..common.report import Table, show, weights_digest, write_report
from .robustness import edit_caption

# By the names of `robustness.EDITS`: the captions as they are, and Figure S7's.
EDITS = {"keep": "captions as they are", "move4": "sentences 1 and 4 swapped"}
QUANTITIES = {"before_softmax": "before the softmax", "after_softmax": "after the softmax"}
# First and last position, SOT being 0. On DOCCI the summary ends at about the 25th (section E.3).
BANDS = ((1, 25), (26, 50), (51, 100), (101, None))
# A position that fewer of the captions reach is drawn dotted: its mean is of few, and of the longest only.
FEW = 0.1


@dataclass
class AttentionConfig:
    """Settings of an evaluation of the attention from EOT.

    What is looked at is `data`, or `dataset` with `root`, a benchmark; or a prompt; or a prompt besides.

    Attributes:
        encoders: Text encoders to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip.
        output: Folder for the results, a JSON and pictures. What is finished there is not done again.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world. Only captions are read; no image need be there.
        dataset: A retrieval benchmark in place of data, all captions of each image. One of urban1k, dci, long-dci,
            docci, iiw, sharegpt4v-1k, coco, flickr30k, flickr30k-test.
        root: Folder that the benchmark lies in, as its authors publish it.
        prompt: One prompt to look at word by word.
        limit: Use only the captions of the first so many images. null uses all; auto is 1000 of the data and all of a
            benchmark.
        batch_size: Captions encoded at once.
        max_bad: Largest share of captions that may be unusable before the evaluation stops, from 0 to 1.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    encoders: list[str]
    output: str
    data: str | None = None
    dataset: str | None = None
    root: str | None = None
    prompt: str | None = None
    limit: int | Literal["auto"] | None = "auto"
    batch_size: int = 64
    max_bad: float = 0.01
    device: str | None = None


@dataclass(frozen=True)
class Reader:
    """A text encoder and what gives it its tokens.

    Attributes:
        encoder: in evaluation mode, on `device`.
        tokenizer: for the encoder's window.
        device: where it runs.
        digest: of the encoder's weights.
    """

    encoder: Backbone | TextEncoder
    tokenizer: CaptionTokenizer
    device: torch.device
    digest: str

    @property
    def window(self) -> int:
        return self.tokenizer.context_length

    def overlong(self, captions: Sequence[str]) -> int:
        """How many captions the window cuts."""
        return sum(self.tokenizer.count(caption) > self.window for caption in captions)

    def depends(self, captions: Sequence[str]) -> dict:
        """Everything that decides what the encoder looks at in these captions."""
        if isinstance(self.encoder, Backbone):
            configuration = self.encoder.config
        else:
            configuration = self.encoder.config.to_dict() | {"_name_or_path": None}
        ids = self.tokenizer.text_ids(list(captions))
        tokens = [self.tokenizer.tokenizer.convert_ids_to_tokens(row) for row in ids]
        return {
            "encoder": self.digest,
            "configuration": configuration,
            "markers": asdict(self.tokenizer.markers),
            "captions": _digest_of([list(captions), ids, tokens]),
        }


def _digest_of(content: list) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def load_reader(name: str, device: torch.device) -> Reader:
    """Loads what `load_text_encoder` takes; two-towers of open_clip as they are.

    Raises:
        UserError: it cannot be loaded, or its output token is not EOT.
    """
    if _is_open_clip(best_of_run(shipped(name))):
        encoder = load_two_tower(name)
        captions = encoder.tokenizer
    else:
        encoder, tokenizer = load_text_encoder(name)
        try:
            captions = CaptionTokenizer(tokenizer, encoder.config.max_position_embeddings)
        except ValueError as error:
            raise UserError(f"The tokenizer of {name!r} cannot be used: {reason(error)}.") from error
    check_reads_eot(encoder)
    return Reader(encoder.to(device).eval(), captions, device, weights_digest(encoder))


def _is_open_clip(place: str) -> bool:
    has_config = (Path(place.removeprefix("local-dir:")) / CONFIG_FILE).is_file()
    return has_config or place.startswith("hf-hub:") or model_and_weights(place) is not None


def look_at_captions(
    reader: Reader, captions: Sequence[str], image_of: Sequence[int], batch_size: int, title: str
) -> dict:
    """What the JSON holds of one encoder's attention in `captions`; what exceeds the window is cut. Shows its progress.

    SOT and EOT stand apart; of the lists of positions the first item is position 1. Whole bands of positions have
    means over all text in them, with 95% intervals, None where no text reaches.

    Args:
        image_of: the image of each caption, from 0.
    """
    means, owners, seen = PositionMeans(reader.window), torch.tensor(image_of), []
    for start in tqdm(range(0, len(captions), batch_size), desc=title):
        batch = slice(start, start + batch_size)
        attention = eot_attention(reader.encoder, reader.tokenizer(list(captions[batch])).to(reader.device))
        means.add(attention)
        seen.append(_at_text(attention, owners[batch]))
    at_text = {name: torch.cat([part[name] for part in seen]).numpy() for name in seen[0]}
    numbers = {"window": reader.window, "cut_captions": reader.overlong(captions)}
    # positions up to the last that ever held text
    numbers["captions_at_position"] = means.counts[1 : len(means.means("before_softmax"))].tolist()
    for name in QUANTITIES:
        sot, *positions = means.means(name).tolist()
        numbers[name] = {"sot": sot, "eot": means.eot(name), **_bands(at_text, name), "positions": positions}
    return numbers


def _at_text(attention: EotAttention, owners: Tensor) -> dict[str, Tensor]:
    """The attention to each position that holds text, [T], with that position and its caption's image."""
    caption, position = attention.is_text.nonzero(as_tuple=True)
    values = {name: getattr(attention, name)[caption, position].double() for name in QUANTITIES}
    return {"position": position, "image": owners[caption], **values}


def _bands(at_text: dict[str, np.ndarray], name: str) -> dict[str, dict]:
    means, intervals = {}, {}
    for first, last in BANDS:
        inside = at_text["position"] >= first
        if last is not None:
            inside &= at_text["position"] <= last
        values, band = at_text[name][inside], f"{first}-{last or ''}"
        means[band] = float(values.mean()) if len(values) else None
        intervals[band] = mean_interval(values, at_text["image"][inside]) if len(values) else None
    return {"bands": means, "band_intervals": intervals}


def split_words(tokenizer: CLIPTokenizer, ids: Sequence[int]) -> list[tuple[str, int]]:
    """(word, how many of the ids it takes) one after the other; CLIP's tokens mark where a word ends."""
    words, own = [], []
    for index, token in enumerate(tokenizer.convert_ids_to_tokens(list(ids)), 1):
        own.append(ids[index - 1])
        if token.endswith("</w>") or index == len(ids):
            words.append((tokenizer.decode(own).strip(), len(own)))
            own = []
    return words


def look_at_prompt(reader: Reader, prompt: str) -> dict:
    """The attention from EOT to each word: before the softmax the mean of the word's tokens, after it their sum.

    Raises:
        UserError: the prompt has no words.
    """
    ids = reader.tokenizer.text_ids([prompt])[0]
    if not ids:
        raise UserError(f"The prompt {prompt!r} holds no words. Give some text.")
    attention = eot_attention(reader.encoder, reader.tokenizer([prompt]).to(reader.device))
    means = PositionMeans(reader.window)
    means.add(attention)  # of one prompt, the means are its values
    before, after = (means.means(name) for name in QUANTITIES)
    words, position = [], 1
    for word, tokens in split_words(reader.tokenizer.tokenizer, ids):
        own = slice(position, position + tokens)
        words.append(
            {
                "word": word,
                "position": position,
                "tokens": tokens,
                "before_softmax": before[own].mean().item(),
                "after_softmax": after[own].sum().item(),
            }
        )
        position += tokens
    ends = {
        name: {"before_softmax": before[at].item(), "after_softmax": after[at].item()}
        for name, at in (("sot", 0), ("eot", -1))
    }
    return {"window": reader.window, "tokens": reader.tokenizer.count(prompt), **ends, "words": words}


def plot(looked: dict[str, dict], captions: int) -> Figure:
    """The curves of `{label: {edit: numbers}}` without SOT: rows before and after the softmax, columns by edit."""
    figure = Figure(figsize=(11, 6.5), layout="constrained", dpi=150)
    panels = figure.subplots(len(QUANTITIES), len(EDITS), sharex=True, sharey="row", squeeze=False)
    for row, (quantity, how) in zip(panels, QUANTITIES.items(), strict=True):
        for axes, (edit, title) in zip(row, EDITS.items(), strict=True):
            for index, (label, found) in enumerate(looked.items()):
                _draw_curve(axes, found[edit], quantity, label, f"C{index}")
            axes.grid(alpha=0.3)
            if quantity == "before_softmax":
                axes.set_title(title)
            else:
                axes.set_xlabel("token position (SOT, 0, is left out)")
        row[0].set_ylabel(f"attention from EOT,\n{how}{' (%)' if quantity == 'after_softmax' else ''}")
    panels[0, 0].legend(fontsize="small")
    figure.suptitle(
        f"Mean over {captions} captions, last layer; dotted where fewer than {FEW:.0%} of them have text",
        fontsize="medium",
    )
    return figure


def _draw_curve(axes, numbers: dict, quantity: str, label: str, colour: str) -> None:
    scale = 100.0 if quantity == "after_softmax" else 1.0
    heights = [scale * value for value in numbers[quantity]["positions"]]
    counts = numbers["captions_at_position"]
    # As every caption begins at position 1, fewer and fewer reach each next one.
    many = sum(count >= FEW * counts[0] for count in counts)
    positions = range(1, len(heights) + 1)
    axes.plot(positions[:many], heights[:many], color=colour, label=f"{label} ({numbers['window']} positions)")
    axes.plot(positions[max(many - 1, 0) :], heights[max(many - 1, 0) :], ":", color=colour, linewidth=1)


_COLUMNS = 100  # characters in a line of the picture of a prompt
_SIZE = 9  # points; a character of matplotlib's own monospaced font is 0.602 of that wide
_LINE = 0.24  # inches


def plot_prompt(looked: dict[str, dict]) -> Figure:
    """The words of `{label: look_at_prompt(...)}`, shaded by their share of the attention after the softmax.

    One scale for all encoders, which the first line shows. It grows with the root of the share, because a few words
    usually take so much that all others would be white.
    """
    most = max(word["after_softmax"] for found in looked.values() for word in found["words"])
    lines = {label: _lines([word["word"] for word in found["words"]]) for label, found in looked.items()}
    # In lines: two for the scale; for each encoder its title, its words and an empty one.
    height = 2 + sum(len(own) + 2 for own in lines.values())
    figure = Figure(figsize=((_COLUMNS + 4) * _SIZE * 0.602 / 72, _LINE * height), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-2, _COLUMNS + 2), ylim=(height, -0.5))
    axes.axis("off")
    scale = [most * part for part in (0.01, 0.1, 0.25, 0.5, 1.0)]
    words = ["attention from EOT, last layer:", *(f"{share:.2%}" for share in scale)]
    _write_words(axes, 0, words, [0.0, *scale], most)
    top = 2
    for label, found in looked.items():
        _write(axes, 0, top, _title(label, found), weight="bold")
        shares = iter([word["after_softmax"] for word in found["words"]])
        for line, words in enumerate(lines[label], top + 1):
            _write_words(axes, line, words, [next(shares) for _ in words], most)
        top += len(lines[label]) + 2
    return figure


def _lines(words: Sequence[str]) -> list[list[str]]:
    """Words in lines of at most `_COLUMNS` characters; a longer word has a line of its own."""
    lines, used = [[]], 0
    for word in words:
        if lines[-1] and used + len(word) > _COLUMNS:
            lines.append([])
            used = 0
        lines[-1].append(word)
        used += len(word) + 1
    return lines


def _title(label: str, found: dict) -> str:
    window, tokens = found["window"], found["tokens"]
    read = f"{tokens} tokens" if tokens <= window else f"the first {window} of {tokens} tokens"
    ends = ", ".join(f"{name.upper()} {found[name]['after_softmax']:.1%}" for name in ("sot", "eot"))
    return f"{label}: {read}; {ends}"


def _write_words(axes, line: int, words: Sequence[str], shares: Sequence[float], most: float) -> None:
    column = 0
    for word, share in zip(words, shares, strict=True):
        colour = (0.9, 0.35, 0.1, math.sqrt(share / most))
        axes.bar(column - 0.3, 0.84, len(word) + 0.6, line + 0.08, align="edge", color=colour, linewidth=0)
        _write(axes, column, line, word)
        column += len(word) + 1


def _write(axes, column: int, line: int, text: str, **style) -> None:
    # A dollar sign is itself, and no formula's beginning.
    style |= {"family": "monospace", "size": _SIZE, "va": "center", "parse_math": False, "clip_on": True}
    axes.text(column, line + 0.5, text, **style)


def _check(config: AttentionConfig) -> None:
    check_output(config.output)
    check_encoders(config.encoders)
    check_batch_size(config.batch_size)
    check_max_bad(config.max_bad)
    if all(given is None for given in (config.data, config.dataset, config.root, config.prompt)):
        raise UserError(
            "There is nothing to read: no data, no dataset and no prompt is given. Give --data, --dataset with --root, "
            "or --prompt."
        )


def _read(config: AttentionConfig) -> Texts | None:
    if config.data is None and config.dataset is None and config.root is None:
        return None
    return read_texts(config.data, config.dataset, config.root, config.limit, config.max_bad)


def _look(config: AttentionConfig, reader: Reader, label: str, texts: Texts | None, parts: Parts) -> dict:
    """What the JSON holds of one encoder; what is finished is not looked at again."""
    found = {}
    if texts:
        found["attention"] = {edit: _look_at_edit(config, reader, label, texts, edit, parts) for edit in EDITS}
    if config.prompt is not None:
        depends = reader.depends([config.prompt])
        found["prompt"] = parts.result("prompt", depends, lambda: look_at_prompt(reader, config.prompt))
    return found


def _look_at_edit(config: AttentionConfig, reader: Reader, label: str, texts: Texts, edit: str, parts: Parts) -> dict:
    captions = [edit_caption(caption, edit) for caption in texts.captions]

    def work() -> dict:
        return look_at_captions(reader, captions, texts.image_of, config.batch_size, f"{label}, {edit}")

    depends = reader.depends(captions) | {"image_of": _digest_of(texts.image_of)}
    return parts.result("attention", depends, work)


def evaluate_attention(config: AttentionConfig) -> dict:
    """The attention from EOT of several encoders, over captions, and in one prompt.

    Writes `attention.json`, `attention.png` (of captions) and `attention_prompt.png` (of a prompt) into
    `config.output`, and prints tables.

    Returns:
        What the JSON holds: settings, versions, digests, how many captions; by encoder the numbers of each edit
        ("attention") and the words of the prompt ("prompt"), where asked for; what was left out, seconds. Numbers are
        raw: shares, not percent.

    Raises:
        UserError: a setting cannot be used.
    """
    _check(config)
    texts, device = _read(config), pick_device(config.device)
    parts = Parts(Path(config.output) / "parts")

    def look(name: str, label: str) -> tuple[str, dict]:
        reader = load_reader(name, device)
        return reader.digest, _look(config, reader, label, texts, parts)

    # No variable holds an encoder, or it would stay while the next is loaded.
    pairs = zip(config.encoders, labels(config.encoders), strict=True)
    found = {label: look(name, label) for name, label in pairs}
    report = write_report(
        "attention",
        config,
        digests={
            "data": texts.digest if texts else None,
            "encoders": {label: digest for label, (digest, _) in found.items()},
        },
        left_out=texts.bad if texts else [],
        seconds=parts.seconds,
        captions=len(texts.captions) if texts else 0,
        encoders={label: its for label, (_, its) in found.items()},
        compared=[],
        notes=[_NOTE],
    )
    show(report, tables(report), figures(report))
    if config.prompt is not None:
        print(f"Word by word, in {', '.join(found)}: {Path(config.output) / 'attention_prompt.png'}")
    return report


_NOTE = (
    "Before the softmax only differences within one encoder mean something: compare how far the curves fall, not how "
    "high they lie."
)


def _of(report: dict, what: str) -> dict[str, dict]:
    """ "attention", or "prompt", by encoder; empty where it was not asked for."""
    return {label: its[what] for label, its in report["encoders"].items() if what in its}


def tables(report: dict) -> list[Table]:
    """A report's means by bands of positions, before and after the softmax, and what was cut."""
    looked, found = _of(report, "attention"), []
    bands = [f"{first}-{last or ''}" for first, last in BANDS]
    for quantity, how in QUANTITIES.items():
        unit, scale = ("percent", 100.0) if quantity == "after_softmax" else ("mean", 1.0)
        rows = []
        for edit in EDITS:
            for label, its in looked.items():
                numbers = its[edit][quantity]
                cells = [numbers["sot"], *numbers["bands"].values(), numbers["eot"]]
                scaled = (None if cell is None else scale * cell for cell in cells)
                rows.append([f"{label}, {edit}", its[edit]["cut_captions"], *scaled])
        if rows:
            found.append(Table([f"attention from EOT {how}, {unit}", "captions cut", "SOT", *bands, "EOT"], rows))
    return found


def figures(report: dict) -> dict[str, Figure]:
    """The pictures of a report, by their files' names."""
    looked, words = _of(report, "attention"), _of(report, "prompt")
    curves = {"attention.png": plot(looked, report["captions"])} if looked else {}
    return curves | ({"attention_prompt.png": plot_prompt(words)} if words else {})
