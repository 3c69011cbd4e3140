"""Profiles that load, and the errors of those that do not: file, line, key, problem and hint."""

import errno
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.profile_texts import MINIMAL, decide_by_name, profile

from glovebox_profiles.errors import MAX_ERRORS, ProfileError
from glovebox_profiles.load.loader import MAX_PROFILES, SHIPPED, is_absent, load, parse, read
from glovebox_profiles.load.reading import MAX_FILE, set_value
from glovebox_profiles.model import GIB, KIB, MIB, digest

PATH = Path("probe.toml")


def refused(text: str | bytes) -> ProfileError:
    """Parse what must not parse."""
    with pytest.raises(ProfileError) as caught:
        parse(text.encode() if isinstance(text, str) else text, PATH)
    return caught.value


def write(directory: Path, name: str, text: str) -> Path:
    """Write one profile file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(text)
    return path


LENT = """[network]
mode = "egress"
allow = [{ host = "a.org" }]
[[network.credential]]
name = "a"
host = "a.org"
paths = ["/*"]
header = "Key"
source = "env:A"
"""


def test_every_default_is_the_closed_one() -> None:
    """A profile that says nothing but what it must grants nothing and asks."""
    given = profile()
    assert given.approval == "ask"
    assert (given.files.workspace, given.files.output, given.files.inputs) == ("none", False, False)
    assert (given.network.mode, given.network.allow) == ("none", ())
    assert given.limits.enforce == "cgroup"
    assert (given.limits.wall_seconds, given.limits.memory, given.limits.pids) == (1.0, 64 * MIB, 8)
    assert (given.audit.keep, given.python.preload) == ((), ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [('"2 GiB"', 2 * GIB), ('"512 MiB"', 512 * MIB), ('"524288KiB"', 512 * MIB), ("67108864", 64 * MIB)],
)
def test_sizes_are_numbers_or_texts_with_a_binary_unit(text: str, expected: int) -> None:
    """Both spellings are bytes."""
    assert profile(f"[limits]\nmemory = {text}\n").limits.memory == expected


@pytest.mark.parametrize(
    ("extra", "line", "key", "problem", "hint"),
    [
        ("aproval = 'ask'", 5, "aproval", "unknown key", 'nearest valid key is "approval"'),
        ("[limit]\npids = 9", 5, "limit", "unknown key", 'nearest valid key is "limits"'),
        ("[limits]\nmemmory = 1", 6, "limits.memmory", "unknown key", '"limits.memory"'),
        ("memory = '1 GiB'", 5, "memory", "unknown key", '"limits.memory"'),
        ("[files]\nwork_space = 'read'", 6, "files.work_space", "unknown key", '"files.workspace"'),
        ("[limits.output]\nbytess = 1", 6, "limits.output.bytess", "unknown key", '"limits.output.bytes"'),
        ("[limits]\noutput = { file = 1 }", 6, "limits.output.file", "unknown key", '"limits.output.files"'),
        ("[network]\nalow = []", 6, "network.alow", "unknown key", '"network.allow"'),
        (
            "[network]\nmode='egress'\nallow = [\n  { host = 'a.org' },\n  { hots = 'b.org' },\n]",
            9,
            "network.allow[1].hots",
            "unknown key",
            '"network.allow.host"',
        ),
        ("[[example]]\ncal = {}\nexpect='allow'", 6, "example[0].cal", "unknown key", '"example.call"'),
        ("[python]\nzzz = 1", 6, "python.zzz", "unknown key", "Valid keys here: environment, start, preload"),
        ("[files]\nworkspace = 'write'", 6, "files.workspace", "not supported by this version", "docs/use/profiles"),
        ("[files]\noutput = 1", 6, "files.output", "boolean", "docs/use/profiles"),
        ("[limits]\npids = true", 6, "limits.pids", "integer", "docs/use/profiles"),
        ("[limits]\npids = 8.0", 6, "limits.pids", "integer", "docs/use/profiles"),
        ("[limits]\npids = '9'", 6, "limits.pids", "integer", "docs/use/profiles"),
        ("[limits]\nwall_seconds = nan", 6, "limits.wall_seconds", "finite", "docs/use/profiles"),
        ("[limits]\nwall_seconds = inf", 6, "limits.wall_seconds", "finite", "docs/use/profiles"),
        ("[limits]\nwall_seconds = 1e9", 6, "limits.wall_seconds", "600", "docs/use/profiles"),
        ("[limits]\nscratch = 0", 6, "limits.scratch", "1048576", "docs/use/profiles"),
        ("[limits]\nmemory = '1 GB'", 6, "limits.memory", "512 MiB", "docs/use/profiles"),
        ("[limits]\nmemory = -1", 6, "limits.memory", "greater", "docs/use/profiles"),
        ("limits = 3", 5, "limits", "must be a table", "[limits]"),
        ("[audit]\nkeep = ['everything']", 6, "audit.keep[0]", "'arguments'", "docs/use/profiles"),
        ("[python]\npreload = ['os; import evil']", 6, "python.preload[0]", "pattern", "docs/use/profiles"),
        (
            "[python]\npreload = ['numpy', 'numpy']\nstart = 'warm'",
            6,
            "python.preload",
            "listed twice",
            "docs/use/profiles",
        ),
        (
            "[python]\npreload = ['numpy']",
            6,
            "python.preload",
            'must be empty while start is "cold"',
            "docs/use/profiles",
        ),
        (
            f"{LENT}env = 'A_TOKEN'",
            14,
            "network.credential[0].env",
            "probe runs no program to find it",
            "requests of probe get the key unasked",
        ),
        ("[python]\nstart = 'hot'", 6, "python.start", "'cold'", "docs/use/profiles"),
        ("[[example]]\ncall = { at = 1979-05-27 }\nexpect='allow'", 6, "example[0].call", "JSON", "docs"),
        ("[[example]]\ncall = { at = nan }\nexpect='allow'", 6, "example[0].call", "JSON", "docs"),
        ("[[example]]\ncall = {}", 5, "example[0].expect", "missing", "docs/use/profiles"),
        ("[limits]\npids = 9\n[limits]\n", 7, "", "not TOML: Cannot declare ('limits',) twice", "toml.io"),
        ("[limits]\npids = 9\npids = 10", 7, "", "not TOML: Cannot overwrite a value", "toml.io"),
        ("tool = 'other'", 5, "", "not TOML: Cannot overwrite a value", "toml.io"),
        ("[limits]\npids = ", 6, "", "not TOML", "toml.io"),
        ("[limits\npids = 9", 5, "", "not TOML", "toml.io"),
        ("x = " + "[" * 40, 5, "x[0][0]", "nested deeper", "flatter"),
        ("a." * 30_000 + "a = 1", 5, "a", "nested deeper", "flatter"),
    ],
)
def test_a_mistake_is_named_with_line_key_and_hint(extra: str, line: int, key: str, problem: str, hint: str) -> None:
    """The operator can go to the line and fix it; nothing is guessed or dropped."""
    error = refused(MINIMAL + extra + "\n")
    assert (error.path, error.line, error.key) == (PATH, line, key)
    assert problem in error.reason
    assert hint in error.fix
    assert str(error).startswith(f"probe.toml:{line}: ")


@pytest.mark.parametrize(
    ("text", "line", "key", "problem"),
    [
        ("", 1, "tool", "missing"),
        (MINIMAL.replace('"low"', '"lowest"'), 3, "risk", "'low', 'medium' or 'high'"),
        (MINIMAL.replace('["bubblewrap"]', "[]"), 4, "isolation", "must not be empty"),
        (MINIMAL.replace('["bubblewrap"]', '["bwrap"]'), 4, "isolation[0]", "'bubblewrap', 'docker' or 'gvisor'"),
        (MINIMAL.replace('["bubblewrap"]', '["docker", "docker"]'), 4, "isolation", "listed twice"),
        (MINIMAL.replace('"probe"', '"../probe"'), 1, "tool", "pattern"),
        (MINIMAL.replace("A tool", "A \\u202E tool"), 2, "description", "invisible"),
        (MINIMAL.replace("A tool", "A \\u001b[2J tool"), 2, "description", "control"),
    ],
)
def test_what_a_profile_must_say_is_checked(text: str, line: int, key: str, problem: str) -> None:
    """Required keys, and the four that cannot be left to a default."""
    error = refused(text)
    assert (error.line, error.key) == (line, key)
    assert problem in error.reason


def test_what_is_not_utf8_or_huge_is_refused() -> None:
    """A stray Latin-1 byte with its line; the bound is on bytes, before anything is parsed, and the largest passes."""
    error = refused(MINIMAL.encode() + b"# caf\xe9\n")
    assert (error.line, error.reason) == (5, "not UTF-8 text")
    largest = (MINIMAL + "#" * MAX_FILE)[:MAX_FILE]
    assert parse(largest.encode(), PATH) == profile()
    assert "larger than 64 KiB" in refused(largest + "#").reason


def test_the_digest_is_of_meaning_not_of_spelling() -> None:
    """Comments, order, units and stated defaults do not change it; any value does."""
    plain = profile("[limits]\nmemory = '1 GiB'\npids = 9\n")
    same = profile("# note\n[limits]\npids=9\nmemory = 1073741824\n[files]\nworkspace = 'none'\n")
    other = profile("[limits]\nmemory = '1 GiB'\npids = 10\n")
    assert digest(plain) == digest(same)
    assert digest(plain).startswith("sha256:")
    assert len(digest(plain)) == len("sha256:") + 64
    assert digest(plain) != digest(other)


def test_an_operator_file_replaces_the_shipped_one_whole(tmp_path: Path) -> None:
    """Nothing is inherited: what the operator's file leaves out is closed, whatever the shipped file said."""
    shipped, mine = tmp_path / "shipped", tmp_path / "mine"
    write(shipped, "probe.toml", MINIMAL + "approval = 'none'\n[files]\noutput = true\n")
    write(shipped, "other.toml", MINIMAL.replace("probe", "other"))
    before = load([shipped], check_example=None)
    write(mine, "probe.toml", MINIMAL)
    after = load([shipped, mine], check_example=None)
    assert before["probe"].files.output
    assert not after["probe"].files.output
    assert after["probe"].approval == "ask"
    assert after.source("probe") == mine / "probe.toml"
    assert list(after) == ["other", "probe"]
    assert after["other"] == before["other"]
    assert after.digest != before.digest
    assert after.digests["probe"] == digest(after["probe"])


