"""ComfyUI's "CLIP Text Encode (long prompt)": chunks that end with sentences, both encoders of SDXL aligned."""

import re
from collections.abc import Mapping
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

# By ComfyUI's names, in the order in which it concatenates their states: CLIP-L, bigG, and SD 2's H.
ENCODERS = ("l", "g", "h")

# A word, which also ends after a mark of Chinese or Japanese, because no white space follows it.
_WORD = re.compile(r"\S*?[。！？，、；：][\"'”’»)\]}]*(?=\w)|\S+")

WeightedToken = tuple[Any, float]  # an id, or the vector [width] of a textual inversion, and its weight
Clip = Any  # `comfy.sd.CLIP`; ComfyUI is no dependency


class LongPromptEncode:
    """The node. See ComfyUI's documentation for the names that it looks for."""

    CATEGORY = "conditioning"
    DESCRIPTION = (
        "Reads a prompt of any length with the text encoders of SDXL, SD 1.5 or SD 2. A prompt that is longer than an "
        "encoder is read in chunks that end with a sentence, if possible; both encoders of SDXL stay aligned token by "
        "token. Weights are written as (word:1.2)."
    )
    FUNCTION = "encode"
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        overlap = (
            "Read each chunk but the first together with the end of the text before it, so that words such as 'it' "
            "are understood. Takes up to twice the chunks."
        )
        match = (
            "Conditioning that is used together with this one, such as the positive prompt's for a negative prompt: "
            "the result gets at least its length, and both are sampled in one batch."
        )
        return {
            "required": {
                "clip": ("CLIP",),
                "text": ("STRING", {"multiline": True, "dynamicPrompts": True}),
                "overlap": ("BOOLEAN", {"default": True, "tooltip": overlap}),
            },
            "optional": {"match": ("CONDITIONING", {"tooltip": match})},
        }

    def encode(self, clip: Clip, text: str, overlap: bool = True, match: list | None = None) -> tuple[list]:
        """ComfyUI's call of the node; see `encode_long_prompt`."""
        if clip is None:
            raise RuntimeError(
                "the clip input is None. If it comes from a checkpoint loader, the checkpoint holds no text encoder: "
                "use DualCLIPLoader"
            )
        length = max((embeds.shape[1] for embeds, _ in match or []), default=0)
        return (encode_long_prompt(clip, text, overlap, length),)


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


def encode_long_prompt(clip: Clip, text: str, overlap: bool = True, least_positions: int = 0) -> list[list]:
    """The conditioning for a text of any length: that of `debias_diffusion.pipelines` with the same weights.

    Only calls of ComfyUI's own `CLIPTextEncode` are used, so LoRAs, hooks, CLIP skip and memory management work as
    there, and a prompt that fits 77 tokens is encoded as there.

    Args:
        clip: of SDXL, its refiner, SD 1.5 or SD 2; each encoder may have any context length.
        text: with ComfyUI's weights and `embedding:name`.
        overlap: as in `set_long_prompt` of the pipelines.
        least_positions: the result has at least this length.

    Returns:
        pairs of embeddings [1, positions, width of all encoders] and a dict with `pooled_output` [1, pooled width] of
        the first chunk; more than one pair if the CLIP's hooks follow a schedule.

    Raises:
        ValueError: `clip` has other text encoders than CLIP.
    """
    empty = empty_rows(clip)
    texts = read_text(clip, text, tuple(empty))
    n_tokens = max(len(tokens.ids) for tokens in texts.values())
    positions = max(least_positions, positions_for(n_tokens, [len(row) for row in empty.values()]))
    readings = {name: plan_reading(texts[name], row, positions, overlap) for name, row in empty.items()}
    rows = fill_rows(readings, empty)
    return [
        [join_encoders(embeds, readings, positions, extras["pooled_output"]), extras]
        for embeds, extras in clip.encode_from_tokens_scheduled(rows)
    ]


def empty_rows(clip: Clip) -> dict[str, list[WeightedToken]]:
    """The tokens of an empty text for each encoder of `clip`: `[BOS, EOS, pads]`, as many as it has positions."""
    rows = clip.tokenize("")
    if set(rows) - set(ENCODERS):
        raise ValueError(
            f"this CLIP has the text encoders {', '.join(sorted(rows))}, and the long-prompt node reads those of SDXL, "
            "SD 1.5 and SD 2: use ComfyUI's own CLIP Text Encode here"
        )
    # The refiner's tokenizer is SDXL's, but its model has bigG only.
    model = clip.cond_stage_model
    return {name: rows[name][0] for name in ENCODERS if name in rows and hasattr(model, f"clip_{name}")}


def read_text(clip: Clip, text: str, names: tuple[str, ...]) -> dict[str, Tokens]:
    """A text's tokens for the encoders `names`: those that ComfyUI finds, with its weights, and where to cut.

    ComfyUI's tokenizers do not say where in the text a token stands, so each word is tokenized by itself. CLIP's
    tokens never reach across white space.
    """
    words, plain = weighted_words(text)
    tokens: dict[str, list] = {name: [] for name in names}
    weights: dict[str, list[float]] = {name: [] for name in names}
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for start, end, weight in words:
        # Brackets are escaped, because weights have been read.
        word = re.sub(r"[()]", r"\\\g<0>", plain[start:end])
        for name, batches in clip.tokenize(word, return_word_ids=True).items():
            if name in tokens:
                of_word = [token for batch in batches for token, _, word_id in batch if word_id]  # BOS, EOS, pads: 0
                tokens[name] += of_word
                weights[name] += [weight] * len(of_word)
                spans[name] += [(start, end)] * len(of_word)
    return {
        name: Tokens(ids, rate_cuts(plain, spans[name], vector_names(ids, spans[name])), weights[name])
        for name, ids in tokens.items()
    }


def weighted_words(text: str) -> tuple[list[tuple[int, int, float]], str]:
    """Start, end and weight of each word of a prompt, and the prompt without the signs of weights."""
    from comfy.sd1_clip import escape_important, token_weights, unescape_important  # only ComfyUI has it

    parts = [(unescape_important(part), weight) for part, weight in token_weights(escape_important(text), 1.0)]
    words, start = [], 0
    for part, weight in parts:
        words += [(start + word.start(), start + word.end(), weight) for word in _WORD.finditer(part)]
        start += len(part)
    return words, "".join(part for part, _ in parts)


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
