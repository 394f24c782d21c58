"""Checks the built site without a network: `python docs/check.py docs/_build/html` prints what is wrong, and fails.

A page may link to other sites, but must not load scripts, styles, fonts or pictures from them; links within the site
must lead to a file, and to a place in it.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {  # attributes whose address a browser loads by itself
    **dict.fromkeys(("script", "img", "source", "iframe", "embed", "audio", "video", "track", "input"), "src"),
    **{"link": "href", "object": "data", "use": "href"},
}
MENTIONED = {"search", "index", "next", "prev", "canonical", "author", "license"}  # links of a <link> not loaded
STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s;]+)""")


class Page(HTMLParser):
    """What a page loads, where its links lead, and the places that links may lead to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = {"", "top"}
        self._style = False
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the addresses and the id of a tag."""
        given = {name: value or "" for name, value in attrs}
        self._style = tag == "style"
        self.places |= {given[name] for name in ("id", "name") if name in given}
        self.loaded += STYLE.findall(given.get("style", ""))
        self.loaded += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        if LOADED.get(tag) in given and not (tag == "link" and given.get("rel", "") in MENTIONED):
            self.loaded.append(given[LOADED[tag]])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])

    def handle_data(self, data: str) -> None:
        """Note what a style sheet in the page loads."""
        if self._style:
            self.loaded += STYLE.findall(data)


def problems(site: Path) -> list[str]:
    """Return a line for each thing loaded from elsewhere, and for each link within the site that leads nowhere."""
    pages = {file.resolve(): Page(file) for file in sorted(site.rglob("*.html"))}
    found = []
    for sheet in sorted(site.rglob("*.css")):
        text = re.sub(r"/\*.*?\*/", "", sheet.read_text(), flags=re.DOTALL)
        found += [f"{sheet}: loads {address}" for address in STYLE.findall(text) if _elsewhere(address)]
    for file, page in pages.items():
        found += [f"{file}: loads {address}" for address in page.loaded if _elsewhere(address)]
        local = [address for address in (*page.loaded, *page.links) if not _elsewhere(address)]
        found += [f"{file}: {address} leads nowhere" for address in local if not _exists(address, file, pages)]
    return found


def _elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc) or urlsplit(address).scheme in ("mailto", "ftp")


def _exists(address: str, file: Path, pages: dict[Path, Page]) -> bool:
    """Return whether a local address, as it stands in `file`, leads to a file and to a place in it."""
    parts = urlsplit(address)
    if parts.scheme in ("data", "javascript"):
        return True
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    return (
        target in pages
        and unquote(parts.fragment) in pages[target].places
        or (target not in pages and target.is_file())
    )


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1]))
    print("\n".join(lines) or "links, places and assets: all here")
    sys.exit(bool(lines))