def test_an_empty_operator_directory_is_fine_and_one_that_is_not_there_is_not(tmp_path: Path) -> None:
    """No configuration is a configuration, the shipped profiles; but whoever names a directory believes it has some."""
    shipped = load([SHIPPED], check_example=None).digest
    assert load([SHIPPED, tmp_path], check_example=None).digest == shipped
    with pytest.raises(ProfileError, match="absent: cannot be read: No such file or directory"):
        load([SHIPPED, tmp_path / "absent"], check_example=None)


def test_a_directory_is_absent_only_where_nobody_put_anything(tmp_path: Path) -> None:
    """A link that leads nowhere, itself or above, a file and what lies below one: something was meant to be there."""
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert is_absent(tmp_path / "a/b")
    for name in ("nowhere", "nowhere/profiles", "file", "file/profiles", "."):
        assert not is_absent(tmp_path / name)


def test_what_is_no_directory_no_file_or_misnamed_is_an_error(tmp_path: Path) -> None:
    """A file is no empty directory, a FIFO does not hang, and two files do not speak for one tool."""
    with pytest.raises(ProfileError, match="cannot be read"):
        load([write(tmp_path, "probe.toml", MINIMAL)], check_example=None)
    (tmp_path / "probe.toml").unlink()
    os.mkfifo(tmp_path / "probe.toml")
    with pytest.raises(ProfileError, match="not a regular file"):
        load([tmp_path], check_example=None)
    with pytest.raises(ProfileError, match=r"Name the file probe\.toml") as caught:
        read(write(tmp_path, "probe2.toml", MINIMAL), check_example=None)
    assert (caught.value.line, caught.value.key) == (1, "tool")


