"""Files that are named as secrets are reach no caller of the jobs that read the workspace for it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from tests.fixtures.brokered import submitted
from tests.fixtures.guest_jobs import Workspace, make

from _glovebox_guest.workspace import hidden, paths
from glovebox_server import app as apps
from glovebox_server.calls import Principal
from glovebox_server.governance.watch.canaries import plant
from glovebox_server.mcp.completion import complete
from glovebox_server.settings import Settings

MARK = "planted-5f1c"
_KEY = f"-----BEGIN PRIVATE KEY-----\n{MARK}\n"
SECRETS: Mapping[str, str] = {
    ".env": f"KEY={MARK}",
    ".env.local": MARK,
    "service/.env.production": MARK,
    ".envrc": MARK,
    "prod.env": MARK,
    ".ENV": MARK,
    ".env.bak": MARK,
    "keys/id_rsa": MARK,
    "keys/id_ed25519~": MARK,
    "keys/server.key": MARK,
    "keys/server.pem": _KEY,
    "keys/both.crt": f"-----BEGIN CERTIFICATE-----\n{_KEY}",
    "keys/store.jks": MARK,
    "keys/store.p12": MARK,
    "keys/store.pfx": MARK,
    ".ssh/config": MARK,
    ".gnupg/private-keys-v1.d/A.key": MARK,
    "home/.aws/credentials": MARK,
    ".config/gcloud/credentials.db": MARK,
    ".azure/accessTokens.json": MARK,
    "client_secret_42.json": MARK,
    ".kube/config": MARK,
    ".docker/config.json": MARK,
    ".netrc": MARK,
    ".git-credentials": MARK,
    ".npmrc": f"//registry.example.org/:_authToken={MARK}",
    ".pypirc": f"[pypi]\npassword = {MARK}",
    "pip.conf": f"[global]\nindex-url = https://{MARK}0123@pypi.example.org/simple",
    ".git/config": f'[remote "origin"]\nurl = https://me:{MARK}@example.org/a.git',
    ".git/modules/a/config": f"url = https://{MARK}0123456789@example.org/a.git",
    "terraform.tfstate": MARK,
    "old/terraform.tfstate.backup": MARK,
    "secrets.yaml": MARK,
    ".vault-token": MARK,
    ".pgpass": MARK,
    ".cargo/credentials.toml": MARK,
    ".bash_history": MARK,
    ".notes.txt.swp": MARK,
    "emacs/#.env#": MARK,
    "emacs/#credentials.json#": MARK,
    "emacs/secrets.yaml.~12~": MARK,
    "big.pem": "x" * hidden.MAX_LOOKED + MARK,
}
ORDINARY: Mapping[str, str] = {
    ".env.example": MARK,
    ".env.sample": MARK,
    "client_secret.json.template": MARK,
    "keys/id_rsa.pub": MARK,
    "keys/chain.pem": f"-----BEGIN CERTIFICATE-----\n{MARK}",
    "environment.yml": MARK,
    "env.py": MARK,
    "keys.py": MARK,
    "monkey": MARK,
    "web/.npmrc": f"save-exact=true\n//registry.example.org/:_authToken=${{NPM_TOKEN}}\nalways-auth=true\n{MARK}",
    "web/pip.conf": "[global]\nindex-url = https://${TOKEN_OF_THE_TEAM}@pypi.example.org/simple\n"
    f"extra-index-url = https://reader@pypi.example.org/simple\n{MARK}",
    "sub/.git/config": f'[remote "origin"]\nurl = git@example.org:a.git\n{MARK}',
    "config": MARK,
    "credentials": MARK,
    "docker/config.json": MARK,
    "aws/credentials": MARK,
    "main.tf": MARK,
    "#main.tf#": MARK,
    "main.tf.~1~": MARK,
    "12~": MARK,
}


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace with some forty secrets, and files whose names are only like them."""
    made = make(tmp_path / "w", monkeypatch)
    for name, content in ({**SECRETS, **ORDINARY}).items():
        made.write(name, f"{content}\n")
    return made


def searched(workspace: Workspace, **payload: Any) -> set[str]:
    """The files in which the mark is found, those of tools and ignored ones too."""
    found: set[str] = set()
    for path in ("**", ".git/**", "sub/.git/**"):
        value = workspace.run("search", pattern=MARK, path=path, include_ignored=True, limit=1000, **payload)
        found |= {match["path"] for match in value["matches"]}
    return found


