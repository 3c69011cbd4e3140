"""The profiles that come with the package: what they permit, that they compile, and that a reviewer can read them."""

import csv
from pathlib import Path

import pytest
from tests.fixtures.profile_texts import decide_by_name, profile

from glovebox_profiles.compile import to_spec
from glovebox_profiles.egress.rules import decide_url
from glovebox_profiles.explain import explain, render
from glovebox_profiles.load.loader import SHIPPED, load, parse
from glovebox_profiles.load.reading import valid_keys
from glovebox_profiles.model import MIB, Profile, digest
from glovebox_profiles.order import KEYS
from glovebox_profiles.schema import SCHEMA_FILE, schema_text
from glovebox_sandboxes.contract.base import WORKSPACE, Mount
from glovebox_server.cli.rules.profiles import to_toml
from glovebox_server.receipts.recorder import withheld
from glovebox_server.tools import TOOLS

PROFILES = load([SHIPPED], check_example=decide_by_name)
HERE = Path("/srv/workspace")


def test_there_is_one_profile_for_each_tool() -> None:
    """And no other; none for what changes files on the host, which nobody has until an operator writes one."""
    assert list(PROFILES) == [name for name, tool in TOOLS.items() if not tool.proposes]


@pytest.mark.parametrize("tool", PROFILES)
def test_examples_show_an_allowed_and_a_refused_call(tool: str) -> None:
    """Both kinds were decided when PROFILES was loaded."""
    assert {"allow", "deny"} <= {example.expect for example in PROFILES[tool].example}


def test_one_tool_needs_the_network_and_one_delivers_files() -> None:
    """The control of the tests below, which believe what a tool says of itself."""
    assert [name for name, tool in TOOLS.items() if "network" in tool.needs] == ["fetch_url"]
    assert [name for name, tool in TOOLS.items() if tool.delivers] == ["run_python"]


@pytest.mark.parametrize("tool", [name for name in PROFILES if "network" not in TOOLS[name].needs])
def test_only_what_needs_it_reaches_anything(tool: str) -> None:
    """Code of a model has no network, and neither have the workspace tools."""
    assert PROFILES[tool].network.mode == "none"
    assert to_spec(PROFILES[tool], workspace=HERE).network == "none"


def test_fetch_url_sees_no_workspace() -> None:
    """What could be sent out is not there to be read."""
    assert to_spec(PROFILES["fetch_url"], workspace=HERE).mounts == ()


@pytest.mark.parametrize("tool", PROFILES)
def test_only_tools_that_deliver_files_may_give_some_back(tool: str) -> None:
    """Reading tools have no /output."""
    assert PROFILES[tool].files.output == TOOLS[tool].delivers


@pytest.mark.parametrize(
    ("method", "url", "effect"),
    [
        ("GET", "https://docs.python.org/3/library/tomllib.html", "allow"),
        ("HEAD", "https://pypi.org/simple/numpy/", "allow"),
        ("GET", "https://pypi.org/pypi/numpy/json", "allow"),
        ("GET", "https://numpy.org/doc/stable/", "allow"),
        ("GET", "https://modelcontextprotocol.io/specification", "allow"),
        ("GET", "https://gist.github.com/x/y", "deny"),
        ("GET", "https://pastebin.com/raw/x", "deny"),
        ("GET", "https://anything.readthedocs.io/", "deny"),
        ("GET", "https://evil.numpy.org/", "deny"),
        ("GET", "https://pypi.org/", "deny"),
        ("POST", "https://pypi.org/simple/", "deny"),
        ("GET", "http://docs.python.org/", "deny"),
        ("GET", "https://docs.python.org:8443/", "deny"),
    ],
)
def test_the_default_list_is_for_reading_documentation(method: str, url: str, effect: str) -> None:
    """Named documentation and indexes over https; no pages that anyone can put up, no other way in."""
    assert decide_url(method, url, PROFILES["fetch_url"].network.allow).effect == effect


def test_no_shipped_rule_is_a_wildcard_a_tunnel_or_more_than_reading() -> None:
    """Each line of the list can be reviewed by itself."""
    for rule in PROFILES["fetch_url"].network.allow:
        assert not rule.host.startswith("*")
        assert rule.methods == {"GET", "HEAD"}
        assert rule.schemes == {"https"}
        assert rule.ports == {443}


def test_a_profile_becomes_a_spec_with_nothing_of_its_own() -> None:
    """Every limit arrives under its own name."""
    given = profile(
        "approval = 'none'\n[files]\nworkspace = 'read'\noutput = true\n"
        "[limits]\nwall_seconds = 2.5\ncpu_seconds = 3\nmemory = '128 MiB'\npids = 9\nscratch = '2 MiB'\n"
        "output = { bytes = '3 MiB', files = 4 }\nstream = 5000\n[python]\nstart = 'warm'\npreload = ['numpy']\n"
    )
    spec = to_spec(given, workspace=HERE)
    limits = spec.limits
    assert (limits.wall_seconds, limits.cpu_seconds, limits.pids, limits.stream_bytes) == (2.5, 3, 9, 5000)
    assert (limits.memory_bytes, limits.scratch_bytes) == (128 * MIB, 2 * MIB)
    assert (limits.output_bytes, limits.output_files) == (3 * MIB, 4)
    assert spec.mounts == (Mount(source="/srv/workspace", target=WORKSPACE),)
    assert (spec.network, spec.output, spec.preload, spec.require_cgroup) == ("none", True, ("numpy",), True)


def test_without_a_workspace_nothing_is_mounted() -> None:
    """The profile may read it; there is none."""
    assert to_spec(PROFILES["run_python"], workspace=None).mounts == ()


