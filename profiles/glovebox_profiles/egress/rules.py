"""Egress rules of a profile, and the decision about one request. Pure: no I/O, no resolving, no clock.

A rule is a product: any of its methods on any of its schemes, ports and paths of its host. A list of rules allows what
one of them allows; an empty list allows nothing. So the intersection of two lists is exact: the union of the pairwise
products.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_serializer, model_validator

from glovebox_profiles.egress import targets
from glovebox_profiles.egress.targets import EgressTarget, quoted
from glovebox_sandboxes.contract.errors import RefusedError

ANY_PATH = "/*"
#: Hosts of a profile in a refusal: enough to choose from, few enough for a model to read.
HINTED_HOSTS = 12


def _require_path_pattern(pattern: str) -> str:
    plain = pattern.removesuffix("*") if pattern.endswith("/*") else pattern
    if "*" in plain:
        raise ValueError(f"a path takes a star only as the end of a folder, as in /simple/*, not {pattern!r}")
    if not plain.startswith("/") or plain != targets.normalise_path(plain) or not targets.is_plain(plain):
        raise ValueError(f"a path is plain and begins with a slash, unlike {pattern!r}")
    return pattern


def reads(read: Callable[[str], str]) -> AfterValidator:
    """Return a reader of a host or path as a validator: pydantic reports ValueErrors alone."""

    def checked(text: str) -> str:
        try:
            return read(text)
        except RefusedError as refused:
            raise ValueError(str(refused)) from None

    return AfterValidator(checked)


PathPattern = Annotated[str, reads(_require_path_pattern)]
# Strictness is lifted for the lists themselves only: TOML has lists, frozen data has sets.
_LISTED = Field(strict=False, min_length=1)


class EgressRule(BaseModel, extra="forbid", strict=True, frozen=True):
    """One entry of a profile's `network.allow`, such as `{ host = "pypi.org", paths = ["/simple/*"] }`."""

    host: Annotated[str, reads(targets.parse_pattern)]
    """One host, or `*.example.org` for every subdomain of it and not `example.org` itself."""
    schemes: Annotated[frozenset[Literal["https", "http"]], _LISTED] = frozenset({"https"})
    """`https`, `http`."""
    ports: Annotated[frozenset[Annotated[int, Field(ge=1, le=65535)]], _LISTED] = Field(
        default_factory=lambda given: frozenset(targets.DEFAULT_PORTS[scheme] for scheme in given.get("schemes", ()))
    )
    """Left out: the ports of the schemes, 443 and 80."""
    methods: Annotated[frozenset[targets.Method], _LISTED] = frozenset({"GET", "HEAD"})
    """Left out: GET and HEAD. `CONNECT` grants an opaque tunnel, which hides method and path."""
    paths: Annotated[frozenset[PathPattern], _LISTED] = frozenset({ANY_PATH})
    """Exact paths, or `/simple/*` for all below. Left out: every path of the host."""

    @model_validator(mode="after")
    def _can_be_enforced(self) -> Self:
        if "CONNECT" in self.methods and self.paths != {ANY_PATH}:
            raise ValueError("paths cannot be held inside a CONNECT tunnel: drop one of the two")
        if "CONNECT" in self.methods and "https" not in self.schemes:
            raise ValueError("schemes needs https for CONNECT: a tunnel carries TLS only")
        return self

    @model_serializer
    def _table(self) -> dict[str, Any]:
        """Return the rule as a profile would write it, every key present and every list sorted."""
        return {name: value if name == "host" else sorted(value) for name, value in self}


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressDecision:
    """The rules' answer about one target. The address behind the name is checked later, once it is resolved."""

    effect: Literal["allow", "deny"]
    rule: str
    """``network.allow[2]`` when a rule allowed it, else what refused: ``egress.host``, ``egress.path``, …"""
    reason: str
    hint: str
    """The hint: alternatives that are allowed, or the way to ask; empty when allowed."""


def decide(target: EgressTarget, rules: Sequence[EgressRule]) -> EgressDecision:
    """Allow ``target`` if one rule allows all of it; otherwise name the part that the nearest rule refuses."""
    furthest, nearest = -1, None
    for index, rule in enumerate(rules):
        if not targets.pattern_covers(rule.host, target.host):
            continue
        step, refused = _compare(target, rule)
        if refused is None:
            reason = f"The rule for {rule.host} allows it."
            return EgressDecision(effect="allow", rule=f"network.allow[{index}]", reason=reason, hint="")
        if step > furthest:
            furthest, nearest = step, refused
    if nearest is None:
        hint = "This profile allows no hosts; they are added to network.allow in the operator's profile."
        if rules:
            allowed = _listed(dict.fromkeys(rule.host for rule in rules))
            hint = f"Allowed hosts: {allowed}; others are added to network.allow in the operator's profile."
        nearest = RefusedError("egress.host", f"No rule of this profile names {quoted(target.host)}.", hint)
    return denial(nearest)


def decide_inspected(target: EgressTarget, rules: Sequence[EgressRule]) -> EgressDecision:
    """Allow a ``CONNECT`` whose TLS ends inside the sandbox: some https request to that host and port could be allowed.

    Each request that comes through it is decided by itself.
    """
    tunnel = {"methods": frozenset({"CONNECT"}), "paths": frozenset({ANY_PATH})}
    return decide(target, [rule.model_copy(update=tunnel) if "https" in rule.schemes else rule for rule in rules])


