"""Files of prompts: what is read of them, and what is left out by its line."""

import json

import pytest

from debias_diffusion.app import prompts
from debias_diffusion.app.prompts import MAX_SEED, Prompt, parse_seed, read_prompts
from debias_diffusion.errors import UserError


def read(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_one_prompt_a_line(tmp_path, end, mark):
    lines = ["", "a cat, (grey:1.2)", "  ", ' ein "Bär" — {x} ', "# 猫", ""]
    texts = ["a cat, (grey:1.2)", 'ein "Bär" — {x}', "# 猫"]
    expected = [Prompt(number, text, where=f"line {(2, 4, 5)[number]}") for number, text in enumerate(texts)]
    assert read(tmp_path, "p.txt", mark + end.join(lines).encode()) == (expected, {})


def test_a_bad_line_keeps_its_number(tmp_path):
    read_of, left_out = read(tmp_path, "p.TXT", b"one\n\xff\xfe\n" + b"x" * 20_001 + b"\n\xc2\xad\xe2\x80\x8b two\n")
    assert [(prompt.number, prompt.text[-3:]) for prompt in read_of] == [(0, "one"), (3, "two")]
    assert list(left_out.items()) == [
        ("line 2", "Not UTF-8 (invalid start byte at byte 0)."),
        ("line 3", "The prompt has 20,001 characters; at most 20,000 are read. Shorten it."),
    ]


def test_json_lines(tmp_path):
    entries = [
        {"prompt": "one", "negative_prompt": "n", "seed": 7, "prompt_2": "two", "id": 9},
        {"prompt": "a\nb", "seed": None, "negative_prompt": None},
        {"prompt": "c", "negative_prompt": "", "seed": "8"},
        {"prompt": "d", "seed": 9.0, "negative_prompt": "n", "prompt_2": ""},
    ]
    content = (
        "\ufeff" + "\r\n".join(json.dumps(entry, ensure_ascii=bool(i)) for i, entry in enumerate(entries)) + "\n\n"
    )
    assert read(tmp_path, "p.jsonl", content) == (
        [
            Prompt(0, "one", "n", "two", 7, "line 1"),
            Prompt(1, "a\nb", where="line 2"),
            Prompt(2, "c", "", None, 8, "line 3"),
            Prompt(3, "d", "n", None, 9, "line 4"),
        ],
        {},
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a cat", "Not JSON: Expecting value; it begins 'a cat'."),
        ('{"prompt": "a', "Not JSON: Unterminated string starting at; it begins"),
        ('["a cat"]', "Not an object but a list."),
        ('"a cat"', "Not an object but a str."),
        ("[" * 100_000, "Not JSON: "),
        ("{}", "It has no prompt, only: nothing."),
        ('{"promt": "a", "seed": 3}', "It has no prompt, only: promt, seed."),
        ('{"prompt": null}', "It has no prompt"),
        ('{"prompt": 3}', "The prompt must be text, got '3'."),
        ('{"prompt": ["a"]}', "The prompt must be text, got \"['a']\"."),
        ('{"prompt": " \\n"}', "The prompt is empty. Say what to draw."),
        (r'{"prompt": "\u0085"}', "The prompt is empty. Say what to draw."),
        ('{"prompt": "\\ud800"}', "The prompt holds '\\ud800', which is no character."),
        ('{"prompt": "a", "negative_prompt": 3}', "The negative_prompt must be text, got '3'."),
        ('{"prompt": "a", "prompt_2": "' + "x" * 20_001 + '"}', "The prompt_2 has 20,001 characters"),
        ('{"prompt": "a", "seed": -1}', "The seed must be a whole number from 0 to 2^63 - 1, got '-1'."),
        ('{"prompt": "a", "seed": true}', "The seed must be a whole number from 0 to 2^63 - 1, got 'True'."),
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path, line, why):
    prompts, left_out = read(tmp_path, "p.jsonl", '{"prompt": "first"}\n\n' + line + '\n{"prompt": "last"}')
    assert [(prompt.number, prompt.text) for prompt in prompts] == [(0, "first"), (2, "last")]
    [(where, reason)] = list(left_out.items())
    assert where == "line 3" and reason.startswith(why)


def test_csv(tmp_path):
    content = "\ufeffSeed, prompt ,negative_prompt,note"
    content += '\r\n7,"a cat, a ""dog""\r\nand more",grey,x\r\n\r\n,b\r\n,,,\r\n8.0,c,"",\r\n'
    assert read(tmp_path, "p.csv", content) == (
        [
            Prompt(0, 'a cat, a "dog"\r\nand more', "grey", None, 7, "line 2"),
            Prompt(1, "b", where="line 5"),
            Prompt(2, "c", seed=8, where="line 7"),
        ],
        {},
    )


def test_a_bad_value_of_csv_is_named(tmp_path):
    prompts, left_out = read(tmp_path, "p.csv", "\n".join(["prompt,seed", "a,1", "b,x", ",3", "f,7"]))
    assert [(prompt.number, prompt.text) for prompt in prompts] == [(0, "a"), (3, "f")]
    assert list(left_out.items()) == [
        ("line 3", "The seed must be a whole number from 0 to 2^63 - 1, got 'x'."),
        ("line 4", "It has no prompt, only: seed."),
    ]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('"never closed', "at line 10.*: "),  # all that follows would be its cell
        ('"closed by the next one\n"that opens", 7', "at line 4: ',' expected after"),
        ("c,4,5", "at line 3: it has 3 cells, and the first line names 2 columns"),
        ('"d" e,6', "at line 3: ',' expected after"),
        ("x" * 200_000, "at line 3: field larger than field limit"),
    ],
)
def test_a_broken_csv_is_refused_with_its_line(tmp_path, bad, message):
    rows = ["prompt,seed", *(f"prompt {i},{i}" for i in range(1000))]
    rows[2] = bad
    with pytest.raises(UserError, match=f"is no CSV {message}"):
        read(tmp_path, "p.csv", "\n".join(rows))


