"""The hosts a sandbox may connect to: pure grammar and decisions, no sockets, no look-ups, no files.

The server's ``egress`` does the networking and asks here. Never import anything of ``server`` here.
"""

from glovebox_profiles.egress.rules import (
    EgressDecision,
    EgressRule,
    covers,
    covers_all,
    decide,
    decide_inspected,
    decide_url,
    meet,
)
from glovebox_profiles.egress.targets import EgressTarget, parse_connect, parse_url

__all__ = [
    "EgressDecision",
    "EgressRule",
    "EgressTarget",
    "covers",
    "covers_all",
    "decide",
    "decide_inspected",
    "decide_url",
    "meet",
    "parse_connect",
    "parse_url",
]
