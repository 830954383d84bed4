"""How files of models and data are damaged: hypothesis strategies, from valid content to content that is not."""

import json
import struct

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
    """With one value of the header or of a tensor that is odd, or damaged as any file."""
    kind = draw(st.sampled_from(("header", "values", "bytes")))
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    tensors = [name for name, entry in header.items() if entry.get("dtype") in _ODD_NUMBERS]
    if kind == "bytes" or not tensors:
        return draw(damaged_bytes(content))
    entry = header[draw(st.sampled_from(tensors))]
    if kind == "header":
        entry[draw(st.sampled_from(sorted(entry)))] = draw(st.sampled_from(ODD_VALUES))
        written = json.dumps(header).encode()
        return struct.pack("<Q", len(written)) + written + data
    at, odd = entry["data_offsets"][0], draw(st.sampled_from(_ODD_NUMBERS[entry["dtype"]]))
    return content[: 8 + size] + data[:at] + odd + data[at + len(odd) :]
