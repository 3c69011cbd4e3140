"""`glovebox doctor`: nothing broken that is there to be copied, and profiles are looked at."""

import io
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fixtures.consoles import printing_on

from glovebox_sandboxes.contract.base import Capabilities, Missing
from glovebox_sandboxes.drivers import registry
from glovebox_server import workspace
from glovebox_server.cli import state
from glovebox_server.cli.host import doctor
from glovebox_server.cli.terminal import Terminal
from glovebox_server.exits import OK, UNAVAILABLE, USAGE
from glovebox_server.secret_files import SecretFileError
from glovebox_server.settings import Settings

COMMAND = "`docker rmi glovebox/python:0123456789abcdef && glovebox setup --docker && true`"
URL = "<https://a.example/a/very/long/address/that/does/not/fit/beside/other/words/in/a/line.html>"
LIMITS = {"pids": "cgroup v2", "memory_bytes": "cgroup v2"}
GOOD = Capabilities(driver="docker", level="container", version="20", limits=LIMITS)
BAD = Capabilities(
    driver="bubblewrap", level="namespaces", version="0.8.0", limits={"pids": "rlimit"},
    missing=(Missing(what=f"it cannot make namespaces, see {URL} for more", fix=f"Say: {COMMAND}", fatal=True),),
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("host")
EXAMPLE = Path(__file__).parents[2] / "examples" / "policy.toml"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    for name in ("profiles", "workspace"):
        (tmp_path / name).mkdir()
    return Settings(workspace=tmp_path / "workspace", data_dir=tmp_path / "data", profiles_dir=tmp_path / "profiles")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, Capabilities]:
    """What the drivers of this host say; to be changed by the test."""
    found = {"bubblewrap": BAD, "docker": GOOD}

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[Any]:
        async def get(name: str) -> Any:
            return SimpleNamespace(capabilities=found[name])

        yield SimpleNamespace(get=get)

    monkeypatch.setattr(registry, "opened", opened)
    monkeypatch.setattr(registry, "NAMES", tuple(found))
    return found


def terminal(width: int = 80) -> Terminal:
    return Terminal(file=io.StringIO(), force_terminal=True, color_system=None, width=width)


async def diagnose(settings: Settings, console: Terminal, *, as_json: bool = False) -> int:
    with printing_on(console, as_json=as_json):
        return await doctor._diagnose(settings)


def shown(console: Terminal) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


async def test_there_is_a_block_per_driver_and_in_a_pipe_nothing_is_broken(settings: Settings) -> None:
    """Everything is there, each mechanism once; the terminal breaks lines, so that commands can be copied."""
    console = terminal()
    assert await diagnose(settings, console) == OK
    lines = shown(console)
    assert "bubblewrap: not usable" in lines
    assert "docker: usable" in lines
    assert "  limits by cgroup v2" in lines
    assert sum(COMMAND in line for line in lines) == 1
    assert sum(URL in line for line in lines) == 1
    console = Terminal(file=io.StringIO(), width=80)
    await diagnose(settings, console)
    assert any(f"it cannot make namespaces, see {URL} for more" in line for line in shown(console))


async def test_a_runtime_that_was_never_built_is_said_although_another_driver_works(
    settings: Settings, host: dict[str, Capabilities]
) -> None:
    """It is not missing, so nobody would learn of it; where no driver works, each says what it lacks (control)."""
    console = terminal(200)
    await diagnose(settings, console)
    assert shown(console)[-1].startswith("`glovebox setup` was not run here, so calls can only use docker.")
    host["docker"] = BAD
    console = terminal(200)
    assert await diagnose(settings, console) == UNAVAILABLE
    assert "was not run" not in "\n".join(shown(console))


async def test_a_broken_profile_is_found(settings: Settings) -> None:
    """Exit 2, with file, line and key: a server would not start. Without it all are listed (control)."""
    console = terminal(200)
    await diagnose(settings, console)
    assert "profiles: fine" in shown(console)
    assert "run_python, search_workspace (shipped)" in " ".join(" ".join(shown(console)).split())
    (settings.profiles_dir / "run_python.toml").write_text('tool = "run_python"\nriskk = "low"\n')
    console = terminal(200)
    assert await diagnose(settings, console) == USAGE
    assert "profiles: wrong" in shown(console)
    assert "run_python.toml:2: riskk" in " ".join(" ".join(shown(console)).split())


