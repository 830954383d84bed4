"""Writes the vectors of this folder again, from prompts.json.

python conformance/make.py [FOLDER]
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from debias_diffusion.text.chunks import TRAINED_POSITIONS, join_runs, split_text
from debias_diffusion.text.encoding import encode
from debias_diffusion.text.options import LongPromptOptions
from debias_diffusion.text.prompt import TextPlan, read
from debias_diffusion.text.sentences import sentence_ends
from debias_diffusion.text.tokens import clip_tokenizer
from debias_diffusion.text.weighting import parse_prompt

HERE = Path(__file__).parent
# Reading and emphasis of each file.
FILES = {"kohya_no_norm": ("kohya", "no_norm"), "kohya": ("kohya", "none"), "a1111": ("a1111", "original")}
OURS = ("overlap", "separate", "cut")
FILES |= {name: (name, "comfyui") for name in (*OURS, "comfyui")}
# What the imitated programs refuse, or read unlike this package: names of special tokens, names of embeddings.
LEFT_OUT = dict.fromkeys(["programs/invalid number", "programs/point only"], ("a1111", "kohya_no_norm"))
LEFT_OUT |= dict.fromkeys(["programs/special", "syntax/special"], ("a1111", "kohya", "kohya_no_norm", "comfyui"))
LEFT_OUT |= {"syntax/embedding": ("comfyui",)}
# With states: the few kinds of arithmetic and of joining that there are.
ENCODED = {f"programs/{name}" for name in ("empty", "bang word", "negative weight", "break twice", "long run at cut")}
ENCODED |= {"kinds/pronouns", "kinds/weights in sentences", "kinds/regions", "kinds/weight over a cut"}
UNIT = 1e-3  # of states and pooled embeddings in the files


def tiny_encoder() -> CLIPTextModelWithProjection:
    """The encoder of README.md, whose weights are a formula; float64, so that all machines round alike."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 49407}
    encoder = CLIPTextModelWithProjection(CLIPTextConfig(projection_dim=8, hidden_act="quick_gelu", **sizes, **ids))
    weights = sorted(encoder.named_parameters(), key=lambda named: named[0].removeprefix("text_model."))
    for number, (name, weight) in enumerate(weights):
        value = np.arange(weight.numel(), dtype=np.uint32) ^ np.uint32((number + 1) * 0x9E3779B9 % 2**32)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):  # the finalizer of MurmurHash3
            value = (value ^ (value >> np.uint32(shift))) * np.uint32(factor)
        value = torch.from_numpy(value / 2.0**31 - 1).reshape(weight.shape)
        weight.data = 1 + value / 2 if "norm" in name and name.endswith("weight") else value
    return encoder.eval()


def vectors(file: str, prompts: dict[str, str], encoder: CLIPTextModelWithProjection) -> Iterator[tuple[str, dict]]:
    """The name and the vector of each prompt that `file` has."""
    (reading, emphasis), tokenizers = FILES[file], [clip_tokenizer(77), clip_tokenizer(77, pad_token="!")]
    encoders = [(tokenizer, TRAINED_POSITIONS) for tokenizer in tokenizers]
    options = LongPromptOptions(reading=reading, emphasis=emphasis)
    for name, prompt in prompts.items():
        if file in LEFT_OUT.get(name, ()):
            continue
        plan, vector = read([prompt], None, encoders, options, steps=1), {}
        if reading in OURS:
            parts = [
                [[text, round(weight, 6)] for text, weight in part.runs]
                for part in parse_prompt(prompt, reading, emphasis)
            ]
            vector["sentences"] = [sentence_ends(join_runs([text for text, _ in runs])[0]) for runs in parts]
            vector |= {"parts": parts} if parts != [[[prompt, 1]]] else {}
        first, second = map(layout, plan.prompts.encoders)
        vector |= {"positions": plan.positions, **first}
        if first != second:
            vector["second"] = second
        if name in ENCODED:
            states, pooled = encode(plan.prompts.encoders[0], encoder)
            vector["states"] = (states[0] / UNIT).round().int().tolist()
            vector["pooled"] = (pooled[0] / UNIT).round().int().tolist()
        yield name, vector


def layout(plan: TextPlan) -> dict:
    """Chunks of ids, weights and groups of a prompt for one encoder, and what is joined, as README.md has them."""
    [(*_, tokens, _, chunks, places)] = plan.parts
    weights = [[round(tokens.weights[at], 6) for at in chunk.read] for chunk in chunks]
    joined: list[list[int]] = []  # chunk, first position, number of positions
    for at in places:
        chunk, position = divmod(at, TRAINED_POSITIONS)
        if joined and joined[-1][0] == chunk and sum(joined[-1][1:]) == position:
            joined[-1][2] += 1
        else:
            joined.append([chunk, position, 1])
    return {
        "chunks": [[tokens.ids[at] for at in chunk.read] for chunk in chunks],
        "weights": [row[0] if len({*row}) == 1 else row for row in weights],
        "groups": [
            number
            for number, part in enumerate(tokens.separated)
            for _ in split_text(part, TRAINED_POSITIONS - 2, plan.reading)
        ],
        "joined": joined,
    }


@torch.no_grad()
def content(file: str) -> str:
    """The text of a file of vectors, one prompt a line."""
    prompts = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))
    lines = (
        f"{json.dumps(name)}: {json.dumps(vector, separators=(',', ':'))}"
        for name, vector in vectors(file, prompts, tiny_encoder())
    )
    head = dict(zip(("reading", "emphasis"), FILES[file], strict=True))
    return json.dumps(head)[:-1] + ', "vectors": {\n' + ",\n".join(lines) + "\n}}\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for file in FILES:
        (folder / f"{file}.json").write_text(content(file), encoding="utf-8")
