"""`glovebox profiles list | show | explain | check | diff`: what is printed, and the exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.fixtures.profile_texts import MINIMAL, decide_by_name

from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_server.cli.main import main
from glovebox_server.cli.rules import profiles
from glovebox_server.exits import OK, USAGE
from glovebox_server.tools import TOOLS

PROFILES = load([SHIPPED], check_example=None)


def run(*words: object, loaded: ProfileSet | None = None) -> tuple[int, str]:
    """Run a command of ``profiles`` where there is a tool ``probe``; return exit code and text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "TOOLS", {**TOOLS, "probe": TOOLS["run_python"]})
        patch.setattr(profiles, "check_example", decide_by_name)
        if loaded is not None:
            patch.setattr(profiles, "load_profiles", lambda _: loaded)
        done = CliRunner().invoke(main, ["profiles", *map(str, words)])
    return done.exit_code, done.output


def run_json(*words: object, loaded: ProfileSet | None = None) -> tuple[int, Any]:
    """The same for what programs read."""
    code, text = run(*words, "--json", loaded=loaded)
    return code, json.loads(text)


def failed(*arguments: object) -> tuple[str, str]:
    """What a command that cannot be done says: to a person on standard error, and as JSON."""
    words = [str(each) for each in arguments]
    told, data = (CliRunner().invoke(main, [*words, *more]) for more in ([], ["--json"]))
    assert (told.exit_code, data.exit_code, told.stdout) == (USAGE, USAGE, "")
    return told.stderr.strip(), json.loads(data.stdout)["error"]["message"]


