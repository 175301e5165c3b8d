"""Files of the page: no build step, and nothing from another server."""

from functools import cache
from importlib import resources

from reluformer.inspection import maps

# Paths with the files in `assets/`; the map's are those of `inspection`.
ASSETS = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/map.css": ("", "text/css"),
    "/map.js": ("", "text/javascript"),
}


@cache
def asset(path: str) -> tuple[str, str]:
    """Content and media type of a file of the page."""
    name, media_type = ASSETS[path]
    if path == "/map.css":
        return maps.style(), media_type
    if path == "/map.js":
        return maps.script(), media_type
    content = resources.files("reluformer.serve").joinpath("assets", name).read_text("utf-8")
    return content, media_type