def test_the_set_cannot_be_changed(tmp_path: Path) -> None:
    """What was loaded and digested is what is in effect."""
    write(tmp_path, "probe.toml", MINIMAL)
    loaded = load([tmp_path], check_example=None)
    with pytest.raises(TypeError):
        loaded["probe"] = loaded["probe"]  # type: ignore[index]
    with pytest.raises(ValueError, match="frozen"):
        loaded["probe"].limits.pids = 4096  # type: ignore[misc]


def test_a_policy_among_profiles_is_told_where_it_belongs(tmp_path: Path) -> None:
    """What is wrong with its keys as those of a profile helps nobody."""
    place = tmp_path / "profiles"
    place.mkdir()
    (place / "policy.toml").write_text("version = 1\n")
    with pytest.raises(ProfileError, match=re.escape(f"Move it to {tmp_path / 'policy.toml'}")):
        load([place], check_example=None)


def test_more_files_than_tools_could_exist_are_refused(tmp_path: Path) -> None:
    """A wrong directory is not read file by file."""
    for index in range(MAX_PROFILES + 1):
        write(tmp_path, f"t{index}.toml", "")
    with pytest.raises(ProfileError, match="Name another directory"):
        load([tmp_path], check_example=None)


EXAMPLE = "[[example]]\ncall = {{ timeout_seconds = {seconds} }}\nexpect = '{expect}'\nrule = '{rule}'\n"


