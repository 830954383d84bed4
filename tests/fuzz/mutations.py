"""How files of models and data are damaged: hypothesis strategies, from valid content to content that is not.

Plain functions, for any test to use: each takes what is valid and gives a strategy of what may be found instead.
"""

import copy
import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

from hypothesis import strategies as st

_DEEP = "\ue000deep\ue000"  # stands for nesting that no JSON writer gets through
_DEPTH = 100_000

NUMBERS = (-1, 0, 1, 2, 3, 7, 10**5, 10**7, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e-300, 1e308)
ODD_VALUES = (
    *NUMBERS,
    *(float(name) for name in ("nan", "inf", "-inf")),
    *(None, True, False, "", "abc", "../../etc/passwd", "\x00", "\ud800", "x" * 100_000, [], [None], ["abc"], {}),
    *({"a": 1}, [10**7] * 4, [1] * 10_000, _DEEP),
)


def odd_values() -> st.SearchStrategy:
    """Values that a field of a JSON file should not have."""
    return st.sampled_from(ODD_VALUES).map(copy.deepcopy)  # what is drawn is changed again


@st.composite
def mutate_json(draw, content) -> object:
    """`content` with one to three of its fields replaced, removed, added or moved."""
    content = json.loads(json.dumps(content))
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        content = _mutate_once(draw, content)
    return content


def _mutate_once(draw, content):
    places = list(_places(content))
    if not places or draw(st.integers(0, 19)) == 0:
        return draw(odd_values())
    parent, key = draw(st.sampled_from(places))
    kind = draw(st.sampled_from(("replace",) * 6 + ("remove", "add", "wrap", "copy")))
    if kind == "replace":
        parent[key] = draw(odd_values())
    elif kind == "remove":
        del parent[key]
    elif kind == "wrap":
        parent[key] = draw(st.sampled_from(([parent[key]], {"a": parent[key]}, str(parent[key]))))
    elif kind == "add" and isinstance(parent, dict):
        parent[draw(st.sampled_from(("a", "auto_map", "model_type", "_class_name", "dtype")))] = draw(odd_values())
    else:
        other, name = draw(st.sampled_from(places))
        parent[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else None
    return content


def _keys(node):
    return node.keys() if isinstance(node, dict) else range(len(node))


def _places(node):
    """Every (parent, key) of a JSON value."""
    for key in list(_keys(node)) if isinstance(node, (dict, list)) else ():
        yield node, key
        yield from _places(node[key])


def to_bytes(content) -> bytes:
    """A mutated JSON value as a file's content."""
    text = json.dumps(content)
    return text.replace(json.dumps(_DEEP), "[" * _DEPTH + "]" * _DEPTH).encode()


@st.composite
def damaged_bytes(draw, content: bytes) -> bytes:
    """`content` cut short, with bits flipped, or parts zeroed, repeated, inserted or appended."""
    kind = draw(st.sampled_from(("flip", "flip", "cut", "zero", "insert", "append", "repeat", "empty", "noise")))
    if kind == "empty" or not content:
        return b""
    # Beginnings hold what is believed.
    most = draw(st.sampled_from((8, 64, 4096, len(content))))
    start = draw(st.integers(0, min(most, len(content)) - 1))
    if kind == "flip":
        damaged = bytearray(content)
        for _ in range(draw(st.sampled_from((1, 1, 3, 20)))):
            damaged[draw(st.integers(0, min(most, len(content)) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(damaged)
    if kind == "cut":
        return content[:start]
    length = draw(st.sampled_from((1, 8, 100, 5000)))
    noise = draw(st.binary(min_size=1, max_size=100))
    parts = {
        "zero": content[:start] + bytes(length) + content[start + length :],
        "insert": content[:start] + noise + content[start:],
        "append": content + noise,
        "repeat": content[: start + length] + content[start:],
        "noise": noise,
    }
    return parts[kind]


@st.composite
def damaged_safetensors(draw, content: bytes) -> bytes:
    """A safetensors file with another header, header length or values, or damaged as any file."""
    kind = draw(st.sampled_from(("header", "header", "length", "values", "values", "bytes")))
    if kind == "bytes":
        return draw(damaged_bytes(content))
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    if kind == "header":
        named = draw(st.sampled_from(sorted(header)))
        entry = header.pop(named)
        header[named] = draw(mutate_json(entry))
        written = to_bytes(header)
        return struct.pack("<Q", len(written)) + written + data
    if kind == "length":
        lengths = (0, 1, size - 1, size + 1, 2**32, 2**63, 2**64 - 1)
        return struct.pack("<Q", draw(st.sampled_from(lengths))) + content[8:]
    tensors = [entry for name, entry in header.items() if name != "__metadata__" and entry["dtype"] in _ODD_NUMBERS]
    entry = draw(st.sampled_from(tensors)) if tensors else None
    if entry is None or entry["data_offsets"][0] == entry["data_offsets"][1]:
        return draw(damaged_bytes(content))
    odd = draw(st.sampled_from(_ODD_NUMBERS[entry["dtype"]]))
    begin, end = entry["data_offsets"]
    at = begin + draw(st.integers(0, (end - begin) // len(odd) - 1)) * len(odd)
    return content[: 8 + size] + data[:at] + odd + data[at + len(odd) :]


# NaN, infinity, and what overflows when it is used.
_ODD_NUMBERS = {
    "F32": [struct.pack("<f", value) for value in (float("nan"), float("inf"), float("-inf"), 1e38, -3e38)],
    "F16": [struct.pack("<e", value) for value in (float("nan"), float("inf"), float("-inf"))],
    "BF16": [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff", b"\x7f\x7f"],
    "I8": [b"\x80", b"\x7f"],
}


@st.composite
def damaged_torch_zip(draw, content: bytes) -> bytes:
    """A torch file with compressed, missing, swapped, resized or repeated entries, or damaged as any file."""
    kind = draw(st.sampled_from(("compress", "drop", "resize", "swap", "repeat", "pickle", "bytes")))
    if kind == "bytes":
        return draw(damaged_bytes(content))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at, other = (draw(st.integers(0, len(entries) - 1)) for _ in range(2))
    name, data = entries[at]
    if kind == "drop":
        del entries[at]
    elif kind == "resize":
        entries[at] = (name, draw(st.sampled_from((b"", data[:-1], data + b"\0" * 64, data[: len(data) // 2]))))
    elif kind == "swap":
        entries[at], entries[other] = (name, entries[other][1]), (entries[other][0], data)
    elif kind == "repeat":
        entries.append((name, entries[other][1]))
    elif kind == "pickle":
        at = next(index for index, (entry, _) in enumerate(entries) if entry.endswith("data.pkl"))
        entries[at] = (entries[at][0], draw(damaged_bytes(entries[at][1])))
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED if kind == "compress" else zipfile.ZIP_STORED) as archive:
        for entry, data in entries:
            archive.writestr(entry, data)
    return written.getvalue()


def trap(file: Path) -> bytes:
    """A pickle that writes `file` when it is loaded without care."""

    class Trap:
        def __reduce__(self):
            return Path.write_text, (file, "run")

    return pickle.dumps({"state_dict": Trap()})


def damaged_file(name: str, content: bytes) -> st.SearchStrategy[bytes]:
    """A file of a model's folder as it should not be, by its name and content."""
    if content.startswith(b"PK"):
        return damaged_torch_zip(content)
    return (damaged_safetensors if Path(name).suffix == ".safetensors" else damaged_bytes)(content)
