"""The toy world's tokenizer: a real CLIPTokenizer whose small vocabulary was learned from its captions."""

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from debias_diffusion.text.tokens import byte_symbols, clean, clip_tokenizer, make_clip_tokenizer


def learn_tokenizer(captions: Iterable[str], merges: int, context_length: int = 77) -> CLIPTokenizer:
    """A tokenizer with `merges` byte pair merges and CLIP's id layout.

    Ids 0 to 511 are the bytes, inside a word and at its end, so no word is unknown. The merges follow, then SOT and
    EOT, the highest id. PAD is id 0, as in CLIP.
    """
    symbols = byte_symbols()
    model = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    # The same pieces as CLIPTokenizer cuts text into.
    model.pre_tokenizer = clip_tokenizer(context_length).backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=2 * len(symbols) + merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    model.train_from_iterator((clean(caption) for caption in captions), trainer)
    pairs = json.loads(model.to_str())["model"]["merges"]  # a list, or in older files a string, each
    learned = [tuple(pair if isinstance(pair, list) else pair.split(" ")) for pair in pairs[:merges]]
    words = [*symbols, *(f"{symbol}</w>" for symbol in symbols), *("".join(pair) for pair in learned)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    return make_clip_tokenizer(vocabulary, learned, model_max_length=context_length)
