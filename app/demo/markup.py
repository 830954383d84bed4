"""The page's contents as HTML. This module alone makes HTML, and escapes all text from outside."""

import base64
import re
from collections.abc import Sequence
from html import escape
from itertools import groupby
from math import sqrt

from .analysis import Movement, PromptTokens
from .live_generation import Drawn, Step
from .prompt_reading import PromptReading
from .request import Request
from .toy_scenes import Marks, ObjectMark, ToyScene

# Also told apart by words and underlines, for people who cannot distinguish the colours.
READ_BY = {"all": "read by every encoder", "some": "read by some encoders only", "none": "read by no encoder"}


def message(text: str) -> str:
    """An error."""
    return f'<p class="message wrong" role="alert">{escape(text)}</p>'


def note(text: str) -> str:
    """A notice."""
    return f'<p class="message" role="status">{escape(text)}</p>'


def _number(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


# While typing


def token_list(prompt: PromptTokens) -> str:
    """The tokens of a prompt, sentence by sentence, coloured by who reads them, and how each encoder reads them."""
    if not prompt.count:
        return '<p class="hint">Type or paste a prompt to see its tokens, coloured by which encoders read them.</p>'
    parts = [
        f'<p role="status"><strong>{_number(prompt.count, "token")}</strong> in '
        f"{_number(prompt.sentences, 'sentence')}</p>",
        _legend(prompt),
        _readings(prompt.readings),
        '<ol class="sentences">',
    ]
    starts = {chunk.new for reading in prompt.readings.values() for chunk in reading.chunks[1:]}
    for sentence, tokens in groupby(enumerate(prompt.tokens), key=lambda item: item[1].sentence):
        spans = "".join(
            f'<span class="token {token.read_by}{" chunk" if place in starts else ""}">{escape(token.text)}</span>'
            for place, token in tokens
        )
        parts.append(f'<li value="{sentence}">{spans}</li>')
    return "".join([*parts, "</ol>"])


def _legend(prompt: PromptTokens) -> str:
    counts = {kind: sum(token.read_by == kind for token in prompt.tokens) for kind in READ_BY}
    items = [f'<li><span class="token {kind}">{counts[kind]:,}</span> {words}</li>' for kind, words in READ_BY.items()]
    if any(len(reading.chunks) > 1 for reading in prompt.readings.values()):
        items.append('<li><span class="token chunk">&nbsp;</span> an encoder\'s next chunk is used from here</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _readings(readings: dict[str, PromptReading]) -> str:
    """How each encoder reads a prompt; those that read it alike in one line."""
    alike: dict[PromptReading, list[str]] = {}
    for label, reading in readings.items():
        alike.setdefault(reading, []).append(label)
    items = [
        f"<li><b>{escape(', '.join(labels))}</b>: {reading.in_words()}{_places(reading)}</li>"
        for reading, labels in alike.items()
    ]
    return f'<ul class="readings">{"".join(items)}</ul>'


def _places(reading: PromptReading) -> str:
    """The tokens that each chunk holds, from 1, where there are several."""
    if len(reading.chunks) < 2:
        return ""
    return f": {', '.join(f'{chunk.first + 1:,} to {chunk.end:,}' for chunk in reading.chunks)}"


# While drawing


def progress(step: Step, request: Request) -> str:
    """The progress of a drawing."""
    words = f"Encoder {request.encoders.index(step.label) + 1} of {len(request.encoders)}"
    if request.images > 1:
        words += f", image {step.picture} of {request.images}"
    words += f", step {step.step} of {step.steps}"
    # Not a live region: the words change at every step. A screen reader reads the bar's value on request.
    return (
        f'<p class="message">{words} <small>{escape(step.label)}</small></p>'
        f'<progress value="{step.done_share:.3f}" max="1" aria-label="Drawing: {words}"></progress>'
    )


# Images


def original(scene: ToyScene, png: bytes) -> str:
    """A scene's reference image, with its objects."""
    objects = "".join(f"<li>{escape(name)} <small>sentence {sentence}</small></li>" for name, sentence in scene.objects)
    return _card("Reference image", png, "original-scene.png", f'<ul class="objects">{objects}</ul>', "original")


def drawn(picture: Drawn, marks: Marks | None = None) -> str:
    """A generated image with its encoder, the part of the prompt it read, and what it shows of the scene."""
    text = f"<p>{escape(picture.read)}</p>" + (_marks(marks) if marks else "")
    stem = re.sub(r"[^A-Za-z0-9]+", "-", picture.label).strip("-") or "encoder"
    return _card(picture.label, picture.png, f"{stem}-seed-{picture.seed}.png", text, "", f"seed {picture.seed}")


def waiting(label: str) -> str:
    """The placeholder of an image that is not drawn yet."""
    return f'<figure class="card waiting"><div class="blank"></div><figcaption>{_title(label)}</figcaption></figure>'


def _title(label: str, more: str = "") -> str:
    return f"<strong>{escape(label)}</strong>" + (f" <small>{escape(more)}</small>" if more else "")


def _card(label: str, png: bytes, file: str, text: str, kind: str, more: str = "") -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    name = escape(label)
    return (
        f'<figure class="card {kind}"><button type="button" class="zoom" aria-label="Enlarge: {name}">'
        f'<img src="{source}" alt="Image: {name}"></button>'
        f"<figcaption>{_title(label, more)}{text}"
        f'<a class="download" href="#" download="{escape(file)}" aria-label="Download PNG: {name}">'
        "Download PNG</a></figcaption></figure>"
    )


def _marks(marks: Marks) -> str:
    score = f"<b>{sum(item.correct for item in marks.objects)} of {len(marks.objects)}</b> right"
    objects, invented = "".join(map(_object, marks.objects)), ""
    if marks.invented:
        score += f", <b>{len(marks.invented)}</b> that nobody asked for"
        items = "".join(f"<li>{_sign('+')}{escape(name)}</li>" for name in marks.invented)
        invented = f'<p>Nobody asked for:</p><ul class="objects invented">{items}</ul>'
    html = f'<p class="score">{score}</p><ul class="objects">{objects}</ul>{invented}'
    if marks.missing_background:
        html += f"<p>{_sign('✗')}wrong background: {escape(marks.missing_background)} was asked for</p>"
    return html


def _object(mark: ObjectMark) -> str:
    size = f" (wrong size: {escape(mark.wrong_size)})" if mark.wrong_size else ""
    kind, sign = ("right", "✓") if mark.correct else ("missed", "✗")
    return f'<li class="{kind}">{_sign(sign)}<span class="unseen">{kind}:</span> {escape(mark.name)}{size}</li>'


def _sign(sign: str) -> str:
    """A sign for the eye, which words beside it say to screen readers."""
    return f'<span aria-hidden="true" class="sign">{sign}</span> '


# Reading


def attention(shares: dict[str, dict]) -> str:
    """Each encoder's words under bars, as high as the square root of the word's share of the attention.

    The root keeps bars visible: a few words usually take most of the attention.
    """
    words = [word for share in shares.values() for chunk in share["chunks"] for word in chunk["words"]]
    most = max(word["after_softmax"] for word in words) or 1.0
    return "".join(_encoder_attention(label, share, most) for label, share in shares.items())


def _encoder_attention(label: str, share: dict, most: float) -> str:
    tokens, read, chunks = share["tokens"], share["read"], share["chunks"]
    words = f"reads all {tokens:,} tokens" if read == tokens else f"reads the first {read:,} of {tokens:,} tokens"
    words += f" in {len(chunks)} chunks" if len(chunks) > 1 else ""
    parts = [_chunk_attention(number, chunk, share, most) for number, chunk in enumerate(chunks, 1)]
    read_words = [word for chunk in chunks for word in chunk["words"] if word["position"] > chunk["new"]]
    strongest = sorted(read_words, key=lambda word: -word["after_softmax"])[:5]
    table = "".join(
        f"<tr><td>{escape(word['word'])}</td><td>{word['position']}</td><td>{word['after_softmax']:.2%}</td></tr>"
        for word in strongest
    )
    return (
        f'<section class="look"><h4>{escape(label)}</h4><p>{words}.</p>{"".join(parts)}'
        "<details><summary>Five words with the most attention</summary>"
        "<table><thead><tr>"
        '<th scope="col">word</th><th scope="col">position</th><th scope="col">share</th></tr></thead>'
        f"<tbody>{table}</tbody></table></details></section>"
    )


def _chunk_attention(number: int, chunk: dict, share: dict, most: float) -> str:
    title = f"Chunk {number}, tokens {chunk['first'] + 1:,} to {chunk['end']:,}. " if len(share["chunks"]) > 1 else ""
    if chunk["first"] < chunk["new"]:
        title += f"Grey words, up to token {chunk['new']:,}, are read again for their context. "
    words = "".join(
        f'<li{_again(word, chunk)} style="--share:{sqrt(word["after_softmax"] / most):.3f}" '
        f'title="{word["after_softmax"]:.2%}"><span>{escape(word["word"])}</span></li>'
        for word in chunk["words"]
    )
    return (
        f"<p>{title}The start token takes {chunk['sot']['after_softmax']:.1%} of the attention, the end token "
        f'{chunk["eot"]["after_softmax"]:.1%}.</p><ol class="words">{words}</ol>'
    )


def _again(word: dict, chunk: dict) -> str:
    return ' class="again"' if word["position"] <= chunk["new"] else ""


def movement(rows: Sequence[Movement]) -> str:
    """How far each edit moves each encoder's embedding, as a table with bars on one scale."""
    labels = list(rows[0].distance)
    most = max(distance for row in rows for distance in row.distance.values()) or 1.0
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label in labels)
    body = "".join(
        f'<tr><th scope="row"><b>{escape(row.edit)}</b> <small>{escape(_shortened(row.text))}</small></th>'
        + "".join(
            f'<td style="--share:{row.distance[label] / most:.3f}">{row.distance[label]:.4f}</td>' for label in labels
        )
        + "</tr>"
        for row in rows
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Movement of the embedding"><table class="movement">'
        "<caption>1 - cosine of the embedding before and after the edit; 0 is no movement</caption>"
        f'<thead><tr><th scope="col">edit</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"
