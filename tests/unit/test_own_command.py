"""Commands in what people read run the installation that wrote it."""

import sys
from pathlib import Path

import pytest

from glovebox_server.failures import with_own_command

SAID = "It is not built. Run `glovebox setup --docker`, or see glovebox.dev."


@pytest.mark.parametrize(
    ("path", "named"), [("", True), ("{own}", True), ("{other}", True), ("{linked}", False), ("{other}:{linked}", True)]
)
def test_a_command_is_named_by_its_path_unless_every_path_finds_it(
    path: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What uv runs has its cache on its PATH: that place counts for nothing; nor does another Glovebox."""
    own, other, linked = (tmp_path / name for name in ("own place", "other", "linked"))
    for place in (own, other, linked):
        place.mkdir()
    for place in (own, other):
        (place / "glovebox").write_text("#!/bin/sh")
        (place / "glovebox").chmod(0o755)
    (linked / "glovebox").symlink_to(own / "glovebox")
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", path.format(own=own, other=other, linked=linked))
    shown = SAID.replace("glovebox setup", f"'{own}/glovebox' setup") if named else SAID
    assert with_own_command(SAID) == shown