def test_examples_that_hold_let_the_profile_load(tmp_path: Path) -> None:
    """Control: the same examples, with the answers the profile gives."""
    text = MINIMAL + EXAMPLE.format(seconds=2, expect="deny", rule="limits.wall_seconds")
    assert read(write(tmp_path, "probe.toml", text), check_example=decide_by_name).tool == "probe"


@pytest.mark.parametrize(
    ("seconds", "expect", "rule", "problem"),
    [
        (2, "allow", "allow", "expects allow by allow, but the profile answers deny by limits.wall_seconds"),
        (2, "deny", "files.inputs", "expects deny by files.inputs, but the profile answers deny by limits.wall"),
        (1, "allow", "allow", "expects allow by allow, but the profile answers ask by approval.ask"),
    ],
)
def test_a_failing_example_is_named(tmp_path: Path, seconds: int, expect: str, rule: str, problem: str) -> None:
    """A profile that does not do what its author wrote down does not load."""
    good = EXAMPLE.format(seconds=2, expect="deny", rule="limits.wall_seconds")
    text = MINIMAL + good + EXAMPLE.format(seconds=seconds, expect=expect, rule=rule)
    with pytest.raises(ProfileError) as caught:
        load([write(tmp_path, "probe.toml", text).parent], check_example=decide_by_name)
    assert (caught.value.line, caught.value.key) == (9, "example[1]")
    assert problem in caught.value.reason


def test_the_bounds_are_what_they_say() -> None:
    """One step past each end is refused and the end itself is not."""
    for key, low, high in (("pids", 8, 4096), ("stream", 4 * KIB, 4 * MIB), ("cpu_seconds", 1, 600)):
        for value in (low, high):
            profile(f"[limits]\n{key} = {value}\n")
        for value in (low - 1, high + 1):
            assert refused(f"{MINIMAL}[limits]\n{key} = {value}\n").key == f"limits.{key}"


OTHERS = (
    ".probe.toml", ".probe.toml.swp", "probe.toml~", "#probe.toml#", "probe.toml.bak", "probe.tml", "probe.TOML",
    "probe", "Probe.yaml", "porbe.tml", "probe.toml.d/README", "old/probe.toml", "old/.probe.toml.swp",
)  # fmt: skip


