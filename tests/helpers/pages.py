"""README.md, SKILL.md, CONTRIBUTING.md, docs/ and research/: their blocks, and the commands in these."""

import re
import shlex
from dataclasses import dataclass

from helpers.modules import ROOT

PAGES = {name: ROOT / name for name in ("README.md", "SKILL.md", "CONTRIBUTING.md")}
PAGES |= {path.name: path for path in sorted(ROOT.glob("docs/*.md"))}
PAGES |= {f"research/{path.name}": path for path in sorted(ROOT.glob("research/*.md"))}


@dataclass(frozen=True)
class Block:
    """A fenced block: the page's name, the number of its first line, its language, its text."""

    page: str
    line: int
    language: str
    code: str


def fenced(page: str, text: str) -> list[Block]:
    matches = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text[: match.start()].count("\n") + 2, match[1], match[2]) for match in matches]


BLOCKS = {name: fenced(name, path.read_text()) for name, path in PAGES.items()}


def shell_commands(script: str) -> list[list[str]]:
    """The words of each command of a bash script; what the shell would fill in becomes 2."""
    script = _without_substitutions(script.replace("\\\n", " "))
    script = re.sub(r"\$\w+", "2", script)
    commands = []
    for line in script.splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        words.whitespace_split, words.commenters = True, "#"
        commands.append([])
        for word in words:
            if set(word) <= set(";&|"):
                commands.append([])
            else:
                commands[-1].append(word)
    commands = [_without_prefix(command) for command in commands]
    inner = [shell_commands(command[-1]) for command in commands if command[-2:-1] == ["-c"]]
    return [*filter(None, commands), *(command for script in inner for command in script)]


def _without_substitutions(script: str) -> str:
    """With 2 for each $(...), however deep its parentheses are nested."""
    while (start := script.find("$(")) >= 0:
        depth, end = 1, start + 2
        while depth:
            depth += {"(": 1, ")": -1}.get(script[end], 0)
            end += 1
        script = f"{script[:start]}2{script[end:]}"
    return script


def _without_prefix(words: list[str]) -> list[str]:
    """Without variables set for the command, and a loop's `do`."""
    while words and (words[0] == "do" or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    return words