def write(path: Path, text: str) -> Path:
    """Write a file and the directory around it."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return path


def test_list_names_every_tool_and_where_its_profile_comes_from(tmp_path: Path) -> None:
    """An operator sees at once which profiles are their own."""
    write(tmp_path / "probe.toml", MINIMAL)
    loaded = load([SHIPPED, tmp_path], check_example=None)
    code, text = run("list", loaded=loaded)
    assert code == 0
    assert "shipped" in text
    assert str(tmp_path / "probe.toml") in text
    assert all(tool in text for tool in loaded)
    code, value = run_json("list", loaded=loaded)
    assert (code, value["digest"]) == (0, loaded.digest)
    assert [row["tool"] for row in value["profiles"]] == list(loaded)


def test_show_prints_the_effective_profile() -> None:
    """With defaults filled in, digest and source."""
    code, text = run("show", "run_python")
    assert code == 0
    assert "audit.keep = []" in text
    assert PROFILES.digests["run_python"] in text
    code, value = run_json("show", "run_python")
    assert (code, value["profile"]["limits"]["pids"]) == (0, 64)


def test_explain_prints_sections() -> None:
    """As text and as data."""
    code, text = run("explain", "fetch_url")
    assert code == 0
    assert "What it may reach" in text
    code, value = run_json("explain", "fetch_url")
    assert (code, value["sections"][-1]["title"]) == (0, "What it can never do")


@pytest.mark.parametrize("command", ["show", "explain"])
def test_an_unknown_tool_is_an_error_with_the_nearest_name(command: str) -> None:
    """And exit code 2, as text and as JSON."""
    told, message = failed("profiles", command, "run_pyton")
    assert told.startswith("run_pyton: there is no profile for this tool")
    assert 'The nearest is "run_python".' in told
    assert message == told


def test_check_passes_the_shipped_profiles() -> None:
    """Control for the next one."""
    code, text = run("check", SHIPPED)
    assert (code, text.strip()) == (0, "5 profiles checked, 0 errors.")


def test_check_counts_one_as_one(tmp_path: Path) -> None:
    """One profile is not "1 profiles"."""
    write(tmp_path / "one.toml", MINIMAL + "pids = 9\n")
    _, text = run("check", tmp_path)
    assert text.splitlines()[-1] == "1 profile checked, 1 error."


def test_check_names_every_wrong_file_with_its_line(tmp_path: Path) -> None:
    """All files are checked, not only up to the first that fails."""
    write(tmp_path / "probe.toml", MINIMAL)
    write(tmp_path / "one.toml", MINIMAL + "pids = 9\n")
    write(tmp_path / "two.toml", MINIMAL + "[limits]\npidz = 9\n")
    code, text = run("check", tmp_path)
    assert code == 2
    assert f"{tmp_path}/one.toml:5: pids: unknown key" in text
    assert f"{tmp_path}/two.toml:6: limits.pidz: unknown key" in text
    code, value = run_json("check", tmp_path)
    assert (code, len(value["checked"]), [each["line"] for each in value["errors"]]) == (2, 3, [5, 6])


def test_check_of_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """A mistyped path in CI must not pass."""
    code, text = run("check", tmp_path / "absent")
    assert code == 2
    assert "does not exist" in text


def test_check_names_what_is_not_in_force(tmp_path: Path) -> None:
    """A misspelt tool and a misspelt file are errors, all at once; what nobody could mean as a profile is listed."""
    shipped = (SHIPPED / "run_python.toml").read_text()
    (tmp_path / "run_pyhton.toml").write_text(shipped.replace('"run_python"', '"run_pyhton"'))
    (tmp_path / "fetch_url.tml").write_text(shipped)
    (tmp_path / "notes.txt").write_text("text")
    code, text = run("check", tmp_path)
    assert code == USAGE
    assert f'{tmp_path}/run_pyhton.toml:3: tool: there is no tool "run_pyhton". The nearest is "run_python".' in text
    assert f"{tmp_path}/fetch_url.tml: is not in effect, and may be meant as the profile of fetch_url." in text
    assert f"{tmp_path}/notes.txt: not read" in text
    assert "1 profile checked, 2 errors." in text
    _, value = run_json("check", tmp_path)
    assert value["ignored"] == [f"{tmp_path}/fetch_url.tml", f"{tmp_path}/notes.txt"]


def test_check_names_what_is_shown_and_is_not_there(tmp_path: Path) -> None:
    """By another case, as if it were a pattern, or at all; not what is there, and no pattern that is a file's name."""
    write(tmp_path / "workspace" / "Config" / ".env", "x")
    write(tmp_path / "workspace" / "odd[1].env", "x")
    paths = ("Config", "Config/.env", "config/.ENV", "*.env", "odd[1].env", "absent/.env")
    shown = ", ".join(f'{{ path = "{path}", reason = "Why." }}' for path in paths)
    file = write(tmp_path / "probe.toml", f'{MINIMAL}[files]\nworkspace = "read"\nreveal = [{shown}]\n')
    code, text = run("check", file, "--workspace", tmp_path / "workspace")
    assert code == OK
    assert [line.partition("reveal: ")[2] for line in text.splitlines()[:-1]] == [
        '"config/.ENV" shows nothing: there is "Config", and case counts.',
        f'"*.env" shows nothing: {profiles._NO_PATTERN}.',
        f'"absent/.env" shows nothing: it is not in {tmp_path}/workspace.',
    ]
    _, value = run_json("check", file)
    assert [each["reveal"] for each in value["shows_nothing"]] == ["*.env", "odd[1].env"]  # without a workspace


def test_a_variable_that_is_no_setting_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    """Else the narrower profiles it names would be in no force. Control: the right name."""
    (tmp_path / "profiles").mkdir()
    right = {"GLOVEBOX_PROFILES_DIR": str(tmp_path / "profiles"), "GLOVEBOX_MUST_RUN": "bubblewrap"}
    assert CliRunner().invoke(main, ["profiles", "list"], env=right).exit_code == OK
    for wrong in ("GLOVEBOX_PROFILE_DIR", "glovebox_profiles_dir"):
        done = CliRunner().invoke(main, ["profiles", "list"], env={**right, wrong: "x"})
        assert done.exit_code == USAGE
        assert f"{wrong} is no setting. The nearest is GLOVEBOX_PROFILES_DIR" in " ".join(done.output.split())