def test_hidden_files_and_other_names_are_not_profiles(tmp_path: Path) -> None:
    """An editor's swap file does not become policy, and beside the profile itself nobody takes it for one."""
    write(tmp_path, "probe.toml", MINIMAL)
    for name in (*OTHERS, "README.md", "notes.txt", "schema.json", ".gitignore", ".git/probe.toml"):
        write((tmp_path / name).parent, Path(name).name, "not a profile")
    assert list(load([tmp_path], check_example=None, tools=["probe"])) == ["probe"]


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_be_meant_as_a_profile_and_is_none_is_an_error(name: str, tmp_path: Path) -> None:
    """An operator would believe it to be in effect, and the wider shipped one is. What means no tool is let lie."""
    mine = tmp_path / "mine"
    for harmless in ("README.md", "notes.txt", ".git/probe.toml", "old/README.md"):
        write((mine / harmless).parent, Path(harmless).name, "text")
    shipped = write(tmp_path / "shipped", "probe.toml", MINIMAL).parent
    assert list(load([shipped, mine], check_example=None, tools=["probe", "other"])) == ["probe"]
    write((mine / name).parent, Path(name).name, MINIMAL)
    with pytest.raises(ProfileError) as caught:
        load([shipped, mine], check_example=None, tools=["probe", "other"])
    assert caught.value.path == mine / (name if "/" not in name or "old" in name else "probe.toml.d")
    assert caught.value.reason == "is not in effect, and may be meant as the profile of probe"
    assert str(mine / "probe.toml") in caught.value.fix


@pytest.mark.parametrize(
    "name",
    [".strict/x.toml", "a/b/x.toml", "local.probe.conf", "strict-probe.tml", "python/profile.toml", "profile.json"],
)
@pytest.mark.parametrize("beside", [False, True])
def test_what_nobody_reads_is_an_error_whatever_it_is_called(*, name: str, beside: bool, tmp_path: Path) -> None:
    """At any depth, hidden or not, also beside the tool's own file; notes and version control are let lie (control)."""
    mine = tmp_path / "mine"
    for harmless in ("README", "notes.txt", ".git/x.toml", "a/b/c/README.md"):
        write((mine / harmless).parent, Path(harmless).name, "text")
    shipped = write(tmp_path / "shipped", "probe.toml", MINIMAL).parent
    if beside:
        write(mine, "probe.toml", MINIMAL)
    assert list(load([shipped, mine], check_example=None, tools=["probe"])) == ["probe"]
    write((mine / name).parent, Path(name).name, MINIMAL)
    with pytest.raises(ProfileError, match="is not in effect, and may be meant as a profile") as caught:
        load([shipped, mine], check_example=None, tools=["probe"])
    assert caught.value.path == mine / name


def test_a_linked_folder_is_not_read_and_is_an_error(tmp_path: Path) -> None:
    """The control is the same folder, named itself."""
    real = write(tmp_path / "real", "probe.toml", MINIMAL).parent
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/strict").symlink_to(real)
    assert list(load([real], check_example=None, tools=["probe"])) == ["probe"]
    with pytest.raises(ProfileError, match="strict: is not in effect, and may be meant as a profile"):
        load([tmp_path / "mine"], check_example=None, tools=["probe"])


@pytest.mark.parametrize(("wrong", "hint"), [("prboe", 'The nearest is "probe".'), ("zzz", "There are: other, probe.")])
def test_a_profile_of_a_tool_that_is_not_offered_is_an_error(wrong: str, hint: str, tmp_path: Path) -> None:
    """With the line and the nearest tool, whatever the file is called; the control is the tool that is there."""
    write(tmp_path, "probe.toml", MINIMAL)
    assert list(load([tmp_path], check_example=None, tools=["probe", "other"])) == ["probe"]
    for name in (f"{wrong}.toml", "probe.toml"):
        (path,) = tmp_path.iterdir()
        path.unlink()
        write(tmp_path, name, MINIMAL.replace('"probe"', f'"{wrong}"'))
        with pytest.raises(ProfileError) as caught:
            load([tmp_path], check_example=None, tools=["probe", "other"])
        assert (caught.value.path, caught.value.line, caught.value.key) == (tmp_path / name, 1, "tool")
        assert caught.value.reason == f'there is no tool "{wrong}"'
        assert caught.value.fix == hint


