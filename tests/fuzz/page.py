"""Any response of any server: text within its bounds, soon, that does nothing to a terminal."""

import json
import re

from tests.fuzz.harness import bounded

from _glovebox_guest.web import page, readable

_TYPES = (
    "text/html",
    "",
    "text/html; charset=utf-16",
    "text/html; charset=shift_jis",
    "text/plain",
    "application/json",
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MOST = 1000
_GUIDED = readable.readable  # the job imports it when it needs it, which is too late for the fuzzer to see its branches


def check(data: bytes) -> None:
    """First byte: what the server calls it."""
    if not data:
        return
    with bounded():
        value = page.describe(
            {
                "url": "https://a.example/b/",
                "status": 200,
                "headers": {"content-type": _TYPES[data[0] % len(_TYPES)]},
                "body": data[1:],
                "max_chars": _MOST,
                "raw": bool(data[0] & 128),
            }
        )
    json.dumps(value, ensure_ascii=False).encode()
    if "error" not in value:
        assert len(value["text"]) <= _MOST
        assert not _CONTROL.search(value["text"])
        assert not _CONTROL.search(value["title"])