def test_a_profile_one_folder_too_high_is_an_error(tmp_path: Path) -> None:
    """It lies beside the directory, which need not be there. The control is a file of another name."""
    (tmp_path / "profiles").mkdir()
    words = ["profiles", "list", "--profiles-dir", str(tmp_path / "profiles")]
    (tmp_path / "notes.toml").write_text("x")
    assert CliRunner().invoke(main, words).exit_code == OK
    (tmp_path / "run_python.toml").write_text((SHIPPED / "run_python.toml").read_text())
    done = CliRunner().invoke(main, words)
    assert done.exit_code == USAGE
    assert "one folder too high" in " ".join(done.output.split())


def test_a_name_with_a_line_feed_makes_no_line_of_its_own(tmp_path: Path) -> None:
    """What check prints of somebody's directory is one line for each entry; the last is ours."""
    (tmp_path / "q\n9 profiles checked, 0 errors.\nx").write_text("text")
    _, text = run("check", tmp_path)
    assert "9 profiles checked" in text
    assert not [line for line in text.splitlines() if line.startswith("9 profiles")]


@pytest.mark.parametrize("by", ["option", "environment"])
@pytest.mark.parametrize("name", ["absent", "file"])
@pytest.mark.parametrize("command", [("profiles", "check"), ("profiles", "list"), ("call", "x"), ("capabilities",)])
def test_a_directory_that_was_named_must_be_one(command: tuple[str, ...], name: str, by: str, tmp_path: Path) -> None:
    """Exit 2 with its name, whoever needs it; the control is the default one, which may be missing."""
    (tmp_path / "file").touch()
    place = str(tmp_path / name)
    option = ["--profiles-dir", place] if by == "option" else []
    environment = {"GLOVEBOX_PROFILES_DIR": place} if by == "environment" else {}
    done = CliRunner().invoke(main, [*command, *option], env=environment)
    assert done.exit_code == USAGE
    assert place in done.output
    own = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert CliRunner().invoke(main, ["profiles", "check"], env=own).exit_code == OK


def test_diff_of_a_widening_exits_1_and_names_it(tmp_path: Path) -> None:
    """And a narrowing beside it does not hide it."""
    old = write(tmp_path / "old.toml", MINIMAL + "[limits]\npids = 9\nmemory = '1 GiB'\n")
    new = write(tmp_path / "new.toml", MINIMAL + "[limits]\npids = 10\nmemory = '512 MiB'\n")
    code, text = run("diff", old, new)
    assert code == 1
    assert "Processes and threads at a time: 9 → 10." in text
    assert "Memory: 1 GiB → 512 MiB." in text
    code, value = run_json("diff", old, new)
    assert (code, value["widening"]) == (1, True)
    assert {each["key"]: each["direction"] for each in value["tools"]["probe"]} == {
        "limits.pids": "widening",
        "limits.memory": "narrowing",
    }


def test_headers_beside_a_key_are_explained_compared_and_checked(tmp_path: Path) -> None:
    """What crosses is in the words for a reviewer; one that authenticates is refused with its line."""
    key = (
        '[network]\nmode = "egress"\nallow = [{ host = "a.org" }]\n[[network.credential]]\nname = "a"\nhost = "a.org"\n'
    )
    key = MINIMAL + key + 'paths = ["/*"]\nheader = "Key"\nsource = "env:A"\n'
    wide = key + 'headers = ["Idempotency-Key"]\nset_headers = { Notion-Version = "2022-06-28" }\n'
    old, new = write(tmp_path / "old" / "probe.toml", key), write(tmp_path / "new" / "probe.toml", wide)
    code, text = run("explain", "probe", loaded=load([new.parent], check_example=None))
    assert code == 0
    assert "Headers of such requests: the program's Idempotency-Key." in text
    assert "Headers of such requests: always Notion-Version: 2022-06-28." in text
    code, text = run("diff", old, new)
    assert code == 1
    assert "a for https://a.org (GET, HEAD); the program's Idempotency-Key; always Notion-Version: 2022-06-28" in text
    write(new, key.replace("probe", "run_python") + 'headers = ["x-API-key"]\n').rename(
        new.with_name("run_python.toml")
    )
    done = CliRunner().invoke(main, ["profiles", "check", str(new.parent)])
    assert done.exit_code == USAGE
    assert "run_python.toml" in done.output
    assert "x-api-key authenticates, so headers and set_headers cannot name it" in " ".join(done.output.split())


