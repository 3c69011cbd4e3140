"""The profile loader: a profile or ProfileError, soon; an error does nothing to a terminal."""

from pathlib import Path

from tests.fuzz.harness import bounded

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import parse
from glovebox_profiles.model import Profile, digest

_PATH = Path("fuzz.toml")


def check(data: bytes) -> None:
    """The whole input is the file."""
    with bounded():
        try:
            profile: Profile | None = parse(data, _PATH)
        except ProfileError as error:
            said, lines, line = str(error).split("\n"), 1 + len(error.more), error.line
            profile = None
    if profile is None:
        assert len(said) == lines  # one for each error: none of them breaks its line
        assert all(text.isprintable() and len(text) < 2000 for text in said)
        assert line is None or 1 <= line <= data.count(b"\n") + 1
        return
    assert digest(profile) == digest(parse(data, _PATH))
    assert type(profile).model_validate(profile.model_dump()) == profile
