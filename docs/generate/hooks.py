"""MkDocs hooks: generated parts of the pages, and links from pages to files of the repository.

A line `<!-- generated: NAME -->` in a page is replaced by the output of one of `PARTS`. A link such
as `../results/x.json`, which works on a code host, is served as a copy of that file.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import commands  # noqa: E402
import gallery  # noqa: E402
import memories  # noqa: E402
import modules  # noqa: E402
import settings  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "commands": commands.markdown,
    "gallery": gallery.markdown,
    "memories": memories.markdown,
    "modules": modules.markdown,
    "module count": modules.count,
    "settings": settings.markdown,
}
_MARKER = re.compile(r"<!-- generated: ([\w ]+) -->")
_REPOSITORY_LINK = re.compile(r"\]\(\.\./([\w./-]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the gallery's plots and every repository file that a page links to."""
    for name, svg in gallery.plots().items():
        files.append(File.generated(config, f"gallery/{name}.svg", content=svg))
    linked = {
        path
        for page in Path(config.docs_dir).glob("*.md")
        for path in _REPOSITORY_LINK.findall(page.read_text(encoding="utf-8"))
    }
    for path in sorted(linked):
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, _served(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Insert the generated parts and redirect links that leave the docs folder."""
    if page.file.src_uri == "log.md":
        page.meta["search"] = {"boost": 0.3}  # long: it would come first for most words
    markdown = _MARKER.sub(lambda match: PARTS[match[1]](), markdown)
    return _REPOSITORY_LINK.sub(lambda match: f"]({_served(match[1])})", markdown)


def _served(path: str) -> str:
    """Place of a repository file in the site; as text, because browsers only download code."""
    return f"repository/{path}" if path.endswith(".json") else f"repository/{path}.txt"