def test_a_folder_that_cannot_be_looked_into_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile may lie in it. Root may list every directory, so the kernel's answer is made up."""
    (tmp_path / "folder").mkdir()
    load([tmp_path], check_example=None, tools=["probe"])
    scandir, folder = os.scandir, (tmp_path / "folder").stat().st_ino

    def refused(place: int) -> Any:
        if os.fstat(place).st_ino == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ProfileError, match="folder: cannot be read"):
        load([tmp_path], check_example=None, tools=["probe"])


def test_all_errors_of_a_file_are_reported_and_their_number_is_bounded(tmp_path: Path) -> None:
    """A misspelt key, a wrong value and a missing key at once, in that order; then every failing example."""
    error = refused("tool = 'probe'\nrisk = 'lowest'\naproval = 'ask'\nisolation = ['bubblewrap']\n")
    assert [item.key for item in (error, *error.more)] == ["aproval", "risk", "description"]
    assert str(error).splitlines()[1].startswith("probe.toml:2: risk: ")
    wrong = EXAMPLE.format(seconds=2, expect="allow", rule="allow")
    with pytest.raises(ProfileError) as caught:
        read(write(tmp_path, "probe2.toml", MINIMAL + 2 * wrong), check_example=decide_by_name)
    assert [item.key for item in (caught.value, *caught.value.more)] == ["tool", "example[0]", "example[1]"]
    many = refused(MINIMAL + "".join(f"x{number} = 1\n" for number in range(MAX_ERRORS + 5)))
    assert (len(many.more), many.more[-1].reason) == (MAX_ERRORS, "has 5 more errors")


@pytest.mark.parametrize(
    ("text", "key", "value", "edited"),
    [
        ("[limits] # a\npids = 9 # b\n", "limits.pids", "10", "[limits] # a\npids = 10 # b\n"),
        ("[limits] # a\npids = 9\n", "limits.cpu_seconds", "2", "[limits] # a\ncpu_seconds = 2\npids = 9\n"),
        ("[limits]", "limits.output.files", "2", "[limits]\noutput.files = 2"),
        ("[limits]\noutput = { files = 2 } # c\n", "limits.output.bytes", "9",
         "[limits]\noutput = { files = 2, bytes = 9 } # c\n"),
        ("limits.output = {}\n", "limits.output.files", "2", "limits.output = { files = 2 }\n"),
        ("# end\n", "limits.pids", "9", "# end\n\n[limits]\npids = 9\n"),
        ("[limits]\r\nmemory = 64\r\n", "limits.memory", "1 GiB", '[limits]\r\nmemory = "1 GiB"\r\n'),
        ('approval = "none"\n', "approval", 'a "b"', 'approval = "a \\"b\\""\n'),
        ("[audit]\nkeep = [\n'value', # d\n]\n", "audit.keep", "[]", "[audit]\nkeep = []\n"),
    ],
)  # fmt: skip
def test_an_edit_changes_one_value_and_no_other_character(text: str, key: str, value: str, edited: str) -> None:
    """In whatever form the table of the key is written."""
    end = "\r\n" if "\r\n" in text else "\n"
    begin = MINIMAL.replace("\n", end)
    found = set_value((begin + text).encode(), PATH, tuple(key.split(".")), value).decode()
    assert found == begin + edited


def test_an_edit_beside_dotted_keys_stands_behind_the_tool() -> None:
    """A header for their table would be an error; a key at the top would belong to the last table."""
    text = MINIMAL + "limits.pids = 9\n[files]\n"
    found = set_value(text.encode(), PATH, ("limits", "cpu_seconds"), "2")
    assert set_value(found, PATH, ("approval",), "ask").decode().splitlines()[:3] == [
        'tool = "probe"', 'approval = "ask"', "limits.cpu_seconds = 2",
    ]  # fmt: skip


def test_an_edit_that_would_say_something_else_is_refused() -> None:
    """A key below a list or a value; a value that brings a line of its own is a text."""
    for key in (("isolation", "x"), ("tool", "x")):
        with pytest.raises(ProfileError):
            set_value(MINIMAL.encode(), PATH, key, "1")
    found = set_value(MINIMAL.encode(), PATH, ("risk",), '"low"\napproval = "none"')
    assert tomllib.loads(found.decode())["risk"] == '"low"\napproval = "none"'
