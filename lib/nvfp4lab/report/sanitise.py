"""What HTML may stand on a page: headings, text, tables, pictures that are embedded. No script, no handler, no address
that the browser would load. nbconvert's own list is so short that it escapes `<p>`.
"""

import re

import bleach
from bleach.css_sanitizer import CSSSanitizer
from bleach.sanitizer import ALLOWED_TAGS

_TEXT_TAGS = (
    "p br wbr hr h1 h2 h3 h4 h5 h6 div span pre code kbd sub sup del s small mark figure figcaption dl dt dd details summary"
)
_TABLE_TAGS = "table caption colgroup col thead tbody tfoot tr th td img"
TAGS = frozenset(ALLOWED_TAGS) | {*_TEXT_TAGS.split(), *_TABLE_TAGS.split()}
_ATTRIBUTES = frozenset({"class", "id", "title", "style", "colspan", "rowspan", "align", "scope", "alt", "width", "height", "open"})
_STYLES = "color background-color text-align font-weight font-style width white-space padding"
_CSS = CSSSanitizer(allowed_css_properties=_STYLES.split())
_STYLE_OR_SCRIPT = re.compile(r"<(style|script)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE)


def _allowed(tag: str, name: str, value: str) -> bool:
    if tag == "img" and name == "src":
        return value.startswith(("data:image/png", "data:image/jpeg"))
    if tag == "a" and name == "href":
        return not value.strip().lower().startswith("data:")  # bleach checks the other protocols
    return name in _ATTRIBUTES


def sanitise(element) -> str:
    """`element` (HTML text or bytes) with everything removed that could run or load something."""
    text = element.decode() if isinstance(element, bytes) else str(element)
    text = _STYLE_OR_SCRIPT.sub("", text)  # bleach would leave their content standing as text
    return bleach.clean(text, tags=TAGS, attributes=_allowed, protocols={"http", "https", "mailto", "data"}, css_sanitizer=_CSS)
