"""The policy loader: a policy or a ProfileError that names line and key, soon; an error does nothing to a terminal."""

from functools import partial
from pathlib import Path

from tests.fuzz.harness import bounded

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.policy.diff import diff
from glovebox_profiles.policy.load import checked
from glovebox_profiles.policy.model import Policy, digest
from glovebox_server.guards.watch.watch import RULES
from glovebox_server.startup import decide_examples

_PATH = Path("fuzz.toml")
_PROFILES = load([SHIPPED], check_example=None)
_KNOWN = (_PROFILES, tuple(RULES))
_WHOLE_FILE = ("", "example")  # what is said of no line: a file that is too large or no TOML, and one without examples


def check(data: bytes) -> None:
    """The whole input is the file; what it names is looked up, and its examples are decided."""
    with bounded():
        try:
            policy: Policy | None = checked(data, _PATH, *_KNOWN, partial(decide_examples, _PROFILES))
        except ProfileError as error:
            said, lines, line, key = str(error).split("\n"), 1 + len(error.more), error.line, error.key
            policy = None
    if policy is None:
        assert len(said) == lines  # one for each error: none of them breaks its line
        assert all(text.isprintable() and len(text) < 2000 for text in said)
        assert 1 <= line <= data.count(b"\n") + 1 if line is not None else key in _WHOLE_FILE
        return
    again = checked(data, _PATH, *_KNOWN, None)
    assert digest(policy) == digest(again)
    assert diff(policy, again, _PROFILES, RULES) == ()