def test_diff_without_a_widening_exits_0(tmp_path: Path) -> None:
    """Narrowing, words and nothing at all are all fine."""
    old = write(tmp_path / "old.toml", MINIMAL + "[limits]\npids = 10\n")
    new = write(tmp_path / "new.toml", MINIMAL.replace("A tool", "One tool") + "[limits]\npids = 9\n")
    assert run("diff", old, new)[0] == 0
    assert run("diff", old, old) == (0, "Nothing widens.\n")


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            "{host='a.org'}",
            "{host='a.org'}, {host='b.org', paths=['/x']}",
            "now also https://b.org (GET, HEAD; only /x)",
        ),
        ("{host='a.org'}, {host='b.org'}", "{host='b.org'}", "no longer https://a.org (GET, HEAD)"),
        (
            "{host='a.org', ports=[8443]}",
            "{host='a.org'}",
            "now also https://a.org (GET, HEAD); no longer https://a.org:8443",
        ),
        ("{host='a.org'}", "{host='a.org'}, {host='a.org', paths=['/x']}", "written differently, the same in effect"),
    ],
)
def test_diff_of_hosts_says_what_came_and_went(tmp_path: Path, before: str, after: str, sentence: str) -> None:
    """Rule by rule, in the words of explain."""
    network = MINIMAL + "[network]\nmode = 'egress'\nallow = [{}]\n"
    old, new = (
        write(tmp_path / f"{at}.toml", network.replace("{}", rules)) for at, rules in enumerate((before, after))
    )
    code, text = run("diff", old, new)
    assert sentence in text
    assert code == ("now also" in sentence)


def test_taking_a_narrow_file_out_of_a_directory_is_a_widening(tmp_path: Path) -> None:
    """E3: the shipped profile comes back into force, so directories are compared as they would be in effect."""
    narrow = (SHIPPED / "run_python.toml").read_text().replace("wall_seconds = 30", "wall_seconds = 3")
    narrow = narrow[: narrow.index("[[example]]")]
    write(tmp_path / "old" / "run_python.toml", narrow)
    (tmp_path / "new").mkdir()
    code, text = run("diff", tmp_path / "old", tmp_path / "new")
    assert code == 1
    assert "Seconds of real time: 3 → 30." in text
    assert run("diff", tmp_path / "new", tmp_path / "old")[0] == 0


def test_a_new_tool_widens_and_a_removed_one_narrows(tmp_path: Path) -> None:
    """Without a profile every call is refused."""
    write(tmp_path / "with" / "probe.toml", MINIMAL)
    (tmp_path / "without").mkdir()
    code, text = run("diff", tmp_path / "without", tmp_path / "with")
    assert (code, "The profile is new" in text) == (1, True)
    code, text = run("diff", tmp_path / "with", tmp_path / "without")
    assert (code, "The profile is gone" in text) == (0, True)


def test_diff_of_things_that_cannot_be_compared_exits_2(tmp_path: Path) -> None:
    """Missing, of two kinds, of two tools, or wrong: an error, never "nothing widens"."""
    one = write(tmp_path / "a" / "probe.toml", MINIMAL)
    two = write(tmp_path / "a" / "other.toml", MINIMAL.replace("probe", "other"))
    bad = write(tmp_path / "b" / "probe.toml", MINIMAL + "x = 1")
    for other, problem in (
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "a", "cannot be compared"),
        (two, "two versions of one profile"),
        (bad, "unknown key"),
    ):
        told, message = failed("profiles", "diff", one, other)
        assert problem in told
        assert message == told


def test_text_of_a_profile_is_never_markup_for_the_terminal(tmp_path: Path) -> None:
    """A description cannot colour, link or hide anything in a reviewer's terminal."""
    write(tmp_path / "probe.toml", MINIMAL.replace("A tool of", "[red]A[/red] [link=x] tool of"))
    loaded = load([tmp_path], check_example=None)
    assert "[red]A[/red] [link=x] tool" in run("explain", "probe", loaded=loaded)[1]
    text = MINIMAL + '[[example]]\ncall = { code = "\\u001b[2J\\u202e" }\nexpect = "ask"\n'
    write(tmp_path / "probe.toml", text)
    shown = run("show", "probe", loaded=load([tmp_path], check_example=None))[1]
    assert "\\u001b[2J\\U0000202E" in shown
    assert "\x1b" not in shown


