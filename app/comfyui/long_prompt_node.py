"""What the node does: chunks that end with sentences, both encoders of SDXL aligned."""

import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

try:
    from . import chunks
except ImportError:
    from debias_diffusion.text import chunks  # in the package: `debias-diffusion comfyui` writes a folder without it

# By ComfyUI's names, in the order in which it concatenates their states.
ENCODERS = {"l": "CLIP-L", "g": "bigG", "h": "CLIP-H"}
READINGS = ("overlap", "separate", "a1111", "kohya", "comfyui")  # of `chunks.Reading`

# A character of a word. ComfyUI looks for `embedding:name` after all that Python calls white space, and its tokenizer
# takes the control characters among them for text.
_CHARACTER = r"(?: (?! (?<= [\x1c-\x1f] ) embedding: ) [\S\x1c-\x1f] )"

# A piece of text that is tokenized by itself.
_PIECE = re.compile(
    rf"""
    embedding (?= : (?: \s | $ ) )                                # without a name it is text
    | embedding: {_CHARACTER}+
    | {_CHARACTER}*?                                              # up to a mark that no white space follows
      (?: [。！？，、；：] | [.!?…] (?! ["'”’»)\]}}]* \d ) ) ["'”’»)\]}}]* (?= [^\W_] ) (?! embedding: )
    | {_CHARACTER}+
    """,
    re.VERBOSE,
)

WeightedToken = tuple[Any, float]  # an id, or the vector [width] of a textual inversion, and its weight
Clip = Any  # `comfy.sd.CLIP`; ComfyUI is no dependency


