"""Egress rules: what is allowed is what a rule names, as an independent reader of the URL sees it."""

from contextlib import suppress
from urllib.parse import urlsplit

from tests.fuzz.harness import bounded, text

from glovebox_profiles.egress.rules import EgressRule, decide, decide_url
from glovebox_profiles.egress.targets import (
    METHODS,
    EgressTarget,
    is_plain,
    normalise_path,
    parse_authority,
    parse_connect,
    parse_host,
    parse_url,
)
from glovebox_sandboxes.contract.errors import RefusedError

_METHODS = sorted(METHODS)


def _named(rule: EgressRule, target: EgressTarget) -> bool:
    """The rule read once more, in the words of the documentation and without the code that decides."""
    labels, wanted = target.host.split("."), rule.host.split(".")
    star = wanted[0] == "*"
    host = labels[-len(wanted) + 1 :] == wanted[1:] and len(labels) >= len(wanted) if star else labels == wanted
    # What is plain has properties of its own: tests/property/test_egress_properties.py.
    path = "/*" in rule.paths or (
        is_plain(target.path)
        and any(
            target.path[: len(pattern) - 1] == pattern[:-1] if pattern[-2:] == "/*" else pattern == target.path
            for pattern in rule.paths
        )
    )
    held = target.scheme in rule.schemes and target.port in rule.ports and target.method in rule.methods
    return host and held and (path or target.method == "CONNECT")


def _rule(host: str, path: str, flags: int) -> EgressRule | None:
    table: dict[str, object] = {"host": host}
    if flags & 1:
        table["schemes"] = ["http", "https"]
    if flags & 2:
        table["ports"] = [443, 80, 8080]
    if flags & 4:
        table["methods"] = ["GET", "POST", "CONNECT"]
    if path:
        table["paths"] = [path]
    try:
        rule = EgressRule.model_validate(table)
    except ValueError:
        return None
    assert EgressRule.model_validate(rule.model_dump()) == rule
    return rule


def _parts(content: str) -> None:
    """The readers of single parts are total, and what they give is read as itself."""
    with suppress(RefusedError):
        host = parse_host(content)
        assert parse_host(host) == host
    with suppress(RefusedError):
        path = normalise_path(content)
        assert normalise_path(path) == path
    with suppress(RefusedError):
        host, port = parse_authority(content)
        assert parse_authority(f"{f'[{host}]' if ':' in host else host}{f':{port}' if port else ''}") == (host, port)
    with suppress(RefusedError):
        tunnel = parse_connect(content)
        assert tunnel.path == ""
        assert parse_connect(f"{tunnel.host}:{tunnel.port}") == tunnel


def check(data: bytes) -> None:
    """First bytes: method and what the rule holds; then lines: its host, its path, and the URL."""
    if len(data) < 3:
        return
    method = _METHODS[data[0] % len(_METHODS)]
    host, _, rest = text(data[2:]).partition("\n")
    path, _, url = rest.partition("\n")
    with bounded():
        rule = _rule(host, path, data[1])
        _parts(url)
        rules = [rule] if rule else []
        decision = decide_url(method, url, rules)
        with suppress(RefusedError):
            tunnel = parse_connect(url)
            assert (decide(tunnel, rules).effect == "allow") == any(_named(each, tunnel) for each in rules)
    try:
        target = parse_url(method, url)
    except RefusedError:
        assert decision.effect == "deny"
        return
    assert (decision.effect == "allow") == any(_named(each, target) for each in rules)
    assert parse_url(method, target.url) == target
    assert target.url.isascii()
    assert target.url.isprintable()
    # A reader of another make sees the same host and port, in what was written and in what would be sent.
    for spelling in (url, target.url):
        seen = urlsplit(spelling)
        assert (seen.scheme, seen.hostname) == (target.scheme, target.host)
        assert (seen.port or {"http": 80, "https": 443}[seen.scheme]) == target.port
