"""The parts of an HTML page that tests check."""

from __future__ import annotations

from html.parser import HTMLParser


class Markup(HTMLParser):
    """Elements of a page as (tag, attributes), and the texts of scripts and styles by (tag, id)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[tuple[str, str | None], list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.CDATA_CONTENT_ELEMENTS:
            self.texts.setdefault((tag, dict(attrs).get("id")), []).append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is not None:
            tag, attributes = self.elements[-1]
            self.texts[tag, attributes.get("id")][-1] += data
