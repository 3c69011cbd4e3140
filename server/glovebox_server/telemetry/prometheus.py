"""The text that Prometheus scrapes, and who may: https://prometheus.io/docs/instrumenting/exposition_formats/."""

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Final

import anyio
from starlette.responses import Response

from glovebox_audit.place import AuditError
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server import secret_files
from glovebox_server.errors import StoreError
from glovebox_server.telemetry.totals import BOUNDS, Series, TotalStore

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Instead of a file with a token: answer every peer on this machine.
LOOPBACK: Final = "loopback"
#: Seconds for which an answer is kept, however often it is asked for.
KEPT_SECONDS: Final = 1.0
_LEAST, _MOST = 16, 4096
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Scrape:
    """Answers scrapes with the totals of all server processes. One per process."""

    totals: TotalStore

    def __init__(self, who: str) -> None:
        """Take who may: ``LOOPBACK``, or a file with a token. Raises DiagnosedError if it cannot be used."""
        self._token = None if who == LOOPBACK else _digest(_token(Path(who)))
        self._turn, self._text, self._until = anyio.Lock(), "", 0.0

    async def answer(self, address: str, presented: str) -> Response | None:
        """Answer a peer at an address, with a token or an empty text; None for one that may not read."""
        if self._token is not None and not hmac.compare_digest(self._token, _digest(presented)):
            return None
        if self._token is None and not ipaddress.ip_address(address).is_loopback:
            return None
        try:
            async with self._turn:
                if time.monotonic() >= self._until:
                    await self.totals.count()
                    self._text = written((await self.totals.read())[0])
                    self._until = time.monotonic() + KEPT_SECONDS
        except (StoreError, AuditError):  # the server's log has the reason
            return Response(status_code=503)
        return Response(self._text, media_type=CONTENT_TYPE)


def _token(path: Path) -> str:
    content = secret_files.read_own(path, _MOST, "token for /metrics", "Name a file with a token.")
    token = content.decode("utf-8", "replace").strip()
    if not (_LEAST <= len(token) <= _MOST and token.isascii() and token.isprintable()):
        reason = f"it is no token of {_LEAST} to {_MOST} printable characters"
        raise DiagnosedError(f"token for /metrics {path}", reason, f"Run `openssl rand -hex 32 >{path}`.")
    return token


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def written(totals: Iterable[Series]) -> str:
    """Return totals as Prometheus reads them."""
    return "".join(f"{line}\n" for line in _lines(totals))


def _lines(totals: Iterable[Series]) -> Iterator[str]:
    before = None
    for metric, labels, value, counts, _ in totals:
        name, told = metric.prometheus, _labelled(labels)
        if metric != before:
            yield from (f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}")
            before = metric
        if metric.kind != "histogram":
            yield f"{name}{told} {value:.15g}"
            continue
        for bound, count in zip((*BOUNDS, "+Inf"), accumulate(counts), strict=True):
            yield f"{name}_bucket{_labelled({**labels, 'le': str(bound)})} {count}"
        yield from (f"{name}_sum{told} {value:.15g}", f"{name}_count{told} {sum(counts)}")


def _labelled(labels: dict[str, str]) -> str:
    inner = ",".join(f'{name.replace(".", "_")}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""
