"""A key that tools could read, or that may come back unseen, is no part of what is in effect."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, load, parse
from glovebox_server.cli.main import main
from glovebox_server.exits import OK, USAGE
from glovebox_server.settings import Settings
from glovebox_server.startup import governed
from glovebox_server.workspace import Workspace

LENT = """tool = "run_python"
description = "Runs a program."
risk = "low"
isolation = ["bubblewrap"]
[network]
mode = "egress"
tls = "{tls}"
allow = [{allow}]
[[network.credential]]
name = "tracker"
host = "api.example.org"
paths = ["/v1/*"]
header = "Authorization"
source = "{source}"
"""
PLAIN = '{ host = "api.example.org" }'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A workspace beside a folder that is not one; each has a file, and a link to the other's."""
    for name, other in (("served", "apart"), ("apart", "served")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text("q7Zk2mX9vB4tR8wLp3Ns")
        (tmp_path / name / "link").symlink_to(tmp_path / other / "key")
    (tmp_path / "profiles").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        "file:{place}/served/key", "file:{place}/served/link", "file:{place}/apart/link", "file:{place}/served/none",
        "file:{place}/apart/../served/key", "exec:{place}/served/key --for me", "exec:/bin/sh {place}/served/key",
    ],
)  # fmt: skip
def test_a_key_that_comes_from_the_workspace_is_refused(
    source: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``profiles check``, and by a server before it starts; the control is another workspace."""
    (place / "profiles/run_python.toml").write_text(
        LENT.format(tls="inspect", allow=PLAIN, source=source.format(place=place))
    )
    wanted = f'"tracker" comes from .*, which lies in the workspace, {place}/served: .* Move it out of there'
    code, said = checked(place, "served", monkeypatch)
    assert (code, bool(re.search(wanted, said))) == (USAGE, True), said
    profiles = load([SHIPPED, place / "profiles"], check_example=None)
    settings = Settings(profiles_dir=place / "profiles")
    with pytest.raises(ProfileError, match=wanted):
        governed(settings, profiles, Workspace(path=place / "served"))
    assert governed(settings, profiles, Workspace(path=place / "profiles")).every
    assert checked(place, "empty", monkeypatch)[0] == OK


@pytest.mark.parametrize("source", ["file:{place}/apart/key", "env:SERVED_KEY"])
def test_a_key_that_comes_from_elsewhere_is_not(source: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the one above."""
    (place / "profiles/run_python.toml").write_text(
        LENT.format(tls="inspect", allow=PLAIN, source=source.format(place=place))
    )
    assert checked(place, "served", monkeypatch)[0] == OK


def checked(place: Path, workspace: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    (place / workspace).mkdir(exist_ok=True)
    monkeypatch.setenv("GLOVEBOX_WORKSPACE", str(place / workspace))
    monkeypatch.setenv("GLOVEBOX_PROFILES_DIR", str(place / "profiles"))
    done = CliRunner().invoke(main, ["profiles", "check"])
    return done.exit_code, done.output


TUNNELS: Mapping[str, str] = {
    "to its host": f'{PLAIN}, {{ host = "api.example.org", methods = ["CONNECT"] }}',
    "beside other methods": '{ host = "api.example.org", methods = ["GET", "CONNECT"] }',
    "to all below": f'{PLAIN}, {{ host = "*.example.org", methods = ["CONNECT"] }}',
}


@pytest.mark.parametrize("tls", ["inspect", "tunnel"])
@pytest.mark.parametrize("allow", TUNNELS.values(), ids=TUNNELS)
def test_a_tunnel_to_the_host_of_a_key_is_refused(allow: str, tls: str) -> None:
    """With its line and what to do; the controls are a tunnel to another host, and a tool that opens none."""
    text = LENT.format(tls=tls, allow=allow, source="env:TRACKER_TOKEN")
    with pytest.raises(ProfileError, match=r"is api\.example\.org, to which network\.allow has a tunnel") as refused:
        parse(text.encode(), Path("run_python.toml"))
    assert (refused.value.line, refused.value.key) == (11, "network.credential[0].host")
    assert "Take CONNECT out of that rule" in refused.value.fix
    other = LENT.format(tls=tls, allow=f'{PLAIN}, {{ host = "b.example.org", methods = ["CONNECT"] }}', source="env:A")
    assert parse(other.encode(), Path("run_python.toml")).network.credential
    assert parse(text.replace("run_python", "fetch_url").encode(), Path("fetch_url.toml")).network.credential
