"""Whatever bytes stand in a profile, the answer is a profile or a ProfileError, and what is cut off grants nothing."""

import tomllib
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from tests.fixtures.profile_texts import MINIMAL

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, parse
from glovebox_profiles.load.reading import KeyPath, Positions
from glovebox_profiles.model import Profile
from glovebox_profiles.order import within

PATH = Path("probe.toml")

_PIECES = st.sampled_from(
    [
        *("[", "]", "[[", "]]", "{", "}", "=", ",", ".", "\n", '"', '"""', "'", "'''", "\\", "#", " ", "\r", "\x00"),
        *("limits", "tool", "nan", "true", "[limits]\n", "pids = 8\n", "1979-05-27", "9" * 5000, "a." * 40),
        *("\u202e", "é"),
    ]
)


def outcome(data: bytes) -> Profile | None:
    """Parse; None when the bytes are refused as they should be."""
    try:
        return parse(data, PATH)
    except ProfileError as caught:
        error = caught
    assert str(error).startswith("probe.toml")
    assert error.reason
    assert error.fix
    return None


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_a_profile_error(data: bytes) -> None:
    """Never another exception, never a profile from noise."""
    assert outcome(data) is None


@given(st.lists(_PIECES, max_size=30).map("".join), st.booleans())
@example("[[" * 3 + "x", True)
@example('"""' + '"' * 7, True)
def test_broken_toml_is_a_profile_error(text: str, after: bool) -> None:
    """The same for text made of TOML's own pieces, alone or behind a good beginning."""
    outcome(((MINIMAL if after else "") + text).encode())


@given(st.sampled_from(sorted(SHIPPED.glob("*.toml"))), st.data())
def test_a_profile_that_was_cut_short_is_refused_or_narrower(path: Path, data: st.DataObject) -> None:
    """E3: a half-written file never permits what the whole one does not."""
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    part = outcome(whole[:cut])
    assert part is None or within(part, parse(whole, path))


def _paths(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, below in inner for each in _paths(below, (*path, key)))]


@given(st.lists(_PIECES, max_size=30).map("".join))
@example('a.b."c d" = [1, { x = """]""" }]\n[[t.u]]\nv = 1\n[[t.u]]\n[t.u.w]\nz = "#"')
@example("'a' = 2020-01-01 00:00:00\n[t]\r\nk = [ # ]\n 1,\n]")
def test_the_scanner_finds_every_key_that_the_parser_finds(text: str) -> None:
    """Structure is read twice, by the scanner and by tomllib: they must not disagree on what is where."""
    try:
        values = tomllib.loads(text)
    except ValueError:
        return
    except RecursionError:
        return
    try:
        lines = Positions(text, Path("x.toml")).lines
    except ProfileError as caught:
        problem = caught.reason
    else:
        problem = ""
    if problem:
        assert "nested deeper" in problem
        return
    wanted = set(_paths(values)) - {()}
    assert wanted == set(lines)
    assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())
