"""ComfyUI's "CLIP Text Encode (long prompt)": chunks that end with sentences, both encoders of SDXL aligned."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

try:
    from .chunks import Chunk, Tokens, join_chunks, lacks_pads, positions_for, rate_cuts, split_text
except ModuleNotFoundError:  # not a copy that `debias-diffusion comfyui` wrote, which has that file
    try:
        from debias_diffusion.chunks import Chunk, Tokens, join_chunks, lacks_pads, positions_for, rate_cuts, split_text
    except ModuleNotFoundError as error:
        raise ImportError(
            "the long-prompt node lacks `chunks.py`, and debias-diffusion is not installed in ComfyUI's environment: "
            "write the node's folder with `debias-diffusion comfyui --output ComfyUI/custom_nodes/long_prompt`"
        ) from error

# By ComfyUI's names, in the order in which it concatenates their states.
ENCODERS = {"l": "CLIP-L", "g": "bigG", "h": "CLIP-H"}

# A piece of text that is tokenized by itself. ComfyUI looks for `embedding:name` after a space or a line's end only,
# and its tokenizer takes the control characters that Python calls white space for text.
_PIECE = re.compile(
    r"""
    embedding (?= : (?: \s | $ ) )                                # without a name it is text
    | embedding: [\S\x1c-\x1f]+
    | (?: [\S\x1c-\x1f] | [^\S\ \n] (?= embedding: ) )*?           # up to a mark of Chinese or Japanese,
      [。！？，、；：] ["'”’»)\]}]* (?= \w ) (?! embedding: )       # because no white space follows it
    | (?: [\S\x1c-\x1f] | [^\S\ \n] (?= embedding: ) )+
    """,
    re.VERBOSE,
)

WeightedToken = tuple[Any, float]  # an id, or the vector [width] of a textual inversion, and its weight
Clip = Any  # `comfy.sd.CLIP`; ComfyUI is no dependency


class LongPromptEncode:
    """The node. See ComfyUI's documentation for the names that it looks for."""

    CATEGORY = "model/conditioning"
    DESCRIPTION = (
        "Reads a prompt of any length with the text encoders of SDXL, SD 1.5, SD 2 or Stable Cascade. A prompt that is "
        "longer than an encoder is read in chunks that end with a sentence, if possible; both encoders of SDXL stay "
        "aligned token by token. Weights are written as (word:1.2)."
    )
    SEARCH_ALIASES = ("long prompt", "77 tokens", "token limit", "chunks", "text", "prompt", "encode prompt")
    FUNCTION = "encode"
    RETURN_TYPES = ("CONDITIONING", "STRING")
    RETURN_NAMES = ("CONDITIONING", "chunks")
    OUTPUT_TOOLTIPS = (
        "The prompt's conditioning, as long as the prompt needs.",
        "How each text encoder reads the prompt: the text and the number of tokens of each chunk.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        text = (
            "The prompt, with ComfyUI's weights and embedding:name. An SD 1.5 embedding reaches only CLIP-L of SDXL: "
            "bigG leaves it out, as with ComfyUI's own node."
        )
        reading = (
            "How a prompt longer than an encoder is read. overlap: each chunk but the first together with the end of "
            "the text before it, so that words such as 'it' are understood; often needs more chunks. separate: each "
            "chunk by itself."
        )
        multiple = (
            "Add pads up to a multiple of 77 positions. Keep it on beside nodes of ComfyUI and others: conditioning of "
            "77, 154, 231 or 308 positions is sampled in one batch with theirs. Off: the length that this package's "
            "diffusers pipelines use, such as 152."
        )
        match = (
            "Conditioning that is used together with this one, such as the positive prompt's for a negative prompt: "
            "the result gets at least its length."
        )
        return {
            "required": {
                "clip": ("CLIP", {"tooltip": "Text encoders of SDXL, its refiner, SD 1.5, SD 2 or Stable Cascade."}),
                "text": ("STRING", {"multiline": True, "dynamicPrompts": True, "tooltip": text}),
            },
            "optional": {
                "reading": (["overlap", "separate"], {"default": "overlap", "tooltip": reading}),
                "multiple_of_77": ("BOOLEAN", {"default": True, "tooltip": multiple}),
                "match": ("CONDITIONING", {"tooltip": match}),
            },
        }

    def encode(
        self,
        clip: Clip,
        text: str,
        reading: str = "overlap",
        multiple_of_77: bool = True,
        match: list | None = None,
    ) -> tuple[list, str]:
        """ComfyUI's call of the node; see `encode_long_prompt`."""
        if clip is None:
            raise RuntimeError(
                "the clip input is None. If it comes from a checkpoint loader, the checkpoint holds no text encoder: "
                "use DualCLIPLoader"
            )
        length = max((embeds.shape[1] for embeds, _ in match or []), default=0)
        return encode_long_prompt(clip, text, reading == "overlap", length, 77 if multiple_of_77 else 1)


class Reading(NamedTuple):
    """How one text encoder reads a text.

    Attributes:
        chunks: of the text, in order.
        rows: of each chunk, the tokens of a whole context length, `[BOS, text, EOS, pads]`; then those of an empty
            chunk, if its pads are needed.
        context_length: positions of each row that are used.
    """

    chunks: list[Chunk]
    rows: list[list[WeightedToken]]
    context_length: int

    @property
    def positions(self) -> int:
        """How many positions of all rows, one after the other, are needed."""
        return len(self.rows[0]) * (len(self.rows) - 1) + self.context_length


def encode_long_prompt(
    clip: Clip, text: str, overlap: bool = True, least_positions: int = 0, multiple: int = 1
) -> tuple[list[list], str]:
    """The conditioning for a text of any length: that of `debias_diffusion.pipelines` with the same weights.

    Only calls of ComfyUI's own `CLIPTextEncode` are used, so LoRAs, hooks, CLIP skip and memory management work as
    there, and a prompt that fits 77 tokens is encoded as there.

    Args:
        clip: of SDXL, its refiner, SD 1.5, SD 2 or Stable Cascade; each encoder may have any context length.
        text: with ComfyUI's weights and `embedding:name`.
        overlap: as the reading "overlap" of the pipelines; otherwise "separate".
        least_positions: the result has at least this length.
        multiple: the result's length is a multiple of this.

    Returns:
        the conditioning, and the chunks as text. The conditioning is pairs of embeddings [1, positions, width of all
        encoders] and a dict with `pooled_output` [1, pooled width] of the first chunk; more than one pair if the CLIP's
        hooks follow a schedule.

    Raises:
        ValueError: `clip` has other text encoders than CLIP.
    """
    empty = empty_rows(clip)
    texts, spans, plain = read_text(clip, text, tuple(empty))
    n_tokens = max(len(tokens.ids) for tokens in texts.values())
    positions = max(least_positions, positions_for(n_tokens, [len(row) for row in empty.values()]))
    positions = -(-positions // multiple) * multiple
    readings = {name: plan_reading(texts[name], row, positions, overlap) for name, row in empty.items()}
    conditioning = [
        [join_encoders(embeds, readings, positions, extras["pooled_output"]), extras]
        for embeds, extras in clip.encode_from_tokens_scheduled(fill_rows(readings, empty))
    ]
    shown = [show_chunks(ENCODERS[name], reading.chunks, spans[name], plain) for name, reading in readings.items()]
    return conditioning, "\n\n".join(shown)


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


def embedding_width(clip: Clip, name: str) -> int:
    """The width of an encoder's token embeddings, and of textual inversions for it."""
    return getattr(clip.cond_stage_model, f"clip_{name}").transformer.get_input_embeddings().weight.shape[-1]


def weighted_words(text: str) -> tuple[list[tuple[int, int, float]], str]:
    """Start, end and weight of each piece of a prompt, and the prompt without the signs of weights."""
    from comfy.sd1_clip import escape_important, token_weights, unescape_important  # only ComfyUI has it

    parts = [(unescape_important(part), weight) for part, weight in token_weights(escape_important(text), 1.0)]
    words, start = [], 0
    for part, weight in parts:
        words += [(start + word.start(), start + word.end(), weight) for word in _PIECE.finditer(part)]
        start += len(part)
    return words, "".join(part for part, _ in parts)


def read_text(
    clip: Clip, text: str, names: tuple[str, ...]
) -> tuple[dict[str, Tokens], dict[str, list[tuple[int, int]]], str]:
    """A text's tokens for the encoders `names`: those that ComfyUI finds, with its weights, and where to cut.

    ComfyUI's tokenizers do not say where in the text a token stands, so each piece is tokenized by itself. CLIP's
    tokens never reach across white space. Vectors of another width than an encoder's are left out for it, as ComfyUI
    does; that encoder's later tokens then stand as many positions earlier than the other's.

    Returns:
        tokens and their spans by encoder, and the text without the signs of weights, in which the spans are
    """
    words, plain = weighted_words(text)
    widths = {name: embedding_width(clip, name) for name in names}
    tokens: dict[str, list] = {name: [] for name in names}
    weights: dict[str, list[float]] = {name: [] for name in names}
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for start, end, weight in words:
        # Brackets are escaped, because weights have been read.
        word = re.sub(r"[()]", r"\\\g<0>", plain[start:end])
        rows = clip.tokenize(word, return_word_ids=True)
        for name, width in widths.items():
            of_word = [token for row in rows[name] for token, _, word_id in row if word_id]  # BOS, EOS, pads: 0
            of_word = [token for token in of_word if not torch.is_tensor(token) or token.shape[-1] == width]
            tokens[name] += of_word
            weights[name] += [weight] * len(of_word)
            spans[name] += [(start, end)] * len(of_word)
    cuts = {name: rate_cuts(plain, spans[name], vector_names(ids, spans[name])) for name, ids in tokens.items()}
    return {name: Tokens(ids, cuts[name], weights[name]) for name, ids in tokens.items()}, spans, plain


def vector_names(tokens: list, spans: list[tuple[int, int]]) -> list[str | None]:
    """Names for the vectors of textual inversions, from which `rate_cuts` sees which belong together."""
    names: list[str | None] = []
    first: dict[tuple[int, int], int] = {}
    for at, (token, span) in enumerate(zip(tokens, spans, strict=True)):
        number = at - first.setdefault(span, at)
        names.append((f"vector_{number}" if number else "vector") if torch.is_tensor(token) else None)
    return names


def plan_reading(tokens: Tokens, empty: list[WeightedToken], positions: int, overlap: bool) -> Reading:
    """How an encoder, whose empty row is `empty`, reads a text for a result of `positions`."""
    context_length = min(len(empty), positions)
    chunks = split_text(tokens, context_length - 2, overlap)
    bos, eos, *pads = empty
    rows = []
    for chunk in chunks:
        text = [(tokens.ids[at], tokens.weights[at]) for at in chunk.read]
        rows.append([bos, *text, eos, *pads[len(text) :]])
    if lacks_pads(chunks, context_length, positions):
        rows.append(empty)
    return Reading(chunks, rows, context_length)


def show_chunks(title: str, chunks: Sequence[Chunk], spans: Sequence[tuple[int, int]], plain: str) -> str:
    """Lines with the number of tokens and the text of each chunk; what is read again stands in front, in brackets."""

    def part(tokens: range) -> str:
        return " ".join(plain[spans[tokens[0]][0] : spans[tokens[-1]][1]].split()) if tokens else ""

    lines = [f"{title}: {sum(len(chunk.kept) for chunk in chunks)} tokens, chunks: {len(chunks)}"]
    for number, (read, kept) in enumerate(chunks, 1):
        again = part(range(read.start, kept.start))
        lines.append(f"{number}. {len(read)} tokens: {f'[{again}] ' if again else ''}{part(kept)}")
    return "\n".join(lines)


def fill_rows(
    readings: Mapping[str, Reading], empty: Mapping[str, list[WeightedToken]]
) -> dict[str, list[list[WeightedToken]]]:
    """The rows of each encoder, and empty ones: SDXL's states are cut to the shorter of its two encoders'."""
    needed = max(reading.positions for reading in readings.values())
    return {
        name: reading.rows + [empty[name]] * (-(-needed // len(empty[name])) - len(reading.rows))
        for name, reading in readings.items()
    }


def join_encoders(
    embeds: torch.Tensor, readings: Mapping[str, Reading], length: int, pooled: torch.Tensor | None
) -> torch.Tensor:
    """The states of all encoders, each joined to one sequence.

    Args:
        embeds: [1, positions of all rows, width of all encoders], from ComfyUI.
        readings: of each encoder.
        length: positions of the result.
        pooled: [1, width of the last encoder]; ComfyUI's projections are square.

    Returns:
        [1, length, width of all encoders]
    """
    last = embeds.shape[-1] if len(readings) == 1 else pooled.shape[-1]
    widths = [embeds.shape[-1] - last, last] if len(readings) == 2 else [last]
    parts = zip(readings.values(), embeds[0].split(widths, dim=-1), strict=True)
    return torch.cat([join_reading(states, reading, length) for reading, states in parts], dim=-1)[None]


def join_reading(states: torch.Tensor, reading: Reading, length: int) -> torch.Tensor:
    """One encoder's states of all rows, [positions of all rows, width], joined to [length, width]."""
    starts, n_chunks = range(0, len(reading.rows) * len(reading.rows[0]), len(reading.rows[0])), len(reading.chunks)
    rows = torch.stack([states[start : start + reading.context_length] for start in starts])
    return join_chunks(rows[:n_chunks], reading.chunks, rows[-1] if len(rows) > n_chunks else None, length)
