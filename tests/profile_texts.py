"""Shared by the tests of profiles: a smallest valid text, a reading of it, a reference policy, and strategies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from glovebox_profiles.egress import EgressRule, decide_url
from glovebox_profiles.load.loader import parse
from glovebox_profiles.model import Effect, Profile

MINIMAL = """\
tool = "probe"
description = "A tool of the tests."
risk = "low"
isolation = ["bubblewrap"]
"""


def profile(extra: str = "", *, base: str = MINIMAL) -> Profile:
    """Parse the smallest profile with something appended."""
    return parse((base + extra).encode(), Path("probe.toml"))


def decide_by_name(given: Profile, arguments: Mapping[str, Any]) -> tuple[Effect, str]:
    """Decide a call by the names its arguments have: the rules that the shipped examples are written against."""
    if arguments.get("timeout_seconds", 0) > given.limits.wall_seconds:
        return "deny", "limits.wall_seconds"
    if arguments.get("inputs") and not given.files.inputs:
        return "deny", "files.inputs"
    if "url" in arguments:
        if given.network.mode == "none":
            return "deny", "network.mode"
        method = arguments.get("method", "GET")
        if decide_url(method, arguments["url"], given.network.allow).effect == "deny":
            return "deny", "network.allow"
    return ("ask", "approval.ask") if given.approval == "ask" else ("allow", "allow")


def _some(*values: Any) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), unique=True, max_size=len(values))


_RULES = st.builds(
    EgressRule,
    host=st.sampled_from(["a.example.org", "b.example.org", "*.example.org", "*.a.example.org", "pypi.org"]),
    methods=st.sampled_from([frozenset({"GET"}), frozenset({"GET", "HEAD"}), frozenset({"POST"})]),
    ports=st.sampled_from([frozenset({443}), frozenset({443, 8443})]),
    paths=st.frozensets(st.sampled_from(["/*", "/a/*", "/a/b/*", "/a/x", "/c"]), min_size=1, max_size=2),
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any valid profile of one tool, over few values for each key so that two of them are often related."""
    rules = draw(st.lists(_RULES, max_size=3, unique=True))
    mib = 1 << 20
    isolation = draw(_some("bubblewrap", "docker", "gvisor").filter(bool))
    return Profile.model_validate(
        {
            "tool": "probe",
            "description": draw(st.sampled_from(["One.", "Two."])),
            "risk": draw(st.sampled_from(["low", "medium", "high"])),
            "isolation": isolation,
            "approval": draw(st.sampled_from(["ask", "none"])),
            "files": {
                "workspace": draw(st.sampled_from(["none", "read", "overlay"])),
                "output": draw(st.booleans()),
                "inputs": draw(st.booleans()),
            },
            "network": {
                "mode": "egress" if rules else "none",
                "allow": rules,
                "max_bytes": draw(st.sampled_from([mib, 2 * mib])),
                "max_redirects": draw(st.integers(0, 2)),
                "max_connections": draw(st.integers(1, 2)),
            },
            "limits": {
                "wall_seconds": draw(st.sampled_from([1, 2.5, 30])),
                "cpu_seconds": draw(st.integers(1, 2)),
                "memory": draw(st.sampled_from([64 * mib, 128 * mib])),
                "pids": draw(st.integers(8, 9)),
                "scratch": draw(st.sampled_from([mib, 2 * mib])),
                "workspace": {"bytes": draw(st.sampled_from([mib, 2 * mib])), "files": draw(st.integers(64, 65))},
                "output": {"bytes": draw(st.sampled_from([mib, 2 * mib])), "files": draw(st.integers(1, 2))},
                "stream": draw(st.sampled_from([4096, 8192])),
                "enforce": draw(st.sampled_from(["cgroup", "any"])),
            },
            "python": draw(
                st.sampled_from(["cold", "warm"]).flatmap(
                    lambda start: st.fixed_dictionaries(
                        {
                            "start": st.just(start),
                            "preload": _some("numpy", "pandas") if start == "warm" else st.just([]),
                        }
                    )
                )
            ),
            "audit": {"keep": draw(_some("arguments", "stdout", "value"))},
        }
    )