def test_set_copies_the_shipped_profile_and_changes_one_value(tmp_path: Path) -> None:
    """Comments stay; the change, that it widens, and the lock to renew are named; `check` accepts the file."""
    (tmp_path / "glovebox.lock").touch()
    home = {"XDG_CONFIG_HOME": str(tmp_path), "GLOVEBOX_LOCKED": str(tmp_path / "glovebox.lock")}
    file = tmp_path / "glovebox" / "profiles" / "run_python.toml"
    words = ["profiles", "set", "run_python", "limits.wall_seconds=120", 'limits.memory="2 GiB"']
    done = CliRunner().invoke(main, words, env=home)
    assert (done.exit_code, done.stderr) == (OK, "")
    assert "widening   limits.wall_seconds  Seconds of real time: 30 → 120." in done.stdout
    assert "Something widens." in done.stdout
    assert f"`glovebox profiles lock --force {tmp_path / 'glovebox.lock'}`" in done.stdout
    shipped = (SHIPPED / "run_python.toml").read_text()
    changed = shipped.replace("wall_seconds = 30", "wall_seconds = 120").replace('"1 GiB" #', '"2 GiB" #')
    assert file.read_text() == changed
    assert CliRunner().invoke(main, ["profiles", "check"], env=home).exit_code == OK
    again = CliRunner().invoke(main, [*words, "--json"], env=home)
    assert (again.exit_code, json.loads(again.stdout)["changes"]) == (OK, [])


@pytest.mark.long
@pytest.mark.parametrize(
    ("tool", "change", "back"),
    [
        *((tool, "limits.wall_seconds=1", "limits.wall_seconds=20") for tool in PROFILES),
        *((tool, "limits.wall_seconds=600", "limits.wall_seconds=20") for tool in PROFILES),
        *((tool, "approval=ask", "approval=none") for tool in PROFILES),
        ("run_python", "files.workspace=none", "files.workspace=read"),
        ("read_workspace_file", "files.workspace=none", "files.workspace=read"),
        ("fetch_url", 'network.allow=[{ host = "a.example" }]', 'network.allow=[{ host = "docs.python.org" }]'),
    ],
)
def test_no_shipped_example_stands_in_the_way_of_a_change(tool: str, change: str, back: str, tmp_path: Path) -> None:
    """It then expects what the changed profile answers, also when the change is taken back."""
    # An example of the operator's own does stand in the way.
    for setting in (change, back):
        words = ["profiles", "set", tool, setting, "--json"]
        done = CliRunner().invoke(main, words, env={"XDG_CONFIG_HOME": str(tmp_path)})
        assert done.exit_code == OK, done.output
        assert json.loads(done.stdout)["changes"][0]["key"] == setting.partition("=")[0]


def test_set_writes_nothing_that_would_not_load(tmp_path: Path) -> None:
    """All that is wrong is named at once; so is an operator's example that fails, and an environment not built."""
    own = (SHIPPED / "run_python.toml").read_text().replace("timeout_seconds = 601", "timeout_seconds = 31")
    file = write(tmp_path / "glovebox" / "profiles" / "run_python.toml", own)
    for changes, problems in (
        (["aproval=ask", "limits.pids=many"], ["aproval: unknown key", "limits.pids: input should be"]),
        (["limits.wall_seconds=60"], ["example[2]: expects deny by limits.wall_seconds, but"]),
        (["python.environment=absent"], ["python.environment"]),
        (["isolation.first=docker"], ["isolation.first: cannot be set by a command"]),
    ):
        done = CliRunner().invoke(
            main, ["profiles", "set", "run_python", *changes], env={"XDG_CONFIG_HOME": str(tmp_path)}
        )
        assert done.exit_code == USAGE
        assert all(problem in " ".join(done.output.split()) for problem in problems), done.output
    assert file.read_text() == own
