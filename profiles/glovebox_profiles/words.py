"""Plain words for values of a profile. Pure text."""

from collections.abc import Iterable
from functools import lru_cache

from glovebox_profiles.egress.rules import EgressRule
from glovebox_profiles.egress.targets import DEFAULT_PORTS
from glovebox_profiles.model import Credential, Revealed


@lru_cache(256)
def size(count: int) -> str:
    """Write a number of bytes in the largest unit that keeps it whole: ``512 MiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor and count % factor == 0:
            return f"{count // factor} {unit}"
    return f"{count} bytes"


@lru_cache(256)
def number(value: float) -> str:
    """Write a number without a fraction that is zero."""
    return f"{value:g}" if value == int(value) and value < 1e6 else str(value)  # noqa: PLR2004 - where :g turns to 1e+06


def rule(each: EgressRule) -> str:
    """Write one egress rule: ``https://pypi.org (GET, HEAD; only /simple/*)``."""
    usual = {DEFAULT_PORTS[scheme] for scheme in each.schemes}
    ports = "" if each.ports == usual else ":" + "|".join(str(port) for port in sorted(each.ports))
    paths = "" if each.paths == {"/*"} else f"; only {', '.join(sorted(each.paths))}"
    methods = ", ".join("CONNECT (any TLS traffic)" if name == "CONNECT" else name for name in sorted(each.methods))
    return f"{'|'.join(sorted(each.schemes))}://{each.host}{ports} ({methods}{paths})"


def credential(each: Credential) -> str:
    """Write a credential's requests: ``github for https://api.github.com (GET; only /repos/*)``, with its headers."""
    return f"{each.name} for {rule(each.rule())}{''.join(f'; {text}' for text in headers(each))}"


def headers(each: Credential) -> tuple[str, ...]:
    """Write the further headers of requests with a credential."""
    fixed = [f"{name}: {text}" for name, text in sorted(each.set_headers.items())]
    return (
        *((f"the program's {listed(each.headers)}",) if each.headers else ()),
        *((f"always {listed(fixed)}",) if fixed else ()),
    )


def revealed(each: Revealed) -> str:
    """Write one file that is shown, with the reason: ``config/.env (the tests read it)``."""
    return f"{each.path} ({each.reason.rstrip('.')})"


def listed(items: Iterable[str], *, none: str = "nothing") -> str:
    """Join items with commas; name the empty list."""
    return ", ".join(items) or none