def test_text_in_utf_16_without_a_mark_is_not_taken_for_prompts(tmp_path):
    for name in ("p.txt", "p.csv"):
        with pytest.raises(UserError, match=r"prompt holds the character '.x00'|has no column 'prompt'"):
            read(tmp_path, name, "prompt\na cat".encode("utf-16-le"))
    _, left_out = read(tmp_path, "p.jsonl", json.dumps({"prompt": "a\0cat"}) + '\n{"prompt": "b"}')
    assert list(left_out.items()) == [("line 1", r"The prompt holds the character '\x00'. Write it as UTF-8.")]


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "folder.csv").mkdir()
    for name, reason in (("folder.csv", "Is a directory"), ("nowhere.txt", "No such file")):
        with pytest.raises(UserError, match=rf"{name}' cannot be read \({reason}"):
            read_prompts(tmp_path / name)
    monkeypatch.setattr(prompts, "MAX_PROMPTS", 3)
    assert len(read(tmp_path, "p.txt", "a\nb\nc")[0]) == 3
    with pytest.raises(UserError, match="more than 3 entries"):
        read(tmp_path, "p.txt", "a\nb\nc\nd")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.md", "a cat", r"ends in '.md'. Give a .txt of one prompt a line, a .jsonl"),
        ("p", "a cat", "ends in ''"),
        ("p.txt", "", "holds no usable prompt. Give a .txt"),
        ("p.txt", b"\xff\xfea\0", "no usable prompt. The first fault: line 1: Not UTF-8"),
        ("p.jsonl", "{}\n3", "holds no usable prompt. The first fault: line 1: It has no prompt, only: nothing."),
        ("p.csv", "", "has no column 'prompt', or one column twice: its first line is ''"),
        ("p.csv", "prompt;seed\na;3", "no column 'prompt'.* is 'prompt;seed'. Name columns of .* with commas"),
        ("p.csv", "prompt,prompt\na,b", "one column twice: its first line is 'prompt,prompt'"),
        ("p.csv", b"prompt\na\n\xff", r"is not UTF-8 \(line 3\)"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, name, content)


def test_seeds():
    assert [parse_seed(value) for value in (0, "7", 7.0, " 8.0 ", MAX_SEED)] == [0, 7, 7, 8, MAX_SEED]
    for value in (-1, 1.5, MAX_SEED + 1, 1e300, float("nan"), "1e3", "", "٣", None, False):
        with pytest.raises(UserError, match="The seed must be"):
            parse_seed(value)
