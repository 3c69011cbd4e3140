"""The watch rules, as data: the default action of each. Pure."""

from collections.abc import Mapping
from typing import Final

from glovebox_profiles.policy.model import WatchAction

DENIALS_IN_A_ROW: Final = 10
"""A refused model tries three or four other ways; ten different refusals in a row are a search."""
CONNECTIONS_KNOWN: Final = 50
"""Connections that teach a principal's hosts, before a new host is reported."""
QUESTIONS: Final = 20
"""Questions because of one principal within ``QUESTIONS_SECONDS``."""
QUESTIONS_SECONDS: Final = 600.0

RULES: Final[Mapping[str, WatchAction]] = {
    "canary": "stop",  # a canary is read by a tool for files, or its content is in arguments, output, a URL or a file
    "placeholder": "record",  # one stands where its key is not to stand: in a request, output or a file
    "secrets": "record",  # output has what only a secret looks like: a private key, a token of a known service
    "denials": "record",  # ``DENIALS_IN_A_ROW`` calls of a run are denied
    "new-reach": "record",  # after ``CONNECTIONS_KNOWN`` of a principal, one leads to a host that is new to it
    "questions": "record",  # people are asked ``QUESTIONS`` times for a principal
}
"""Each rule by its id; a policy may set another action."""


def actions(given: Mapping[str, WatchAction]) -> Mapping[str, WatchAction]:
    """Return each rule's action by its id, with the policy's ``given`` actions."""
    return {**RULES, **given}
