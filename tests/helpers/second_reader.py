"""A second implementation of the ids and cuts of conformance/, written from its README.md, without the package."""

import gzip
import json
import re
import sys
from functools import cache
from itertools import accumulate, groupby, pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

MERGES = Path(__file__).parents[2] / "debias_diffusion/text/clip_merges.txt.gz"
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
SIGNS = r"(?s)\\(?P<escaped>[][()\\]?)|(?P<open>[(\[])|:{0}(?P<by>[+-]?[.\d]+){0}\)|(?P<close>[)\]])|(?P<part>{1})|."
STEP, SPECIAL = {")": 1.1, "]": 1 / 1.1}, ("<|startoftext|>", "<|endoftext|>")
TIMES = r"(?s)\((.+):\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*\)"  # of ComfyUI, with Python's float


@cache
def tokenizer() -> Tokenizer:
    symbols = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    merges = [tuple(line.split()) for line in gzip.decompress(MERGES.read_bytes()).decode().splitlines()[1:]]
    words = [*symbols, *(symbol + "</w>" for symbol in symbols), *map("".join, merges), *SPECIAL]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, merges, end_of_word_suffix="</w>"))
    spaces, split = normalizers.Replace(Regex(r"\s+"), " "), pre_tokenizers.Split(Regex(WORDS), "removed", invert=True)
    made.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return made


def a1111(prompt: str, space: str, part: str) -> list:
    runs, opened = [], []
    for match in re.finditer(SIGNS.format(space, part), prompt):
        bracket = match["close"] or (match["by"] and ")")
        places = [at for at, (closing, _) in enumerate(opened) if closing == bracket]
        if match["open"]:
            opened.append((")" if match["open"] == "(" else "]", len(runs)))
        elif places:
            (_, start), factor = opened.pop(places[-1]), float(match["by"] or STEP[bracket])
            runs[start:] = [(text, weight * factor) for text, weight in runs[start:]]
        else:
            piece = (match["escaped"] or match[0].strip("\\"), 1.0)
            runs += [("BREAK", -1.0), ("", 1.0)] if match["part"] else [piece]
    for bracket, start in opened:
        runs[start:] = [(text, weight * STEP[bracket]) for text, weight in runs[start:]]
    runs = [("".join(text for text, _ in same), weight) for weight, same in groupby(runs, lambda run: run[1])]
    breaks = [at for at, run in enumerate(runs) if run == ("BREAK", -1.0)]
    return [runs[start + 1 : end] for start, end in pairwise([-1, *breaks, len(runs)])]


def comfyui(text: str, weight: float) -> list:
    runs, hidden = [], re.sub(r"\\[()]", "--", text)
    depths = [0, *accumulate((sign == "(") - (sign == ")") for sign in hidden)]
    places = [at + (sign == ")") for at, sign in enumerate(hidden) if sign in "()" and not depths[at + (sign == ")")]]
    for start, end in pairwise(sorted({0, *places, len(text)})):
        if not re.fullmatch(r"(?s)\(.*\)", hidden[start:end]):
            runs.append((re.sub(r"\\([()])", r"\1", text[start:end]), weight))
        else:
            times = re.fullmatch(TIMES, text[start:end]) or ("", text[start + 1 : end - 1], weight * 1.1)
            runs += comfyui(times[1], float(times[2]))
    return runs


def best(kinds: list[int], start: int, end: int, slots: int) -> list[int]:
    places = [start]
    while end - places[-1] > slots:
        ends = range(places[-1] + slots - slots // 2, places[-1] + slots + 1)
        places.append(max(ends, key=lambda stop: (kinds[stop - 1], stop)))
    return [*places, end]


def split(reading: str, ids: list[int], kinds: list[int], runs: list[int]) -> list[list[int]]:
    places, end = [0], len(ids)
    for at in filter(lambda at: at - places[-1] == 75, range(end)):
        commas = [place + 1 for place in range(at - 20, at) if ids[place] == 267 != ids[at] and reading == "a1111"]
        run = [place for place in range(end) if runs[place] == runs[at] and reading == "comfyui"]
        places.append(commas[-1] if commas else run[0] if 0 < len(run) < 8 else at)
    places = best(kinds, 0, end, 75)[:-1] if reading in ("overlap", "separate") else places
    chunks = list(pairwise([*places, end]))
    if reading == "overlap" and len(places) > 1:
        tries = [best(kinds, places[1], end, new) for new in (37, 57)]
        ends = next((ends for ends in tries if len(ends) <= 2 * len(places)), [*range(places[1], end, 57), end])
        if len(ends) > 2 and ends[-1] - ends[-2] == 1 and ends[-1] - ends[-3] <= 57:
            del ends[-2]
        starts = [range(max(0, stop - 75), max(1, kept - 17)) for kept, stop in pairwise(ends)]
        starts = [max(among, key=lambda at: (at == 0, kinds[at - 1], -at)) for among in starts]
        chunks[1:] = zip(starts, ends[1:], strict=True)
    return [ids[start:end] for start, end in chunks]


def answer(question: dict) -> dict:
    reading, prompt, chunks, ours = question["reading"], question["prompt"], [], question.get("parts", [])
    parts = ours or [comfyui(prompt, 1.0) if reading == "comfyui" else [(prompt, 1.0)]]
    if reading == "a1111":
        prompt = re.sub(r"<\w+:[^>]+>", "", re.sub("#.*", "", prompt))
        parted = [re.sub(r"\s*:\s*[-+]?(\d+\.?|\d*\.\d+)(\s*)$", r"\2", part) for part in re.split(r"\bAND\b", prompt)]
        parts = a1111("AND".join(parted), r"\s*", r"\s*\bBREAK\b\s*")
    elif question["emphasis"] == "no_norm":
        parts = a1111(prompt, "", "(?!)")
    left = {"cut": 75, "kohya": 225}.get(reading, sys.maxsize)
    for number, part in enumerate(parts):
        text, spans, ids, runs, kinds = "", [], [], [], []
        for at, (run, _) in enumerate(part):
            text += " " if text and not (text[-1].isspace() or run[:1].isspace()) else ""
            read = tokenizer().encode(run, add_special_tokens=False)
            spans += [(start + len(text), end + len(text)) for start, end in read.offsets]
            text, ids, runs = text + run, ids + read.ids, runs + [at] * len(read.ids)
        for (begin, end), (start, _) in pairwise(spans if ours else []):
            gap, last = text[end:start], text[max(0, end - 8) : end].rstrip("\"'”’»)]}")[-1:] or " "
            is_end = "\n" in gap or any(begin < place <= start for place in question["sentences"][number])
            is_comma = last in "，、；：" or (gap and last in ",;:")
            kinds.append(0 if start < end else 3 if is_end else 2 if is_comma else int(gap > ""))
        chunks += split(reading, ids[:left], [*kinds, 3], runs) if ids[:left] or not ours else []
        left -= len(ids[:left])
    return {"chunks": chunks[: 1 + max((at for at, chunk in enumerate(chunks) if chunk), default=0)] or [[]]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))))
