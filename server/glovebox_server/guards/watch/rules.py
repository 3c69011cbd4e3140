"""The watch rules, as data: what each detects, and its default action. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from glovebox_profiles.policy.model import WatchAction

DENIALS_IN_A_ROW: Final = 10
"""A refused model tries three or four other ways; ten different refusals in a row are a search."""
CONNECTIONS_KNOWN: Final = 50
"""Connections that teach a principal's hosts, before a new host is reported."""
QUESTIONS: Final = 20
"""Questions because of one principal within ``QUESTIONS_SECONDS``."""
QUESTIONS_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One watch rule."""

    id: str
    looks_for: str
    """In one sentence."""
    action: WatchAction
    """The default; a policy may set another."""


RULES: Final[Mapping[str, Rule]] = {
    rule.id: rule
    for rule in (
        Rule(
            id="canary",
            looks_for="A canary is read by a tool for files, or its content is in arguments, output, a URL or a file.",
            action="stop",
        ),
        Rule(
            id="placeholder",
            looks_for="A placeholder of a key stands where the key is not to stand: in a request, output or a file.",
            action="record",
        ),
        Rule(
            id="secrets",
            looks_for="Output has what only a secret looks like: a private key, or a key or token of a known service.",
            action="record",
        ),
        Rule(
            id="denials",
            looks_for=f"{DENIALS_IN_A_ROW} calls of a run in a row are denied.",
            action="record",
        ),
        Rule(
            id="new-reach",
            looks_for=f"After {CONNECTIONS_KNOWN} connections of a principal, one leads to a host that is new to it.",
            action="record",
        ),
        Rule(
            id="questions",
            looks_for=f"People are asked {QUESTIONS} times in {QUESTIONS_SECONDS / 60:g} minutes for a principal.",
            action="record",
        ),
    )
}


def actions(given: Mapping[str, WatchAction]) -> Mapping[str, WatchAction]:
    """Return each rule's action by its id, with the policy's ``given`` actions."""
    return {rule.id: given.get(rule.id, rule.action) for rule in RULES.values()}
