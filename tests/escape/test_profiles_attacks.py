"""Attempts to get more out of a profile than its reviewer granted; each with a control that shows the guard at work."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixtures.access_lists import let_in
from tests.fixtures.profile_texts import MINIMAL, decide_by_name, profile

from glovebox_profiles.compile import to_spec
from glovebox_profiles.egress.rules import decide_url
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, load, parse, read

PATH = Path("probe.toml")


def egress(allow: str) -> str:
    """Return a profile with an allow-list as given."""
    return f"{MINIMAL}[network]\nmode = 'egress'\n{allow}\n"


def write(path: Path, text: str = MINIMAL) -> Path:
    """Write a profile."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("allow", "problem"),
    [
        ("", "must name at least one host"),
        ("allow = []", "must name at least one host"),
        ("allow = '*'", "network.allow: "),
        ("allow = ['*']", "must be a table"),
        ("allow = [{ host = '*' }]", "would match too much"),
        ("allow = [{ host = '*.org' }]", "would match too much"),
        ("allow = [{ host = '' }]", "not a host name"),
        ("allow = [{ host = '127.0.0.1' }]", "loopback"),
        ("allow = [{ host = 'localhost' }]", "local"),
        ("allow = [{ host = 'a.org', paths = [] }]", "paths: must not be empty"),
        ("allow = [{ host = 'a.org', methods = ['*'] }]", "methods"),
        ("allow = [{ host = 'a.org', methods = [] }]", "methods"),
        ("allow = [{ host = 'a.org', ports = [0] }]", "ports"),
        ("allow = [{ host = 'a.org', path = ['/x'] }]", "unknown key"),
        ("allowed = [{ host = 'a.org' }]", "unknown key"),
        ("[[network.allow]]\nhost = 'a.org'", "headers of their own"),
        ("allow = [{ host = 'a.org' }, { host = 'a.org' }]", "listed twice"),
    ],
)
def test_e2_a_list_that_is_empty_missing_misspelt_or_a_star_does_not_load(allow: str, problem: str) -> None:
    """E2: none of them means "everything"; each is an error that says why."""
    with pytest.raises(ProfileError, match=r"^probe\.toml:\d+: network") as caught:
        parse(egress(allow).encode(), PATH)
    assert problem in str(caught.value)


def test_e2_control_a_list_with_one_host_loads_and_allows_that_host_only() -> None:
    """E2, control: the nearest thing that is not refused."""
    rules = parse(egress("allow = [{ host = 'a.org' }]").encode(), PATH).network.allow
    assert decide_url("GET", "https://a.org/", rules).effect == "allow"
    assert decide_url("GET", "https://b.org/", rules).effect == "deny"


def test_e2_a_list_without_the_mode_does_not_load() -> None:
    """E2: a profile that contradicts itself is not read in either direction."""
    with pytest.raises(ProfileError, match='must be empty while mode is "none"'):
        profile("[network]\nallow = [{ host = 'a.org' }]\n")


@pytest.mark.parametrize("text", ["", "\n", "tool =", MINIMAL[:-20]])
def test_e3_a_broken_operator_file_does_not_fall_back_to_the_shipped_one(tmp_path: Path, text: str) -> None:
    """E3: the operator's file may be the narrower one, so its loss is an error and not the shipped default."""
    write(tmp_path / "run_python.toml", text)
    with pytest.raises(ProfileError, match=r"run_python\.toml"):
        load([SHIPPED, tmp_path], check_example=decide_by_name)


def test_e3_control_the_same_file_unbroken_is_in_force(tmp_path: Path) -> None:
    """E3, control."""
    write(tmp_path / "run_python.toml", MINIMAL.replace("probe", "run_python"))
    assert load([SHIPPED, tmp_path], check_example=decide_by_name)["run_python"].approval == "ask"


@pytest.mark.parametrize(
    "extra",
    [
        "privileged = true",
        "devices = ['/dev/kvm']",
        "mounts = [{ source = '/var/run/docker.sock', target = '/var/run/docker.sock' }]",
        "[files]\nmounts = ['/']",
        "[files]\nworkspace = 'write'",
        "[files]\nworkspace = '/etc'",
        "[docker]\nextra_args = ['--privileged']",
        "[network]\nmode = 'host'",
        "[python]\nenv = { LD_PRELOAD = '/workspace/x.so' }",
        "seccomp = 'unconfined'",
        "user = 'root'",
        "capabilities = ['SYS_ADMIN']",
        "unsafe_anything = true",
    ],
)
def test_i1_no_profile_can_ask_for_a_hole(extra: str) -> None:
    """I1: sockets, privileges, devices, writable or other mounts have no key; asking is an error, not a warning."""
    with pytest.raises(ProfileError, match=r"^probe\.toml:\d"):
        profile(extra + "\n")


