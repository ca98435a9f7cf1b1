"""What HTML may stand on a page: headings, text, tables, pictures that are embedded. No script, no handler, no address
that the browser would load. nbconvert's own list is so short that it escapes `<p>`.
"""

import bleach
from bleach.css_sanitizer import CSSSanitizer
from bleach.sanitizer import ALLOWED_TAGS

TAGS = frozenset(ALLOWED_TAGS) | {
    *(
        [
            "p",
            "br",
            "hr",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "div",
            "span",
            "pre",
            "code",
            "kbd",
            "sub",
            "sup",
            "del",
            "s",
            "small",
            "mark",
            "figure",
            "figcaption",
            "dl",
            "dt",
            "dd",
            "details",
            "summary",
        ]
    ),
    *(["table", "caption", "colgroup", "col", "thead", "tbody", "tfoot", "tr", "th", "td", "img"]),
}
_ATTRIBUTES = {"class", "id", "title", "style", "colspan", "rowspan", "align", "scope", "border", "alt", "width", "height", "open"}
_CSS = CSSSanitizer(
    allowed_css_properties=[
        "color",
        "background-color",
        "text-align",
        "font-weight",
        "font-style",
        "width",
        "white-space",
        "padding",
    ]
)


def _allowed(tag: str, name: str, value: str) -> bool:
    if tag == "img" and name == "src":
        return value.startswith(("data:image/png", "data:image/jpeg"))
    if tag == "a" and name == "href":
        return not value.strip().lower().startswith("data:")  # bleach checks the other protocols
    return name in _ATTRIBUTES


def sanitise(element) -> str:
    """`element` (HTML text or bytes) with everything removed that could run or load something."""
    text = element.decode() if isinstance(element, bytes) else str(element)
    return bleach.clean(text, tags=TAGS, attributes=_allowed, protocols={"http", "https", "mailto", "data"}, css_sanitizer=_CSS)
