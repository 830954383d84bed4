"""A page of results as a browser reads it."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """A page's elements with their attributes, its text and table rows; fails where tags do not close in order."""

    def __init__(self, source: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self._texts: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self._texts.append(data)
        if {"th", "td"} & set(self._open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join("".join(self._texts).split())

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]

    def check_is_self_contained(self) -> None:
        """Nothing is loaded from elsewhere, and nothing runs."""
        loads = [
            value
            for tag, attributes in self.elements
            for name, value in attributes.items()
            if name.split(":")[-1] in ("src", "srcset", "href", "data", "poster", "action")
        ]
        assert loads and all(value.startswith(("data:", "#")) for value in loads)
        assert not self.all("script")
        assert not [name for _, attributes in self.elements for name in attributes if name.startswith("on")]
        assert all(header["scope"] in ("col", "row", "rowgroup") for header in self.all("th"))
        assert all(image["alt"] for image in self.all("img"))
