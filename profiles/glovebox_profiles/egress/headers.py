"""Request headers that a profile cannot choose, and why. Pure."""

import re
from collections.abc import Iterable
from typing import Final

NOT_LENT: Final = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "expect",
        "host",
        "if-range",
        "keep-alive",
        "max-forwards",
        "proxy-connection",
        "range",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that frame or route a request, or would defeat the search for keys in the answer (RFC 9110, 9112)."""

_AUTHENTICATES: Final = re.compile(
    r"(.*-)?(auth.*|cookies?2?|tokens?|jwt|secret|password|passwd|credentials?|sessions?|signature|apikey)(-.*)?"
    r"|(.*-)?(api|access|account|app|application|functions|master|private|secret|service|shared|subscription)-key(-.*)?"
    r"|(x-)?key|.*(remote|client|real|connecting)-(ip|user|addr)|.*client-cert.*|x-ssl-.*"
)
"""Headers that would carry a foreign key out, or make a server trust an address."""
_ROUTES: Final = re.compile(
    r"proxy-.*|.*forwarded.*|(x-)?http-?method.*|x-method.*|.*-override|x-original-.*|x-rewrite-.*|x-host|x-.*-(host|url|uri)"
    r"|via|alt-used|destination|depth|overwrite|front-end-https|early-data|http2-settings|sec-.*|upgrade-.*"
    r"|request-range|content-(encoding|range|transfer-encoding)|x-range|x-accel-.*|x-sendfile.*"
)
"""By these some servers answer another request than the one that was decided."""


def require_harmless(names: Iterable[str], own: str | None) -> None:
    """Raise ValueError if an added header authenticates, frames, routes or overrides a request, or is named twice.

    ``own`` is the key's own header; None if the key stands in the query.
    """
    seen: set[str] = set()
    for name in map(str.lower, names):
        if name in seen:
            raise ValueError(f"{name} is named twice in headers and set_headers")
        seen.add(name)
        if own is not None and name == own.lower():
            raise ValueError(f"{name} is where the key stands, so headers and set_headers cannot name it")
        if _AUTHENTICATES.fullmatch(name):
            raise ValueError(f"{name} authenticates, so headers and set_headers cannot name it")
        if name in NOT_LENT or _ROUTES.fullmatch(name):
            raise ValueError(f"{name} frames, routes or overrides a request, so headers and set_headers cannot name it")