def encode_prompt(
    clip: Clip,
    text: str | None = None,
    text_g: str | None = None,
    text_l: str | None = None,
    reading: str = "overlap",
    multiple_of_77: bool = True,
    breaks: bool = False,
    match: list | None = None,
    **sizes: int,
) -> tuple[list, str]:
    """The conditioning for a text of any length: that of `debias_diffusion.pipelines` with the same weights.

    Only calls of ComfyUI's own `CLIPTextEncode` are used, so LoRAs, hooks, CLIP skip and memory management work as
    there, and a prompt that fits 77 tokens is encoded as there, except in kohya's reading.

    Args:
        clip: of SDXL, its refiner, SD 1.5, SD 2 or Stable Cascade; each encoder may have any context length.
        text: with ComfyUI's weights and `embedding:name`.
        text_g, text_l: what bigG and CLIP-L read in place of `text`, unless empty.
        reading: one of `READINGS`; see `chunks.split_text` and `chunks.positions_of`.
        multiple_of_77: the result's length is a multiple of 77, except in kohya's reading.
        breaks: BREAK begins a new chunk; chunks without a token are left out.
        match: conditioning, the length of which the result has at least, except in kohya's reading.
        sizes: `width`, `height`, `crop_w`, `crop_h`, `target_width`, `target_height` for SDXL's UNet, in pixels, as of
            ComfyUI's `CLIPTextEncodeSDXL`; 0 leaves one to the sampler, which takes the size of the image and no crop.

    Returns:
        the conditioning, and the chunks as text. The conditioning is pairs of embeddings [1, positions, width of
        all encoders] and a dict with `pooled_output` [1, pooled width] of the first chunk and the sizes; more than one
        pair if the CLIP's hooks follow a schedule.

    Raises:
        RuntimeError, ValueError: `clip` is None, or has other text encoders than CLIP; an encoder has no text, or a
            text no encoder.
    """
    if clip is None:
        raise RuntimeError("the clip input is None. If its checkpoint holds no text encoder, use DualCLIPLoader")
    empty = empty_rows(clip)
    prompts = choose_texts(text, {"g": text_g, "l": text_l}, empty)
    read = {name: read_text(clip, prompt, name, reading, breaks) for name, prompt in prompts.items()}
    positions = count_positions([read[name].tokens for name in empty], [len(row) for row in empty.values()], reading)
    if reading != "kohya":
        positions = max([positions, *(embeds.shape[1] for embeds, _ in match or [])])
        positions += -positions % chunks.TRAINED_POSITIONS if multiple_of_77 else 0
    inputs = {name: split_rows(read[name].tokens, row, positions, reading) for name, row in empty.items()}
    needed = 1 + max(max(given.kept) for given in inputs.values())
    rows = {  # and empty ones: SDXL's states are cut to the shorter of its two encoders'
        name: given.rows + [empty[name]] * (-(-needed // len(empty[name])) - len(given.rows))
        for name, given in inputs.items()
    }
    given = {name: size for name, size in sizes.items() if size}
    conditioning = [
        [join_encoders(embeds, [rows.kept for rows in inputs.values()], extras["pooled_output"]), extras]
        for embeds, extras in clip.encode_from_tokens_scheduled(rows, add_dict=given)
    ]
    shown = [show_chunks(ENCODERS[name], inputs[name].split, read[name].spans, read[name].plain) for name in inputs]
    return conditioning, "\n\n".join(shown)


def choose_texts(text: str | None, texts: dict[str, str | None], encoders: Collection[str]) -> dict[str, str]:
    """What each of the encoders reads: its own text, unless that is empty or absent, and `text` otherwise."""
    for name, prompt in texts.items():
        if prompt and name not in encoders:
            raise ValueError(f"this CLIP has no {ENCODERS[name]}, which reads `text_{name}`: leave that input empty")
    lacking = [name for name in encoders if text is None and texts.get(name) is None]
    if lacking:
        raise ValueError(f"no text for {ENCODERS[lacking[0]]}: give `text`, or `text_g` and `text_l`")
    return {name: texts.get(name) or text or "" for name in encoders}


class EncoderInput(NamedTuple):
    """What one text encoder reads."""

    split: list[chunks.Chunk]  # of the text
    rows: list[list[WeightedToken]]  # of each chunk, `[BOS, text, EOS, pads]`; empty rows follow
    kept: list[int]  # positions of the result, numbered through all rows


# What looks into ComfyUI: these three functions, `clip.tokenize` and `clip.encode_from_tokens_scheduled`.


def empty_rows(clip: Clip) -> dict[str, list[WeightedToken]]:
    """The tokens of an empty text for each encoder of `clip`: `[BOS, EOS, pads]`, as many as it has positions."""
    rows = clip.tokenize("")
    if not rows or set(rows) - set(ENCODERS):
        raise ValueError(
            f"this CLIP has the text encoders {', '.join(sorted(rows))}, and the long-prompt node reads those of SDXL, "
            "SD 1.5, SD 2 and Stable Cascade: use ComfyUI's own CLIP Text Encode here"
        )
    # The refiner's tokenizer is SDXL's, but its model has bigG only.
    model = clip.cond_stage_model
    return {name: rows[name][0] for name in ENCODERS if name in rows and hasattr(model, f"clip_{name}")}


class EncoderText(NamedTuple):
    """A text as one encoder reads it."""

    tokens: chunks.Tokens
    spans: list[tuple[int, int]]  # of each token, in `plain`
    plain: str  # the text without the signs of weights


class Word(NamedTuple):
    """A piece of a prompt that is tokenized by itself."""

    start: int
    end: int
    weight: float
    run: int  # number of the run of text of one weight


def weighted_words(text: str, breaks: bool = False) -> tuple[list[Word], str, list[int]]:
    """The pieces of a prompt, the prompt without the signs of weights, and the places of its BREAKs if they count."""
    from comfy.sd1_clip import escape_important, token_weights, unescape_important  # only ComfyUI has it

    runs = [
        [(number, weight, piece) for piece in re.split(r"\b(BREAK)\b" if breaks else "(?!)", unescape_important(part))]
        for number, (part, weight) in enumerate(token_weights(escape_important(text), 1.0))
    ]
    plain, starts = chunks.join_runs(["".join(piece for _, _, piece in run) for run in runs])
    words, places = [], []
    for run, start in zip(runs, starts, strict=True):
        for number, weight, piece in run:
            if breaks and piece == "BREAK":
                places.append(start)
            else:
                words += [Word(start + at.start(), start + at.end(), weight, number) for at in _PIECE.finditer(piece)]
            start += len(piece)
    return words, plain, places


def read_text(
    clip: Clip, text: str, name: str, reading: chunks.Reading = "overlap", breaks: bool = False
) -> EncoderText:
    """A text's tokens for the encoder `name`.

    ComfyUI's tokenizers do not say where in the text a token stands, so each piece is tokenized by itself. CLIP's
    tokens never reach across white space. Vectors of another width than an encoder's are left out for it, as ComfyUI
    does; that encoder's later tokens then stand as many positions earlier than the other's.
    """
    words, plain, places = weighted_words(text, breaks)
    escaped = [re.sub(r"[()]", r"\\\g<0>", plain[word.start : word.end]) for word in words]  # weights have been read
    embeddings = getattr(clip.cond_stage_model, f"clip_{name}").transformer.get_input_embeddings()
    width, comma = embeddings.weight.shape[-1], clip.tokenize(",")[name][0][1][0]
    found = [
        (token, word)
        for word, piece in zip(words, escaped, strict=True)
        for row in clip.tokenize(piece, return_word_ids=True)[name]
        for token, _, word_id in row
        if word_id and (not torch.is_tensor(token) or token.shape[-1] == width)  # BOS, EOS, pads: 0
    ]
    ids, weights = [token for token, _ in found], [word.weight for _, word in found]
    spans = [(word.start, word.end) for _, word in found]
    cuts = rate_cuts(plain, found, reading, comma)
    before = {sum(start < place for start, _ in spans) for place in places} - {0, len(ids)}
    return EncoderText(chunks.Tokens(ids, cuts, weights, tuple(sorted(before))), spans, plain)


def rate_cuts(plain: str, found: list[tuple[Any, Word]], reading: chunks.Reading, comma: int) -> list[chunks.Cut]:
    """How good it is to end a chunk after each of the tokens `found`, as a reading sees it."""
    # What ComfyUI takes for a run: text of one weight, or the vectors of a textual inversion.
    groups = [(word.run, word if torch.is_tensor(token) else None) for token, word in found]
    joined = [vectors is not None and (run, vectors) == after for (run, vectors), after in itertools.pairwise(groups)]
    if reading not in chunks.PROGRAMS:
        return chunks.rate_cuts(plain, [(word.start, word.end) for _, word in found], joined)
    commas = [not torch.is_tensor(token) and token == comma for token, _ in found]
    runs = itertools.accumulate([0, *(group != after for group, after in itertools.pairwise(groups))])
    return chunks.rate_cuts_of_program(reading, joined, commas, list(runs)[: len(found)])


def count_positions(texts: Sequence[chunks.Tokens], context_lengths: list[int], reading: chunks.Reading) -> int:
    """The length of the embeddings that the longest of the texts needs."""
    if reading == "kohya":
        return chunks.KOHYA_POSITIONS
    if reading in chunks.WHOLE_ROWS:
        slots = chunks.TRAINED_POSITIONS - 2
        return chunks.TRAINED_POSITIONS * max(len(chunks.split_text(tokens, slots, reading)) for tokens in texts)
    return chunks.positions_for(max(len(tokens.ids) for tokens in texts), context_lengths)


def split_rows(
    tokens: chunks.Tokens, empty: list[WeightedToken], positions: int, reading: chunks.Reading
) -> EncoderInput:
    """What an encoder, whose empty row is `empty`, reads of a text for a result of `positions`."""
    length = min(len(empty), chunks.TRAINED_POSITIONS) if reading in chunks.PROGRAMS else len(empty)
    split = chunks.split_text(tokens, length - 2, reading)
    if reading == "kohya":
        split = split[: (positions - 2) // (length - 2)]
    bos, eos, *pads = empty
    texts = [[(tokens.ids[at], tokens.weights[at]) for at in chunk.read] for chunk in split]
    rows = [[bos, *text, eos, *pads[len(text) :]] for text in texts]
    kept = chunks.positions_of(split, length, positions, reading)
    return EncoderInput(split, rows, [at // length * len(empty) + at % length for at in kept])


def show_chunks(title: str, split: Sequence[chunks.Chunk], spans: Sequence[tuple[int, int]], plain: str) -> str:
    """Lines with the number of tokens and the text of each chunk; what is read again stands in front, in brackets."""

    def part(tokens: range) -> str:
        return " ".join(plain[spans[tokens[0]][0] : spans[tokens[-1]][1]].split()) if tokens else ""

    lines = [f"{title}: {sum(len(chunk.kept) for chunk in split)} tokens, chunks: {len(split)}"]
    for number, (read, kept) in enumerate(split, 1):
        again = part(range(read.start, kept.start))
        lines.append(f"{number}. {len(read)} tokens: {f'[{again}] ' if again else ''}{part(kept)}")
    return "\n".join(lines)


def join_encoders(embeds: torch.Tensor, kept: Sequence[list[int]], pooled: torch.Tensor | None) -> torch.Tensor:
    """The positions `kept` of each encoder's states: [1, positions, width of all encoders].

    Args:
        embeds: [1, positions of all rows, width of all encoders], from ComfyUI.
        pooled: [1, width of the last encoder]; ComfyUI's projections are square.
    """
    last = embeds.shape[-1] if len(kept) == 1 else pooled.shape[-1]
    widths = [embeds.shape[-1] - last, last] if len(kept) == 2 else [last]
    states = zip(embeds.split(widths, dim=-1), kept, strict=True)
    return torch.cat([of_encoder[:, positions] for of_encoder, positions in states], dim=-1)