@pytest.mark.parametrize("path", SECRETS)
def test_a_file_named_as_a_secret_is_refused_and_said_to_be_hidden(workspace: Workspace, path: str) -> None:
    """It is not read, listed or searched by its name; the control is the same file, revealed."""
    error = workspace.run("read", path=path)["error"]
    assert error["rule"] == "path.hidden"
    assert "hidden, whether it exists or not" in error["reason"]
    assert "files.reveal" in error["hint"]
    assert MARK not in str(error)
    for kind, payload in (("list", {"pattern": path}), ("search", {"pattern": MARK, "path": path})):
        value = workspace.run(kind, **payload)
        if "error" in value:
            assert value["error"]["rule"] == "path.hidden"
        else:
            assert value["hidden"] == 1
            assert not value.get("entries")
            assert not value.get("matches")
    assert MARK in workspace.run("read", path=path, reveal=[path])["text"] or path == "big.pem"
    assert workspace.run("list", pattern=path, reveal=[path])["total"] == 1
    assert workspace.run("search", pattern=MARK, path=path, reveal=[path])["matches"] or path == "big.pem"


@pytest.mark.parametrize("path", ORDINARY)
def test_what_is_only_named_alike_is_shown(workspace: Workspace, path: str) -> None:
    """Examples, public halves, certificates, and configuration without a password."""
    assert MARK in workspace.run("read", path=path)["text"]


def test_no_walk_shows_any_and_each_is_counted(workspace: Workspace) -> None:
    """A whole listing and search show the ordinary files alone, say how many were left out, and name none."""
    assert searched(workspace) == set(ORDINARY)
    assert searched(workspace, reveal=[*SECRETS, ".ssh", ".gnupg", ".azure", ".config/gcloud"]) > set(ORDINARY)
    listed = workspace.run("list", pattern="", limit=1000)
    names = {entry["path"] for entry in listed["entries"]}
    assert not names & set(SECRETS)
    assert listed["hidden"] == sum(".git/" not in path for path in SECRETS)
    assert ".ssh" not in names


def test_whether_there_is_such_a_file_is_not_told(workspace: Workspace) -> None:
    """The answer about one that is not there is the same; the control is an ordinary name."""
    asked = {path: workspace.run("read", path=path)["error"] for path in (".env", "src/.env")}
    assert str(asked["src/.env"]) == str(asked[".env"]).replace(".env:", "src/.env:")
    assert workspace.rule("read", path="src/env.txt") == "path.missing"


@pytest.mark.parametrize(
    "path", ["x/../.env", "./.env", "/workspace/.env", ".aws/../.env", "home/.aws/sub/../credentials"]
)
def test_other_spellings_are_hidden_too(workspace: Workspace, path: str) -> None:
    """Dots and the sandbox's own name for the workspace change nothing."""
    for folder in ("x", ".aws", "home/.aws/sub"):
        (workspace.root / folder).mkdir(parents=True, exist_ok=True)
    path = path.replace("/workspace", paths.ROOT)
    assert workspace.rule("read", path=path) == "path.hidden"


def test_links_neither_show_what_is_hidden_nor_hide_behind(workspace: Workspace) -> None:
    """To a hidden file, through a hidden folder, of a hidden name, and in a chain; the control is a plain link."""
    for name, target in {
        "notes.txt": ".env",
        "second.txt": "notes.txt",
        "folder": ".ssh",
        "cert.txt": "keys/server.pem",
        ".env.link": "config",
        "chain.txt": ".env.link",
        "plain.txt": "config",
    }.items():
        (workspace.root / name).symlink_to(target)
    for path in ("notes.txt", "second.txt", "folder/config", "cert.txt", ".env.link", "chain.txt"):
        assert workspace.rule("read", path=path) == "path.hidden", path
    assert workspace.rule("list", pattern="folder/*") == "path.hidden"
    assert workspace.rule("search", pattern=MARK, path="folder") == "path.hidden"
    assert MARK in workspace.run("read", path="plain.txt")["text"]


