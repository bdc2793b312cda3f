"""What a browser would make of a page: its elements, in balance, with their attributes and text."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}


@dataclasses.dataclass
class Node:
    tag: str
    attributes: dict[str, str]
    children: list[Node] = dataclasses.field(default_factory=list)
    text: str = ""  # of itself and all below

    def all(self, tag: str) -> list[Node]:
        return [node for node in self.everything() if node.tag == tag]

    def everything(self) -> list[Node]:
        return [self, *(node for child in self.children for node in child.everything())]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag} has an attribute twice"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert any(node.tag == "svg" for node in self.open), f"{tag} closes itself outside of SVG"
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for node in self.open:
            node.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def read_html(text: str) -> Node:
    """The html element of a page in which every element that is opened is closed in its place."""
    assert text.startswith("<!DOCTYPE html>\n")
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert [node.tag for node in reader.open] == [""], "not all elements are closed"
    (root,) = reader.open[0].children
    return root