@pytest.mark.parametrize("path", ["workspace", "/srv/../etc"])
def test_a_workspace_that_could_mean_another_place_is_refused(path: str) -> None:
    """Only a plain absolute path is mounted."""
    with pytest.raises(ValueError, match="absolute path"):
        to_spec(PROFILES["run_python"], workspace=Path(path))


def test_enforcement_per_process_is_accepted_only_when_the_profile_says_so() -> None:
    """The default demands a cgroup."""
    assert to_spec(profile(), workspace=None).require_cgroup
    assert not to_spec(profile("[limits]\nenforce = 'any'\n"), workspace=None).require_cgroup


@pytest.mark.parametrize("tool", PROFILES)
def test_the_effective_profile_as_toml_loads_to_the_same_digest(tool: str) -> None:
    """What `show` prints is the profile, not a picture of it."""
    again = parse(to_toml(PROFILES[tool]).encode(), Path(f"{tool}.toml"))
    assert digest(again) == PROFILES.digests[tool]


def test_every_question_of_a_reviewer_has_an_answer() -> None:
    """Read, write, reach, spend, asked, runs, recorded, never: each has at least one sentence."""
    titles = [section.title for section in explain(PROFILES["run_python"])]
    assert [title.removeprefix("What it may ").split()[0] for title in titles[1:5]] == [
        "read",
        "write",
        "reach",
        "spend",
    ]
    assert titles[-1] == "What it can never do"
    for given in (*PROFILES.values(), profile()):
        assert all(section.sentences for section in explain(given))


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ("", "Nothing. The sandbox has no network."),
        ("", "Nothing of the workspace: it is not there."),
        ("", "It gives no files back."),
        ("", "A person is asked before every call; without an answer nothing runs."),
        ("approval = 'none'", "Nobody is asked: calls that this profile allows run at once, all others are refused."),
        ("[files]\nworkspace='read'", "Every file in the workspace that the operator serves, at /workspace."),
        ("[files]\noutput=true", "/output, from which at most 1 files and 1 MiB come back."),
        (
            "[network]\nmode='egress'\nallow=[{host='a.org', paths=['/x/*'], methods=['GET']}]",
            "https://a.org (GET; only /x/*)",
        ),
        (
            "[network]\nmode='egress'\nallow=[{host='a.org', methods=['CONNECT']}]",
            "Inside a tunnel (CONNECT) the broker sees neither method nor path nor answer.",
        ),
        (
            "[network]\nmode='egress'\nallow=[{host='a.org'}]\ntls='inspect'",
            "The TLS of its programs ends inside the sandbox, so that each request is decided like any.",
        ),
        ("[audit]\nkeep=['arguments']", "In full: arguments. The rest by digest and size."),
        ("[limits]\nenforce='any'", "Limits hold for the sandbox as a whole where the host can"),
    ],
)
def test_an_explanation_says_it_in_words(extra: str, sentence: str) -> None:
    """The sentence follows the key."""
    assert sentence in render(explain(profile(extra + "\n")))


@pytest.mark.parametrize("approval", ["ask", "none"])
def test_a_tool_that_changes_files_is_not_said_to_change_none(approval: str) -> None:
    """What it changes, and that somebody is asked each time whatever its profile says, in words and in receipts."""
    given = profile(f"approval = '{approval}'\n").model_copy(update={"tool": "propose_changes"})
    text = render(explain(given))
    assert "Change a file of the workspace or of the host." not in text
    assert "Change a file of the host otherwise than a person was shown, and said yes to." in text
    assert "A person is asked before every call" in text
    assert "Nobody is asked" not in text
    assert "Files: everything of the host, the workspace included." not in withheld(given)
    assert "Files: everything of the host but the change that a person was shown, and said yes to." in withheld(given)
    assert "Change a file of the workspace or of the host." in render(explain(profile()))


def test_every_key_has_a_label() -> None:
    """So neither diff nor explain falls back to a key's name."""
    given = profile()
    for each in KEYS:
        assert each.label[0].isupper(), each.key
        assert each.words(each.of(given)), each.key


def test_the_committed_schema_is_the_generated_one() -> None:
    """Run `python -m glovebox_profiles.schema` after a change of the model."""
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()


def test_every_key_is_in_the_documentation_with_its_default() -> None:
    """docs/use/profile-keys.csv has one row for each key and no other, with its default and its meaning."""
    with (Path(__file__).parents[2] / "docs/use/profile-keys.csv").open(newline="", encoding="utf-8") as table:
        rows = {row["key"]: row for row in csv.DictReader(table, strict=True)}
    tables = {"files", "network", "limits", "python", "audit", "result", "example", "limits.output", "limits.workspace"}
    keys = {".".join(key) for key in valid_keys()} - tables
    assert keys == set(rows)
    for key in keys:
        default = _default(key)
        assert default is None or default == rows[key]["default"], key
        assert rows[key]["meaning"].endswith("."), key


def _default(key: str) -> str | None:
    shown = dict(line.split(" = ", 1) for line in to_toml(profile()).splitlines())
    required = {"tool", "description", "risk", "isolation"}
    if key in required or key not in shown:
        return None
    size = {"65536": '"64 KiB"', "67108864": '"64 MiB"', "1048576": '"1 MiB"', "4096": '"4 KiB"', "1.0": "1"}
    return size.get(shown[key], shown[key])


def test_profiles_are_read_only_data() -> None:
    """A profile that was decided about cannot be changed by the code that carries it out."""
    given: Profile = PROFILES["run_python"]
    with pytest.raises(ValueError, match="frozen"):
        given.approval = "ask"  # type: ignore[misc]