def test_i1_control_the_only_mount_a_profile_can_ask_for_is_the_workspace() -> None:
    """I1, control: and a Mount is read-only by definition."""
    given = profile("[files]\nworkspace = 'read'\n")
    assert [mount.source for mount in to_spec(given, workspace=Path("/srv/w")).mounts] == ["/srv/w"]


def test_m4_a_policy_that_lets_an_argument_lift_a_limit_does_not_get_the_shipped_profiles() -> None:
    """M4: their examples hold the policy to it at every start; the control is a policy that keeps the limit."""
    with pytest.raises(ProfileError, match=r"\.toml:\d+: example\[2\]: expects deny, but the profile answers allow"):
        load([SHIPPED], check_example=lambda profile, call: decide_by_name(profile, {**call, "timeout_seconds": 1}))
    assert "run_python" in load([SHIPPED], check_example=decide_by_name)


def _linked(path: Path) -> None:
    write(path.with_name("elsewhere")).rename(path.with_name("target"))
    path.unlink()
    path.symlink_to(path.with_name("target"))


def _shared(path: Path) -> None:
    os.chown(path, -1, 4321)
    path.chmod(0o664)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: path.chmod(0o646), "writable by every user"),
        (lambda path: path.parent.chmod(0o777), "writable by every user"),
        (_shared, "writable by group 4321"),
        (lambda path: let_in(path, 4321, 6), "writable by whom its access list names"),
        (lambda path: let_in(path.parent, 4321, 7), "writable by whom its access list names"),
        (lambda path: os.chown(path, 4321, -1), "belongs to user 4321"),
        (lambda path: os.chown(path.parent, 4321, -1), "belongs to user 4321"),
        (_linked, "a symbolic link"),
        (_directory, "not a regular file"),
    ],
)
def test_m10_a_file_that_somebody_else_could_have_written_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    """M10: owner, mode and kind of file and directory are checked; the same file unspoilt loads."""
    path = write(tmp_path / "mine" / "probe.toml")
    assert list(load([path.parent], check_example=None)) == ["probe"]
    try:
        spoil(path)
    except PermissionError:
        pytest.skip("changing the owner of a file needs root")
    with pytest.raises(ProfileError) as caught:
        load([path.parent], check_example=None)
    assert problem in caught.value.reason
    assert caught.value.fix


def test_m10_control_a_list_of_who_may_read_is_no_flaw(tmp_path: Path) -> None:
    """M10, control: the same lists without the right to write."""
    path = write(tmp_path / "mine" / "probe.toml")
    let_in(path, 4321, 4)
    let_in(path.parent, 4321, 5)
    assert list(load([path.parent], check_example=None)) == ["probe"]


def test_m10_a_profile_holds_no_commands() -> None:
    """M10: every text is a name from a list or matches a pattern; only the description and examples are free."""
    for extra in ("[python]\npreload = ['$(id)']", "isolation = ['docker --privileged']", "approval = 'none; id'"):
        with pytest.raises(ProfileError):
            profile(extra + "\n")


def test_m11_a_profile_in_the_workspace_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M11: what the model can put into the workspace or the current directory is never policy."""
    wide = MINIMAL.replace("probe", "run_python") + "approval = 'none'\n[limits]\nwall_seconds = 600\n"
    before = load([SHIPPED], check_example=decide_by_name).digest
    for place in (tmp_path, tmp_path / "profiles", tmp_path / ".glovebox"):
        write(place / "run_python.toml", wide)
    monkeypatch.chdir(tmp_path)
    assert load([SHIPPED], check_example=decide_by_name).digest == before
    assert load([SHIPPED, tmp_path], check_example=decide_by_name).digest != before, "control: named, it is read"


def test_m18_errors_repeat_no_control_characters_of_the_file(tmp_path: Path) -> None:
    """M18: a key cannot clear, recolour or flood the terminal of the person who checks it."""
    with pytest.raises(ProfileError) as caught:
        read(
            write(tmp_path / "probe.toml", MINIMAL + '"\\u001b[2J\\u202e' + "x" * 5000 + '" = 1\n'), check_example=None
        )
    assert str(caught.value).isprintable()
    assert "\\x1b[2J\\u202e" in caught.value.key
    assert len(str(caught.value)) < 1500
