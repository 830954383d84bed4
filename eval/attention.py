"""Where text encoders look: the attention from EOT to every position of long captions (Figures 1b and S6 to S8)."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import CLIPTokenizer

from debias_diffusion.attention import PositionMeans, check_reads_eot, eot_attention
from debias_diffusion.backbones import CONFIG_FILE, Backbone, load_backbone
from debias_diffusion.data import is_shards
from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError, reason
from debias_diffusion.files import write_json
from debias_diffusion.interchange import best_of_run, load_text_encoder
from debias_diffusion.interchange.encoders import TextEncoder
from debias_diffusion.tokens import CaptionTokenizer
from debias_diffusion.toyworld.shipped import shipped

from .inputs import Pairs, check_batch_size, read_pairs
from .report import table, versions, weights_digest
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

    Attributes:
        encoders: Text encoders to compare: folders, files or names, anything that `load_text_encoder` takes, such as
            toy/clip and toy/debias-clip.
        output: Folder for the results: `attention.json`, `attention.png` of the data, and `attention_prompt.png` of the
            prompt.
        data: JSON file in ShareGPT4V's layout, JSONL file, or folder of WebDataset shards. Only its captions are read.
        prompt: One prompt to look at word by word.
        limit: Use only the first so many captions. null uses all.
        batch_size: Captions encoded at once.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    encoders: list[str]
    output: str
    data: str | None = None
    prompt: str | None = None
    limit: int | None = 1000
    batch_size: int = 64
    device: str | None = None


@dataclass(frozen=True)
class Reader:
    """A text encoder and what gives it its tokens.

    Attributes:
        encoder: in evaluation mode, on `device`.
        tokenizer: for the encoder's window.
        device: where it runs.
    """

    encoder: Backbone | TextEncoder
    tokenizer: CaptionTokenizer
    device: torch.device

    @property
    def window(self) -> int:
        return self.tokenizer.context_length

    def overlong(self, captions: Sequence[str]) -> int:
        """How many captions the window cuts."""
        return sum(self.tokenizer.count(caption) > self.window for caption in captions)


def load_reader(name: str, device: torch.device) -> Reader:
    """Loads what `load_text_encoder` takes; two-towers of open_clip as they are.

    Raises:
        UserError: it cannot be loaded, or its output token is not EOT.
    """
    place = best_of_run(shipped(name))
    if place.startswith("hf-hub:") or (Path(place.removeprefix("local-dir:")) / CONFIG_FILE).is_file():
        encoder = load_backbone(place)
        captions = encoder.tokenizer
    else:
        encoder, tokenizer = load_text_encoder(name)
        try:
            captions = CaptionTokenizer(tokenizer, encoder.config.max_position_embeddings)
        except ValueError as error:
            raise UserError(f"The tokenizer of {name!r} cannot be used: {reason(error)}.") from error
    check_reads_eot(encoder)
    return Reader(encoder.to(device).eval(), captions, device)


def labels(encoders: Sequence[str]) -> list[str]:
    """Short names for plots: names as they are, of paths the last part, or as many parts as tell them apart."""
    paths = [Path(name) if os.path.exists(name) else None for name in encoders]
    pairs = list(zip(encoders, paths, strict=True))
    for parts in range(1, max((len(path.parts) for path in paths if path), default=1) + 1):
        short = [name if path is None else str(Path(*path.parts[-parts:])) for name, path in pairs]
        if len(set(short)) == len(short):
            return short
    return list(encoders)


def position_means(reader: Reader, captions: Sequence[str], batch_size: int, title: str) -> PositionMeans:
    """The mean attention from EOT over all `captions`; what exceeds the window is cut. Shows its progress."""
    means = PositionMeans(reader.window)
    for start in tqdm(range(0, len(captions), batch_size), desc=title):
        tokens = reader.tokenizer(list(captions[start : start + batch_size])).to(reader.device)
        means.add(eot_attention(reader.encoder, tokens))
    return means


def _numbers(means: PositionMeans) -> dict:
    """What the JSON holds of one encoder's means: SOT and EOT apart, then lists of which the first item is position 1,
    and the means over whole bands of positions (None where no text reaches)."""
    counts = means.counts[: len(means.means("before_softmax"))]
    numbers = {"captions_at_position": counts[1:].tolist()}
    for name in QUANTITIES:
        values = means.means(name)
        totals = values * counts
        bands = {}
        for first, last in BANDS:
            band = slice(first, None if last is None else last + 1)
            held = int(counts[band].sum())
            bands[f"{first}-{last or ''}"] = totals[band].sum().item() / held if held else None
        numbers[name] = {
            "sot": values[0].item(),
            "eot": means.eot(name),
            "bands": bands,
            "positions": values[1:].tolist(),
        }
    return numbers


def look_at_captions(reader: Reader, captions: Sequence[str], batch_size: int, label: str) -> dict:
    """{edit: numbers} of one encoder"""
    found = {}
    for edit in EDITS:
        edited = [edit_caption(caption, edit) for caption in captions]
        means = position_means(reader, edited, batch_size, f"{label}, {edit}")
        found[edit] = {"window": reader.window, "cut_captions": reader.overlong(edited)} | _numbers(means)
    return found


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


def _print_tables(looked: dict[str, dict]) -> None:
    for quantity, how in QUANTITIES.items():
        unit, scale = ("percent", 100.0) if quantity == "after_softmax" else ("mean", 1.0)
        rows = []
        for edit in EDITS:
            for label, found in looked.items():
                numbers = found[edit][quantity]
                cells = [numbers["sot"], *numbers["bands"].values(), numbers["eot"]]
                rows.append([f"{label}, {edit}", *(None if cell is None else scale * cell for cell in cells)])
        bands = [f"{first}-{last or ''}" for first, last in BANDS]
        print(table([f"attention from EOT {how}, {unit}", "SOT", *bands, "EOT"], rows))


def _check(config: AttentionConfig) -> None:
    check_batch_size(config.batch_size)
    if not config.encoders or len(set(config.encoders)) < len(config.encoders):
        raise UserError(f"encoders={config.encoders} is not allowed. Name at least one encoder, and none twice.")
    if config.data is None and config.prompt is None:
        raise UserError("There is nothing to read: neither data nor a prompt is given. Give one of them, or both.")
    for name in config.encoders:
        shipped(name)  # a toy that is misspelt is told before others are loaded


def _read(config: AttentionConfig) -> Pairs | None:
    if config.data is None:
        return None
    # No image is opened, so it does not matter where they lie; the folder has only to be there.
    images = None if is_shards(Path(config.data)) else os.fspath(Path(config.data).parent)
    return read_pairs(config.data, images, config.limit)


def evaluate_attention(config: AttentionConfig) -> dict:
    """The attention from EOT of several encoders, over captions, and in one prompt.

    Writes `attention.json`, `attention.png` (of data) and `attention_prompt.png` (of a prompt) into `config.output`,
    and prints tables.

    Returns:
        What the JSON holds: settings, versions, digests, how many captions, the numbers by encoder and edit, the
        prompt's words by encoder, the pairs left out, seconds. Numbers are raw: shares, not percent.

    Raises:
        UserError: a setting cannot be used.
    """
    started = time.monotonic()
    _check(config)
    pairs, device = _read(config), pick_device(config.device)
    captions = [record.caption for record in pairs.records] if pairs else []
    looked, words, digests = {}, {}, {}
    for name, label in zip(config.encoders, labels(config.encoders), strict=True):
        reader = load_reader(name, device)
        digests[label] = weights_digest(reader.encoder)
        if pairs:
            looked[label] = look_at_captions(reader, captions, config.batch_size, label)
        if config.prompt is not None:
            words[label] = look_at_prompt(reader, config.prompt)
    report = {
        "settings": asdict(config),
        "versions": versions(),
        "digests": {"data": pairs.digest if pairs else None, "encoders": digests},
        "captions": len(captions),
        "attention": looked,
        "prompt": words,
        "left_out": [asdict(record) for record in pairs.bad] if pairs else [],
        "seconds": round(time.monotonic() - started, 1),
    }
    output = Path(config.output)
    write_json(output / "attention.json", report)
    if looked:
        plot(looked, len(captions)).savefig(output / "attention.png")
        _print_tables(looked)
    if words:
        plot_prompt(words).savefig(output / "attention_prompt.png")
        print(f"Word by word, in {', '.join(words)}: {output / 'attention_prompt.png'}")
    return report
