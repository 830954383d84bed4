"""Files of prompts: what is read of them, and what is left out by its line."""

import json
import os
import re

import pytest

from debias_diffusion.app.prompts import MAX_SEED, parse_seed, read_prompts
from debias_diffusion.errors import UserError
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt, ImageTask

ENTRIES = [
    {"prompt": "one", "negative_prompt": "n", "seed": 7, "prompt_2": "two"},
    {"positive": "a\nb", "seed": None, "negative_prompt": None, "steps": None},
    {"Prompt": "猫", "Negative": "", "seed": "8", "prompt-2": ""},
]


def task(number, text, negative="usual", second=None, seed=None, where=""):
    return ImageTask(f"0000{number}", ImagePrompt(text, 40 + number if seed is None else seed, negative, second), where)


def read(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts(path, 40, "usual")


@pytest.mark.parametrize(("end", "mark"), [("\n", ""), ("\r\n", "\ufeff"), ("\r", "")])
def test_one_prompt_a_line(tmp_path, end, mark):
    lines = ["", "a cat, (grey:1.2)", "  ", ' ein "Bär" — {x} ', "# 猫", ""]
    texts = ["a cat, (grey:1.2)", 'ein "Bär" — {x}', "# 猫"]
    expected = [task(number, text, where=f"line {(2, 4, 5)[number]}") for number, text in enumerate(texts)]
    assert read(tmp_path, "p.TXT", mark + end.join(lines)) == (expected, {})


def test_json_lines(tmp_path):
    content = "\ufeff" + "\r\n".join(json.dumps(entry, ensure_ascii=False) for entry in ENTRIES) + "\n\n"
    expected = [
        task(0, "one", "n", "two", 7, "line 1"),
        task(1, "a\nb", where="line 2"),
        task(2, "猫", "", None, 8, "line 3"),
    ]
    assert read(tmp_path, "p.jsonl", content) == (expected, {})


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv(tmp_path, separator, capsys):
    content = "\ufeffSeed, PROMPT ,Negative Prompt,Category,Note,"
    content += '\r\n7,"a cat, a ""dog""\r\nand more",grey,x,\r\n\r\n,b\r\n,,,,,\r\n8.0,c,"",y,\r\n'
    expected = [
        task(0, f'a cat{separator} a "dog"\r\nand more', "grey", None, 7, "line 2"),
        task(1, "b", where="line 5"),
        task(2, "c", seed=8, where="line 7"),
    ]
    assert read(tmp_path, "p.csv", content.replace(",", separator)) == (expected, {})
    assert capsys.readouterr().out.count("p.csv: Category. Steps, size and the like are options") == 1


BAD_ENTRIES = [
    ("p.txt", b"\xff\xfe", r"The prompt holds '\udcff'"),
    ("p.jsonl", b"a cat", "bad JSON: Expecting value, it begins 'a cat'"),
    ("p.jsonl", b'{"prompt": 3}', "The prompt must be text"),
    ("p.jsonl", b'{"prompt": "a", "prompt_2": "\\ud83d"}', r"The prompt_2 holds '\ud83d'"),
    ("p.jsonl", b'{"prompt": "a\\u0000"}', r"The prompt holds '\x00'"),
    ("p.jsonl", b'{"prompt": "a", "Prompt": "b"}', "The prompt is given twice"),
    ("p.jsonl", b'{"prompt": "a", "seed": -1}', "The seed must be"),
]


@pytest.mark.parametrize(("name", "line", "why"), BAD_ENTRIES)
def test_a_bad_entry_is_named_and_keeps_its_number(tmp_path, name, line, why):
    good = b'{"prompt": "a"}' if name == "p.jsonl" else b"a"
    [first, last], left_out = read(tmp_path, name, b"\n".join([good, line, good]))
    assert [*left_out] == ["line 2"] and left_out["line 2"].startswith(why)
    assert (first.name, last.name, last.where) == ("00000", "00002", "line 3")


UNUSABLE = [
    ("p.md", "a cat", r"ends in '.md'. Give a .txt"),
    ("p.jsonl", '{"text": "a"}\n3', "no usable prompt. The first fault: line 1: It has no prompt, only: text"),
    ("p.csv", "prompt,Positive\na,b", "p.csv' is no CSV at line 1: The prompt is given twice"),
    ("p.csv", "seed\n3", "There is no column 'prompt'"),
    # A broken row ends the file: all that follows might be its cell.
    ("p.csv", 'prompt\n"never closed\na\nb', "is no CSV at line 4"),
    ("p.csv", "prompt,seed\nc,4,5", "is no CSV at line 2: it has 3 cells"),
]


@pytest.mark.parametrize(("name", "content", "message"), UNUSABLE)
def test_a_file_that_cannot_be_used(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, name, content)


def test_seeds():
    assert [parse_seed(value) for value in (0, "7", 7.0, " 8.0 ", MAX_SEED)] == [0, 7, 7, 8, MAX_SEED]
    for value in (-1, 1.5, MAX_SEED + 1, float("nan"), "1e3", "", "٣", None, False):
        with pytest.raises(UserError, match="The seed must be"):
            parse_seed(value)


DRAWN = {  # what each line gives, or why it is left out
    "{x|x} <lora:a__b__c:1>": "x <lora:a__b__c:1>",
    "a __tags__ <lora:__sub/deep__:1>": "a <lyco:#a__b:1> <lora:deep:1>",
    "{__s*/*__} __suit__": "deep hearts",
    "{__cp*__|__cp1252__}": ".*cp1252.txt' cannot be read: .* 0xe9 in position 3.*",
    "{__pipe__|__gone__}": "'__(pipe|gone)__' is in no regular file of .*",
    "{|}": "The prompt is empty.*",
    "{a|b": ".*line 7 cannot be read: Expected.*",
}


def test_alternatives_are_drawn_and_those_that_cannot_be_are_left_out(tmp_path):
    pytest.importorskip("dynamicprompts")
    (tmp_path / "wildcards" / "sub").mkdir(parents=True)
    files = {"tags.txt": b"\xef\xbb\xbf<lyco:#a__b:1>\r\n# no\n", "cp1252.txt": b"caf\xe9"}
    for name, content in (files | {"sub/deep.txt": b"deep", "s.yaml": b"suit: [hearts]"}).items():
        (tmp_path / "wildcards" / name).write_bytes(content)
    os.mkfifo(tmp_path / "wildcards" / "pipe.txt")
    (tmp_path / "wildcards" / "gone.txt").symlink_to("nowhere")
    images, left_out = read(tmp_path, "p.txt", "\n".join(DRAWN))
    found = [*(image.prompt.prompt for image in images), *left_out.values()]
    assert len(images) == 3 and all(map(re.fullmatch, DRAWN.values(), found)), found
