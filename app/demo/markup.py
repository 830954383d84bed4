"""What the page shows, as HTML. Every text that comes from outside goes through `escape`; nothing else makes HTML."""

import base64
import re
from collections.abc import Sequence
from html import escape
from itertools import groupby
from math import sqrt

from .drawing import Drawn, Step
from .reading import Moved, Tokens
from .requests import Request
from .scenes import ToyScene

# In words and by the underline too, for those who do not tell the colours apart.
WINDOWS = {
    "original": "read by every encoder",
    "long": "read by long encoders only",
    "further": "beyond: a further window",
}


def message(text: str) -> str:
    """What went wrong."""
    return f'<p class="message wrong" role="alert">{escape(text)}</p>'


def note(text: str) -> str:
    """What was done."""
    return f'<p class="message" role="status">{escape(text)}</p>'


def _number(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


# While typing


def count_tokens(found: Tokens) -> str:
    """The tokens of a prompt, sentence by sentence, coloured by who reads them."""
    if not found.count:
        return '<p class="hint">Type or paste a prompt: its tokens appear here, coloured by who reads them.</p>'
    parts = [
        f'<p role="status"><strong>{_number(found.count, "token")}</strong> in '
        f"{_number(found.sentences, 'sentence')}</p>",
        _legend(found),
        '<ol class="sentences">',
    ]
    for sentence, tokens in groupby(found.tokens, key=lambda token: token.sentence):
        spans = "".join(f'<span class="token {token.window}">{escape(token.text)}</span>' for token in tokens)
        parts.append(f'<li value="{sentence}">{spans}</li>')
    return "".join([*parts, "</ol>"])


def _legend(found: Tokens) -> str:
    counts = {window: sum(token.window == window for token in found.tokens) for window in WINDOWS}
    ends = {"original": f"the first {found.original}", "long": f"up to {found.long}", "further": f"past {found.long}"}
    items = [
        f'<li><span class="token {window}">{counts[window]:,}</span> {words} <small>({ends[window]})</small></li>'
        for window, words in WINDOWS.items()
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


# While drawing


def progress(step: Step, request: Request) -> str:
    """How far the drawing is."""
    words = f"Encoder {request.encoders.index(step.label) + 1} of {len(request.encoders)}"
    if request.images > 1:
        words += f", picture {step.picture} of {request.images}"
    words += f", step {step.step} of {step.steps}"
    # The words change at every step, too often to be read out; a screen reader says the bar's value when asked.
    return (
        f'<p class="message">{words} <small>{escape(step.label)}</small></p>'
        f'<progress value="{step.done_share:.3f}" max="1" aria-label="Drawing: {words}"></progress>'
    )


# Pictures


def original(scene: ToyScene, png: bytes) -> str:
    """A scene's own picture, with what stands in it."""
    objects = "".join(f"<li>{escape(name)} <small>sentence {sentence}</small></li>" for name, sentence in scene.objects)
    return _card("The original scene", png, "original-scene.png", f'<ul class="objects">{objects}</ul>', "original")


def drawn(picture: Drawn, marks: Sequence[tuple[str, bool]] = ()) -> str:
    """A picture with its encoder, what that read, and which objects of the scene it shows."""
    text = f"<p>{escape(picture.read)}</p>" + (_marks(marks) if marks else "")
    stem = re.sub(r"[^A-Za-z0-9]+", "-", picture.label).strip("-") or "encoder"
    return _card(picture.label, picture.png, f"{stem}-seed-{picture.seed}.png", text, "", f"seed {picture.seed}")


def waiting(label: str) -> str:
    """The place of a picture that is not drawn yet."""
    return f'<figure class="card waiting"><div class="blank"></div><figcaption>{_title(label)}</figcaption></figure>'


def cards(figures: Sequence[str]) -> str:
    """Pictures beside each other, as many as there is room for."""
    return f'<div class="cards">{"".join(figures)}</div>'


def _title(label: str, more: str = "") -> str:
    return f"<strong>{escape(label)}</strong>" + (f" <small>{escape(more)}</small>" if more else "")


def _card(label: str, png: bytes, file: str, text: str, kind: str, more: str = "") -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    name = escape(label)
    return (
        f'<figure class="card {kind}"><button type="button" class="zoom" aria-label="Enlarge: {name}">'
        f'<img src="{source}" alt="Picture: {name}"></button>'
        f"<figcaption>{_title(label, more)}{text}"
        f'<a class="download" href="{source}" download="{escape(file)}" aria-label="Download PNG: {name}">'
        "Download PNG</a></figcaption></figure>"
    )


def _marks(marks: Sequence[tuple[str, bool]]) -> str:
    items = "".join(
        f'<li class="{"right" if right else "missed"}"><span aria-hidden="true">{"✓" if right else "✗"}</span> '
        f'<span class="unseen">{"right" if right else "missed"}:</span> {escape(name)}</li>'
        for name, right in marks
    )
    right = sum(right for _, right in marks)
    return f'<p class="score"><b>{right} of {len(marks)}</b> objects right</p><ul class="objects">{items}</ul>'


# What is read


def attention(looked: dict[str, dict]) -> str:
    """Each encoder's words with a bar above, as high as the root of the word's share of the attention.

    The root, because a few words usually take so much that the bars of all others would be flat.
    """
    most = max(word["after_softmax"] for found in looked.values() for word in found["words"]) or 1.0
    return "".join(_look(label, found, most) for label, found in looked.items())


def _look(label: str, found: dict, most: float) -> str:
    words = "".join(
        f'<li style="--share:{sqrt(word["after_softmax"] / most):.3f}" title="{word["after_softmax"]:.2%}">'
        f"<span>{escape(word['word'])}</span></li>"
        for word in found["words"]
    )
    # Both count the two around the text, which a person does not write.
    window, tokens = found["window"] - 2, found["tokens"] - 2
    read = f"reads all {tokens} tokens" if tokens <= window else f"reads the first {window} of {tokens} tokens"
    strongest = sorted(found["words"], key=lambda word: -word["after_softmax"])[:5]
    table = "".join(
        f"<tr><td>{escape(word['word'])}</td><td>{word['position']}</td><td>{word['after_softmax']:.2%}</td></tr>"
        for word in strongest
    )
    return (
        f'<section class="look"><h4>{escape(label)}</h4><p>{read}; besides, the start takes '
        f"{found['sot']['after_softmax']:.1%} of the attention, the end itself {found['eot']['after_softmax']:.1%}.</p>"
        f'<ol class="words">{words}</ol><details><summary>The five words with the most</summary><table><thead><tr>'
        '<th scope="col">word</th><th scope="col">position</th><th scope="col">share</th></tr></thead>'
        f"<tbody>{table}</tbody></table></details></section>"
    )


def movement(rows: Sequence[Moved]) -> str:
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
        '<div class="scroll" tabindex="0" role="region" aria-label="How the embedding moves"><table class="movement">'
        "<caption>1 - cosine of the embedding before and after: 0 is no movement</caption>"
        f'<thead><tr><th scope="col">edit</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"
