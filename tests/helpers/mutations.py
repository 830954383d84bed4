"""How files of models and data are damaged: hypothesis strategies, from valid content to content that is not."""

import io
import json
import struct
import zipfile

from hypothesis import strategies as st

ODD_VALUES = (
    *(-1, 0, 1, 2, 3, 7, 10**5, 10**7, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e-300, 1e308),
    *(float("nan"), float("inf"), None, True, False, "", "abc", "../../etc/passwd", "\x00", "\ud800", "x" * 100_000),
    *([], [None], ["abc"], {}, {"a": 1}, [10**7] * 4, [1] * 10_000),
)
# Of safetensors: NaN, infinity, and what overflows when it is used.
_ODD_NUMBERS = {
    "F32": [struct.pack("<f", value) for value in (float("nan"), float("inf"), 1e38, -3e38)],
    "F16": [struct.pack("<e", value) for value in (float("nan"), float("-inf"))],
    "BF16": [b"\xc0\x7f", b"\x80\x7f", b"\x7f\x7f"],
    "I8": [b"\x80", b"\x7f"],
}


@st.composite
def damaged_bytes(draw, content: bytes) -> bytes:
    """`content` cut short, with bits flipped, or parts zeroed, repeated, inserted or appended."""
    kind = draw(st.sampled_from(("flip", "flip", "cut", "zero", "insert", "append", "repeat", "empty", "noise")))
    if kind == "empty" or not content:
        return b""
    # Beginnings hold what is believed.
    places = st.integers(0, min(draw(st.sampled_from((8, 64, 4096, len(content)))), len(content)) - 1)
    start, length = draw(places), draw(st.sampled_from((1, 8, 100, 5000)))
    if kind == "flip":
        damaged = bytearray(content)
        for _ in range(draw(st.sampled_from((1, 1, 3, 20)))):
            damaged[draw(places)] ^= 1 << draw(st.integers(0, 7))
        return bytes(damaged)
    noise = draw(st.binary(min_size=1, max_size=100))
    return {
        "cut": content[:start],
        "zero": content[:start] + bytes(length) + content[start + length :],
        "insert": content[:start] + noise + content[start:],
        "append": content + noise,
        "repeat": content[: start + length] + content[start:],
        "noise": noise,
    }[kind]


@st.composite
def damaged_safetensors(draw, content: bytes) -> bytes:
    """A safetensors file with another header, header length or value, or damaged as any file."""
    kind = draw(st.sampled_from(("header", "header", "length", "values", "values", "bytes")))
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    if kind == "header":
        name = draw(st.sampled_from(sorted(header)))
        parents = [header, header[name], *(value for value in header[name].values() if isinstance(value, list))]
        parent = draw(st.sampled_from([parent for parent in parents if parent]))
        field = draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
        if isinstance(parent, dict) and draw(st.integers(0, 4)) == 0:
            del parent[field]
        else:
            parent[field] = draw(st.sampled_from(ODD_VALUES))
        written = json.dumps(header).encode()
        return struct.pack("<Q", len(written)) + written + data
    if kind == "length":
        lengths = (0, 1, size - 1, size + 1, 2**32, 2**63, 2**64 - 1)
        return struct.pack("<Q", draw(st.sampled_from(lengths))) + content[8:]
    entries = [entry for name, entry in header.items() if name != "__metadata__" and entry["dtype"] in _ODD_NUMBERS]
    entries = [entry for entry in entries if entry["data_offsets"][0] < entry["data_offsets"][1]]
    if kind == "bytes" or not entries:
        return draw(damaged_bytes(content))
    entry = draw(st.sampled_from(entries))
    odd, (begin, end) = draw(st.sampled_from(_ODD_NUMBERS[entry["dtype"]])), entry["data_offsets"]
    at = begin + draw(st.integers(0, (end - begin) // len(odd) - 1)) * len(odd)
    return content[: 8 + size] + data[:at] + odd + data[at + len(odd) :]


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


def damaged_file(name: str, content: bytes) -> st.SearchStrategy[bytes]:
    """A file of a model's folder as it should not be, by its name and content."""
    if content.startswith(b"PK"):
        return damaged_torch_zip(content)
    return (damaged_safetensors if name.endswith(".safetensors") else damaged_bytes)(content)