def decide_url(method: str, url: str, rules: Sequence[EgressRule]) -> EgressDecision:
    """Decide about a URL as written; deny one that cannot be read strictly."""
    try:
        return decide(targets.parse_url(method, url), rules)
    except RefusedError as error:
        return denial(error)


def denial(error: RefusedError) -> EgressDecision:
    """Return the decision to refuse a target for this reason."""
    return EgressDecision(effect="deny", rule=error.rule, reason=error.reason, hint=error.hint)


def path_matches(pattern: str, path: str) -> bool:
    """Return whether a pattern names a normalised path; ``/a/*`` is every plain path that begins with ``/a/``.

    Where a folder is what is allowed, a path that some server reads as one outside of it is none of its paths.
    """
    if pattern == ANY_PATH:
        return True
    return targets.is_plain(path) and (path.startswith(pattern[:-1]) if pattern.endswith("/*") else path == pattern)


def _compare(target: EgressTarget, rule: EgressRule) -> tuple[int, RefusedError | None]:
    """Return how many parts of a target one rule of its host allows, and what refuses the next."""
    tunnels = target.method == "CONNECT"
    if tunnels and target.port in rule.ports and "CONNECT" not in rule.methods:
        return 2, RefusedError(
            "egress.tunnel",
            f"The rule for {rule.host} restricts methods or paths, which cannot be seen inside a tunnel.",
            "Ask for the URL itself (fetch_url, or a plain request through the proxy) instead of CONNECT; "
            'or the operator sets network.tls = "inspect" in the profile.',
        )
    for step, name in enumerate(("scheme", "port", "method", "path")):
        wanted, allowed = getattr(target, name), getattr(rule, f"{name}s")
        if name == "path":
            passed = tunnels or any(path_matches(pattern, wanted) for pattern in allowed)
        else:
            passed = wanted in allowed
        if not passed:
            hint = f"Allowed there: {_listed(map(str, sorted(allowed)))}."
            if name == "path" and not targets.is_plain(wanted):
                hint += " Servers read such a path in more than one way: write it plainly."
            shown = quoted(wanted) if name == "path" else wanted
            reason = f"The {name} {shown} is not allowed for {target.host}."
            return step, RefusedError(f"egress.{name}", reason, hint)
    return 4, None


def _listed(values: Iterable[str]) -> str:
    listed = list(values)
    more = len(listed) - HINTED_HOSTS
    return ", ".join(listed[:HINTED_HOSTS]) + (f" and {more} more" if more > 0 else "")


def covers(wide: EgressRule, narrow: EgressRule) -> bool:
    """Return whether ``wide`` alone allows everything that ``narrow`` allows."""
    return (
        targets.pattern_covers(wide.host, narrow.host)
        and wide.schemes >= narrow.schemes
        and wide.ports >= narrow.ports
        and wide.methods >= narrow.methods
        and all(any(_path_covers(path, other) for path in wide.paths) for other in narrow.paths)
    )


def covers_all(wide: Sequence[EgressRule], narrow: Sequence[EgressRule]) -> bool:
    """Return whether ``wide`` allows everything that ``narrow`` allows. Conservative: may say no, never wrongly yes.

    Each narrow rule has to be covered by one wide rule; two wide rules that only cover it together are not found.
    """
    return all(any(covers(rule, other) for rule in wide) for other in narrow)


def meet(first: Sequence[EgressRule], second: Sequence[EgressRule]) -> tuple[EgressRule, ...]:
    """Return rules that allow exactly what both lists allow, without rules that another one covers."""
    met: list[EgressRule] = []
    for one in first:
        for other in second:
            rule = _intersection(one, other)
            if rule is None or any(covers(kept, rule) for kept in met):
                continue
            met = [kept for kept in met if not covers(rule, kept)]
            met.append(rule)
    return tuple(met)


def _intersection(one: EgressRule, other: EgressRule) -> EgressRule | None:
    if targets.pattern_covers(one.host, other.host):
        host = other.host
    elif targets.pattern_covers(other.host, one.host):
        host = one.host
    else:
        return None
    parts = {name: getattr(one, name) & getattr(other, name) for name in ("schemes", "ports", "methods")}
    parts["paths"] = frozenset(path for path in one.paths if any(_path_covers(wide, path) for wide in other.paths))
    parts["paths"] |= {path for path in other.paths if any(_path_covers(wide, path) for wide in one.paths)}
    return EgressRule(host=host, **parts) if all(parts.values()) else None


def _path_covers(wide: str, narrow: str) -> bool:
    """Return whether ``wide`` names every path that ``narrow`` does (its star is one more character)."""
    if narrow.endswith("/*"):
        return wide.endswith("/*") and narrow[:-1].startswith(wide[:-1])
    return path_matches(wide, narrow)


NOT_LENT: Final = re.compile(
    r"accept-encoding|connection|content-(length|type)|expect|host|if-range|keep-alive|max-forwards|proxy-connection"
    r"|range|te|trailer|transfer-encoding|upgrade"
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
        if NOT_LENT.fullmatch(name) or _ROUTES.fullmatch(name):
            raise ValueError(f"{name} frames, routes or overrides a request, so headers and set_headers cannot name it")
