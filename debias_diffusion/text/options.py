"""What people choose of how prompts are read, and what they are told of it. Each is one object, handed on whole."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import NamedTuple, get_args

from .chunks import (
    MOST_SHARPENING,
    PROGRAMS,
    TRAINED_POSITIONS,
    WHOLE_ROWS,
    Breaks,
    Emphasis,
    Reading,
)


def check_sharpening(power: float) -> None:
    """Raises ValueError for a power that is no number above 0 and at most 4."""
    if not (isinstance(power, Real) and 0 < power <= MOST_SHARPENING):  # nor NaN
        raise ValueError(
            f"sharpen is {power!r}, but must be a number above 0 and at most {MOST_SHARPENING:g}; 1 changes nothing."
        )


@dataclass(frozen=True, kw_only=True)
class LongPromptOptions:
    """How prompts are read: the options of `set_long_prompt`.

    Attributes:
        reading: Of texts longer than the context length. "overlap", the default, reads each chunk but the first with
            the end of the text before it (`split_text`), so that pronouns keep their antecedents; the text encoders
            read at most twice as many chunks. "separate" reads each chunk by itself. "cut" cuts at 77 tokens, as
            diffusers does. "a1111" (and Forge), "kohya" and "comfyui" read as these programs do, short texts too.
        emphasis: What weights such as `(word:1.3)` do, see `parse_prompt` and `chunks.weigh`. "none": they are text.
            "ignore": they are read and dropped. "comfyui": a weight moves a token's states away from those of the empty
            prompt. "original", also called "a1111", and "no_norm" are A1111's. The default is what the program does
            that is imitated, else "none".
        breaks: What BREAK does where weights are read. "concatenate" begins a new chunk. "average" encodes each part as
            a prompt of its own and gives the UNet their mean, weighted by `BREAK:0.7`.
        positions: Length of all embeddings, at least 77, for pipelines that encode in several calls and for backends
            with static shapes; a longer prompt is a ValueError, except in kohya, which cuts it there (at 227, if None).
            None: as many as the longest text needs.
        split_special_tokens: "!" is text for SDXL's second encoder, too, whose tokenizer in diffusers reads it as its
            pad. The imitated programs always read so.
        zero_empty_negative: An empty negative prompt is zeros, not the encoded empty text. None: as in the program that
            is imitated (in SDXL, A1111's are zeros), else as in diffusers.
        negative_clip_skip: Apply `clip_skip` to the negative prompt too. diffusers never does.
        strict: Raise a ValueError for a prompt that an encoder would read in more than one chunk.
        sharpen: In prompts of more than 77 positions, the UNet's attention to each word is raised to this power; the
            words keep their part of all attention, see `sharpened`. Above 0, at most 4; 1 changes nothing, 2 brings
            out details in the toy world. A call with `prompt_embeds` may be given `words=prompt_layout(...).words`.

    Raises:
        ValueError: a value that is not allowed.
    """

    reading: Reading = "overlap"
    emphasis: Emphasis | None = None
    breaks: Breaks = "concatenate"
    positions: int | None = None
    split_special_tokens: bool = False
    zero_empty_negative: bool | None = None
    negative_clip_skip: bool = False
    strict: bool = False
    sharpen: float = 1.0

    def __post_init__(self):
        if self.emphasis == "a1111":
            object.__setattr__(self, "emphasis", "original")
        flags = dict.fromkeys(("split_special_tokens", "negative_clip_skip", "strict"), (False, True))
        choices = {"reading": get_args(Reading), "emphasis": (None, *get_args(Emphasis)), "breaks": get_args(Breaks)}
        for name, allowed in {**choices, **flags, "zero_empty_negative": (None, False, True)}.items():
            if (given := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} is {given!r}, but must be {' or '.join(map(str, allowed))}.")
        check_sharpening(self.sharpen)
        if self.positions is None:
            return
        if type(self.positions) is not int or self.positions < TRAINED_POSITIONS:
            least = f"a whole number of at least {TRAINED_POSITIONS}"
            raise ValueError(f"positions is {self.positions!r}, but must be {least}, or None.")
        step = TRAINED_POSITIONS - 2 * (self.reading not in WHOLE_ROWS)
        if self.reading in PROGRAMS and (self.positions - TRAINED_POSITIONS) % step:
            raise ValueError(
                f"positions is {self.positions}, but with reading={self.reading!r} it must be {TRAINED_POSITIONS} or a"
                f" multiple of {step} more, such as {TRAINED_POSITIONS + 2 * step}."
            )

    @classmethod
    def of(cls, given: "Mapping | LongPromptOptions") -> "LongPromptOptions":
        """Options from their values by name; those that are left out have their defaults.

        Raises:
            TypeError: there is no option of a name.
            ValueError: a value that is not allowed, or no mapping.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"the options are {given!r}, but must be named, such as {{'reading': 'a1111'}}.")
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in given if name not in names]:
            raise TypeError(f"{unknown[0]!r} is no option of long prompts, which are {', '.join(names)}.")
        return cls(**given)

    @property
    def weights(self) -> Emphasis:
        """What weights do."""
        return self.emphasis or PROGRAMS.get(self.reading, "none")


class PromptLayout(NamedTuple):
    """How a prompt is encoded.

    Attributes:
        tokens: tokens of the longest text without BOS and EOS, the most of any tokenizer, also where it is cut.
        positions: length of the embeddings.
        chunks: for each text encoder, the number of chunks that the longest text takes.
        cut_at: the number of tokens, BOS and EOS included, at which texts are cut; None if they are read whole.
        cut_off: for each text encoder, what is not read of the first prompt: text, and number of tokens.
        texts: for each text encoder, of each chunk of the first prompt the text that it adds, as its tokenizer spells
            it, and the number of its tokens.
        taken_out: what is not read of the first prompt, as in A1111: comments, tags, and a number after a colon at the
            very end, by which A1111 multiplies guidance, and nothing does here.
        schedules: of the first prompt, such as "[cat:dog:0.5]"; `texts` and `cut_off` are of the first step.
        words: of each prompt, then of each negative prompt that is encoded, at the first step, whether each position
            is of the text for any encoder: not BOS, EOS and pads.
        warnings: what prompts and negative prompts hold of other programs' syntax that is not read, in sentences.
    """

    tokens: int
    positions: int
    chunks: tuple[int, ...]
    cut_at: int | None = None
    cut_off: tuple[tuple[str, int], ...] = ()
    texts: tuple[tuple[tuple[str, int], ...], ...] = ()
    taken_out: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    words: tuple[tuple[bool, ...], ...] = ()
    warnings: tuple[str, ...] = ()

    def settings(self) -> dict:
        """What an image's settings say of it."""
        return {name: getattr(self, name) for name in ("tokens", "positions", "chunks", "cut_at")}