async def test_a_broken_policy_is_found(settings: Settings) -> None:
    """Exit 2, as a server would not start; the control is the example, and that without one nothing is said of it."""
    console = terminal(200)
    assert await diagnose(settings, console) == OK
    assert "policy: fine" not in shown(console)
    for text, code, verdict in ((EXAMPLE.read_text(), OK, "fine"), ("version = 1\nrole = 2\n", USAGE, "wrong")):
        (settings.profiles_dir.parent / "policy.toml").write_text(text)
        console = terminal(200)
        assert await diagnose(settings, console) == code
        assert f"policy: {verdict}" in shown(console)
    said = " ".join(" ".join(shown(console)).split())
    assert 'policy.toml:2: role: unknown key. The nearest valid key is "roles".' in said


async def test_a_log_that_cannot_be_written_is_said(settings: Settings) -> None:
    """Exit 4: no call would run; with a directory in its place it can be (the control), and nothing is left there."""
    settings = settings.model_copy(update={"state_dir": settings.profiles_dir.parent / "state"})
    settings.state_dir.mkdir()
    for make, there, code in ((Path.touch, False, UNAVAILABLE), (Path.mkdir, True, OK)):
        make(settings.state_dir / "audit")
        console = terminal(200)
        assert await diagnose(settings, console, as_json=True) == code
        ready = {"ready": False, "runtime": False, "log": there, "policy": True, "profiles": True}
        assert json.loads("\n".join(shown(console)))["ready"] == ready
        console = terminal(200)
        await diagnose(settings, console)
        assert any("an audit log that can be written" in line for line in shown(console)) != there
        if not there:
            (settings.state_dir / "audit").unlink()
    assert not list((settings.state_dir / "audit").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
async def test_root_looks_at_a_log_as_its_owner(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user could lead root elsewhere; at its own log root looks itself (the control)."""
    settings = settings.model_copy(update={"state_dir": settings.profiles_dir.parent / "state"})
    settings.state_dir.mkdir(mode=0o700)
    for owner in (4321, 0):
        os.chown(settings.state_dir, owner, owner)
        monkeypatch.setattr(doctor, "can_write", lambda _place, owner=owner: os.geteuid() == owner)
        assert await diagnose(settings, terminal(), as_json=True) == OK


async def test_a_user_without_access_to_the_log_reads_the_line_to_type(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drivers are shown all the same."""

    def refuse(directory: Path, _act: object) -> bool:
        raise SecretFileError("state directory", directory, "it cannot be opened", "Run `sudo glovebox doctor`.")

    monkeypatch.setattr(state, "run_as_owner", refuse)
    console = terminal(200)
    assert await diagnose(settings, console) == UNAVAILABLE
    lines = shown(console)
    assert "it cannot be opened. Run `sudo glovebox doctor`." in " ".join(" ".join(lines).split())
    assert "docker: usable" in lines


async def test_as_json_it_is_one_object(settings: Settings) -> None:
    console = terminal()
    assert await diagnose(settings, console, as_json=True) == OK
    body = json.loads("\n".join(shown(console)))
    assert [each["usable"] for each in body["drivers"]] == [False, True]
    assert body["profiles"] == {"error": None}
    assert body["policy"] == {"error": None, "path": None}
    assert body["workspace"] == {"error": None, "path": str(settings.workspace), "reason": "", "closed": ""}
    assert "glovebox setup" in body["advice"]


async def test_a_workspace_that_sandboxes_cannot_read_is_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command; the control is the same workspace where sandboxes are its owner's."""
    assert settings.workspace is not None
    settings.workspace.chmod(0o700)
    for other, word in ((True, "closed"), (False, "fine")):
        monkeypatch.setattr(workspace, "changes_user", lambda other=other: other)
        console = terminal()
        assert await diagnose(settings, console) == OK
        assert f"workspace: {word}" in shown(console)
        assert (f"`chmod -R o+rX {settings.workspace}`" in " ".join(" ".join(shown(console)).split())) == other


async def test_a_workspace_that_holds_what_is_the_servers_is_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit 2, since a server would not start; where nobody named it, that none is served, which is no failure."""
    console = Terminal(file=io.StringIO())
    named = settings.model_copy(update={"workspace": tmp_path})
    assert await diagnose(named, console) == USAGE
    assert "workspace: wrong" in shown(console)
    assert f"contains the server's profiles directory, {settings.profiles_dir}" in "\n".join(shown(console))
    monkeypatch.chdir(tmp_path)
    console = Terminal(file=io.StringIO())
    unnamed = settings.model_copy(update={"workspace": None})
    assert await diagnose(unnamed, console) == OK
    assert "workspace: none" in shown(console)
    assert "Name one with --workspace or GLOVEBOX_WORKSPACE." in "\n".join(shown(console))