def test_a_revealed_path_shows_itself_and_what_is_in_it_and_nothing_beside(workspace: Workspace) -> None:
    """Of a folder all below; a name that begins alike is another."""
    reveal = [".ssh", "service"]
    assert MARK in workspace.run("read", path=".ssh/config", reveal=reveal)["text"]
    assert MARK in workspace.run("read", path="service/.env.production", reveal=reveal)["text"]
    assert workspace.rule("read", path=".env", reveal=[".en", ".env.local"]) == "path.hidden"
    assert {match["path"] for match in workspace.run("search", pattern=MARK, reveal=reveal)["matches"]} >= {
        ".ssh/config",
        "service/.env.production",
    }


def test_beside_what_is_revealed_it_is_not_told_whether_there_is_such_a_file(workspace: Workspace) -> None:
    """Reached by ``..`` through what is revealed; the controls are what is revealed, and an ordinary name."""
    there, missing = (
        workspace.run("read", path=path, reveal=["service"])["error"]
        for path in ("service/../.env", "service/../.env.x")
    )
    assert there["rule"] == "path.hidden"
    assert str(missing) == str(there).replace("/.env:", "/.env.x:")
    assert MARK in workspace.run("read", path="service/.env.production", reveal=["service"])["text"]
    assert workspace.rule("read", path="service/../env.x", reveal=["service"]) == "path.missing"
    assert MARK in workspace.run("read", path="service/../config", reveal=["service"])["text"]


def test_what_is_no_file_does_not_make_a_look_wait(workspace: Workspace) -> None:
    """A FIFO under a name whose content decides is looked at without waiting for a writer."""
    os.mkfifo(workspace.root / "pipe.pem")
    assert workspace.rule("read", path="pipe.pem") == "path.special"
    assert "pipe.pem" in {entry["path"] for entry in workspace.run("list", pattern="*.pem")["entries"]}


def test_the_page_has_the_list_that_is_in_force() -> None:
    """Each row of the table in docs/operate/secrets.md is one of the guest's, in its order."""
    page = (Path(__file__).parents[2] / "docs" / "operate" / "secrets.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    looked = {True: "if it holds one", False: "always"}
    assert rows == [
        f"| {' '.join(f'`{name}`' for name in names.split())} | {what} | {looked[bool(content)]} |"
        for what, names, content in hidden.KINDS
    ]


PROFILE = """
tool = "read_workspace_file"
description = "Reads."
risk = "low"
isolation = ["bubblewrap"]
approval = "none"
[files]
workspace = "read"
reveal = [{ path = "service/.env.production", reason = "The tests read it, and it holds no secret." }]
[limits]
wall_seconds = 10
cpu_seconds = 5
pids = 16
enforce = "any"
"""


@pytest.mark.driver("bubblewrap")
async def test_whole_calls_hide_what_the_profile_does_not_reveal(tmp_path: Path) -> None:
    """Through broker and real sandboxes: read, list, search and completion; a canary is shown."""
    place = tmp_path / "workspace"
    for name, content in ({**SECRETS, **ORDINARY}).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{content}\n")
    own = tmp_path / "profiles"
    own.mkdir()
    (own / "read_workspace_file.toml").write_text(PROFILE)
    canary = plant(tmp_path / "state", place, "deploy-credentials.env")
    async with apps.opened(Settings(workspace=place, profiles_dir=own, state_dir=tmp_path / "state"), "cli") as app:
        refused = await submitted(app, "read_workspace_file", {"path": ".env"})
        assert refused.structured["error"]["kind"] == "path.hidden"
        assert refused.failed
        shown = await submitted(app, "read_workspace_file", {"path": "service/.env.production"})
        assert shown.structured["text"] == f"{MARK}\n"
        listed = await submitted(app, "list_workspace_files", {"pattern": "*.env"})
        assert [entry["path"] for entry in listed.structured["entries"]] == [canary.path]
        assert listed.structured["hidden"] == 2
        found = await submitted(app, "search_workspace", {"pattern": MARK, "include_ignored": True, "limit": 1000})
        assert not {match["path"] for match in found.structured["matches"]} & set(SECRETS)
        assert found.structured["hidden"] > 30
        assert f"names are those of secrets: {found.structured['hidden']}" in str(found.content)
        asked = types.CompleteRequestParams(
            ref=types.PromptReference(name="analyse_file"),
            argument=types.CompletionArgument(name="path", value=".e"),
        )
        me = Principal(id="local:test", transport="cli")
        completed = await complete(asked, me, app.broker.submit, app.artifacts.owned, app.tools)
        assert set(completed.completion.values) == {".env.example", ".env.sample"}
