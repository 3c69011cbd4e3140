"""The narrowest profile for what recorded calls used: what it says, what it leaves, and that it lets them through."""

import hashlib
import json
import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from tests.fixtures.audit_logs import decided, finished

from glovebox_audit import chain
from glovebox_audit.chain import draft
from glovebox_audit.event import Event
from glovebox_audit.events import ArtifactCollected, CallDecided, EgressDecided
from glovebox_audit.file import LogFile
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.model import MIB
from glovebox_profiles.order import within
from glovebox_server.calls import Principal, ToolCall
from glovebox_server.cli.main import main
from glovebox_server.core.call import decide
from glovebox_server.exits import FAILED, OK, UNAVAILABLE, USAGE
from glovebox_server.proof import sealed
from glovebox_server.proof.sealed import Sealer
from glovebox_server.tools import TOOLS

PROFILES = load([SHIPPED], check_example=None)
OUTPUT = ("files.output", "limits.output.bytes", "limits.output.files")
CODE: dict[str, Any] = {"code": "1", "inputs": [], "timeout_seconds": None}
PAGE: dict[str, Any] = {"url": "https://pypi.org/simple/numpy/", "method": "GET", "max_chars": 20_000}


def recorded(place: Path, *events: Event) -> list[str]:
    """Record these, and return the options that find them."""
    (place / "state").mkdir(mode=0o700, exist_ok=True)
    log = LogFile(place / "state" / "audit", "s_1")
    for each in events:
        log.commit([draft(each)])
    log.close()
    return ["--state-dir", str(place / "state"), "--profiles-dir", str(place / "none")]


def suggested(place: Path, tool: str, *events: Event, more: tuple[str, ...] = ()) -> tuple[int, Any]:
    """What is suggested for a tool, after these records."""
    (place / "none").mkdir(exist_ok=True)
    words = ["profiles", "suggest", tool, "--json", *more, *recorded(place, *events)]
    found = CliRunner().invoke(main, words)
    assert found.stdout, found.output
    return found.exit_code, json.loads(found.stdout)


def ran(
    number: int, *, memory: int = 40 * MIB, wall: float = 2000.0, ended: Any = "exited", **more: Any
) -> list[Event]:
    """One call of ``run_python``, as a host with control groups counts it."""
    usage = {
        "wall_ms": wall,
        "cpu_ms": 1500.0,
        "memory_peak_bytes": memory,
        "cpu_from": "group",
        "memory_from": "group",
    }
    end = replace(finished(f"c_{number}"), tool="run_python", usage=usage | more, ended=ended)
    return [replace(decided(f"c_{number}"), arguments=CODE), end]


def reached(call: str, host: str, asked: str, method: str = "GET", tool: str = "fetch_url") -> EgressDecided:
    """One connection that was made."""
    digest = "sha256:" + hashlib.sha256(asked.encode()).hexdigest()
    return EgressDecided(
        call_id=call, tool=tool, scheme="https", host=host, port=443, method=method, asked_digest=digest,
        effect="allow", rule="network.allow[0]",
    )  # fmt: skip


def test_the_end_of_a_call_that_began_before_stands_for_no_other(tmp_path: Path) -> None:
    """Of a call whose end is on no record nothing is known; the control is its end."""
    (_, earlier), (begun, end) = ran(1), ran(2)
    _, found = suggested(tmp_path, "run_python", earlier, begun)
    assert found["unknown"]["limits.memory"] == 1
    _, found = suggested(tmp_path, "run_python", end)
    assert "limits.memory" not in found["unknown"]


def test_limits_and_files_come_down_to_what_was_used(tmp_path: Path) -> None:
    """With a margin; what gave nothing back may give nothing; the suggestion lets the same calls through."""
    code, found = suggested(tmp_path, "run_python", *ran(1), *ran(2, memory=100 * MIB, wall=4000.0))
    profile = found["profile"]
    assert (code, found["calls"], found["refused"]) == (OK, 2, 0)
    # A little gets some seconds and MiB of head room, much gets half as much again.
    assert profile["limits"]["memory"] == 164 * MIB
    assert (profile["limits"]["wall_seconds"], profile["limits"]["cpu_seconds"]) == (9, 7)
    _, more = suggested(tmp_path, "run_python", *ran(3, memory=400 * MIB, wall=16_000.0))
    assert (more["profile"]["limits"]["memory"], more["profile"]["limits"]["wall_seconds"]) == (600 * MIB, 24)
    assert (profile["files"]["output"], profile["files"]["inputs"]) == (True, False)
    assert profile["files"]["workspace"] == "read"
    assert found["unknown"] == dict.fromkeys((*OUTPUT, "files.workspace"), 2)
    assert {each["direction"] for each in found["changes"]} == {"narrowing"}
    assert found["based_on"]["limits.memory"] == "at most 100 MiB in 2 calls"


def test_what_is_used_stays_and_what_came_to_its_end_is_not_narrowed(tmp_path: Path) -> None:
    """A file and an artifact (the control above has neither); one that ran out of memory, one that asked for time."""
    asked = replace(decided("c_3"), arguments={**CODE, "timeout_seconds": 20.0}, inputs=())
    file = ArtifactCollected(
        call_id="c_3", tool="run_python", name="a", uri="artifact://a", sha256="0" * 64, bytes=3 * MIB,
        media_type="text/plain",
    )  # fmt: skip
    events = [*ran(1, ended="out_of_memory"), asked, file, *ran(3)[1:]]
    _, found = suggested(tmp_path, "run_python", *events)
    limits = found["profile"]["limits"]
    assert (limits["memory"], limits["wall_seconds"]) == (1024 * MIB, 20)
    assert (found["profile"]["files"]["output"], limits["output"]) == (
        True,
        PROFILES["run_python"].limits.output.model_dump(),
    )


def test_what_nobody_knows_stays_and_is_counted(tmp_path: Path) -> None:
    """Arguments that were not kept may have asked for more time; what the guest counted is not what the limit is of."""
    one, end = ran(1)
    assert isinstance(one, CallDecided)
    events = [replace(one, arguments=None), end, *ran(2, memory_from="guest"), decided("c_3")]
    denied = replace(decided("c_4"), effect="deny", rule="files.inputs")
    _, found = suggested(tmp_path, "run_python", *events, denied)
    assert found["unknown"] == {
        "limits.wall_seconds": 2, "limits.cpu_seconds": 1, "limits.memory": 2, "files.workspace": 3,
        **dict.fromkeys(OUTPUT, 3),
    }  # fmt: skip
    limits, shipped = found["profile"]["limits"], PROFILES["run_python"].limits
    assert (limits["wall_seconds"], limits["memory"]) == (shipped.wall_seconds, shipped.memory)
    assert (found["calls"], found["refused"]) == (3, 1)


def test_hosts_come_down_to_those_that_were_reached(tmp_path: Path) -> None:
    """The path where the call's own URL says it; of a redirect, the paths of the rule that let it through."""
    call = replace(decided("c_1"), tool="fetch_url", arguments=PAGE)
    events = [call, reached("c_1", "pypi.org", PAGE["url"]), replace(finished("c_1"), tool="fetch_url")]
    _, found = suggested(tmp_path, "fetch_url", *events)
    network = found["profile"]["network"]
    assert network["allow"] == [
        {"host": "pypi.org", "schemes": ["https"], "ports": [443], "methods": ["GET"], "paths": ["/simple/numpy/"]}
    ]
    assert (network["max_connections"], found["based_on"]["network.allow"]) == (3, "1 call reached: pypi.org 1 time")
    end = replace(finished("c_2"), tool="fetch_url")
    second = [replace(call, call_id="c_2"), reached("c_2", "pypi.org", "https://pypi.org/project/numpy/"), end]
    _, found = suggested(tmp_path, "fetch_url", *second)
    assert [each["paths"] for each in found["profile"]["network"]["allow"]] == [["/project/*", "/pypi/*", "/simple/*"]]
    assert found["unknown"]["network.allow (paths)"] == 1


def test_methods_of_the_same_paths_are_one_rule(tmp_path: Path) -> None:
    """As the rule in effect has them; the control is a further path of one method, which gives two rules."""
    events: list[Event] = []
    for number, (path, method) in enumerate((("numpy", "GET"), ("numpy", "HEAD"), ("flask", "GET"))):
        page = {**PAGE, "url": f"https://pypi.org/simple/{path}/", "method": method}
        call = replace(decided(f"c_{number}"), tool="fetch_url", arguments=page)
        end = replace(finished(f"c_{number}"), tool="fetch_url")
        events += [call, reached(f"c_{number}", "pypi.org", page["url"], method), end]
    for some, expected in ((events[:6], [["GET", "HEAD"]]), (events[6:], [["GET"], ["HEAD"]])):
        _, found = suggested(tmp_path, "fetch_url", *some)
        assert [each["methods"] for each in found["profile"]["network"]["allow"]] == expected


def test_refused_connections_count_and_a_call_without_an_end_narrows_no_network(tmp_path: Path) -> None:
    """Some refusals come after a connection was counted; a call that goes on may reach more. Its end is the control."""
    call = replace(decided("c_1"), tool="fetch_url", arguments=PAGE)
    one = reached("c_1", "pypi.org", PAGE["url"])
    _, found = suggested(tmp_path, "fetch_url", call, one, replace(one, effect="deny", rule="egress.address"))
    assert found["unknown"]["network"] == 1
    assert not [each for each in found["changes"] if each["key"].startswith("network.")]
    _, found = suggested(tmp_path, "fetch_url", replace(finished("c_1"), tool="fetch_url"))
    assert "network" not in found["unknown"]
    assert found["based_on"]["network.max_connections"] == "at most 2 in one of 1 call"
    assert found["profile"]["network"]["max_connections"] == 4


@pytest.mark.parametrize("tool", ["run_python", "fetch_url"])
def test_what_is_suggested_loads_and_lets_the_same_calls_through(tmp_path: Path, tool: str) -> None:
    """`check` takes the file, whatever the umask; it is not replaced, nor written where no profile has its name."""
    # It says on how many calls each limit rests. It is within what is in effect; a call beside it is refused.
    if tool == "run_python":
        events, fits, beside = ran(1), CODE, {**CODE, "timeout_seconds": 29.0}
    else:
        call = replace(decided("c_1"), tool=tool, arguments=PAGE)
        events, fits = [call, reached("c_1", "pypi.org", PAGE["url"]), replace(finished("c_1"), tool=tool)], PAGE
        beside = {**PAGE, "url": "https://pypi.org/simple/pandas/"}
    place = tmp_path / "suggested"
    place.mkdir(mode=0o700)
    file = place / f"{tool}.toml"
    (tmp_path / "none").mkdir()
    before = os.umask(0)
    try:
        code, found = suggested(tmp_path, tool, *events, more=("-o", str(place)))
    finally:
        os.umask(before)
    assert code == OK
    assert CliRunner().invoke(main, ["profiles", "check", str(file)]).exit_code == OK
    comments = dict(line.split(" # ") for line in file.read_text().splitlines()[1:] if " # " in line)
    assert {key.partition(" = ")[0]: why for key, why in comments.items()} == found["based_on"]
    assert all(re.search(r"\b1 call", why) for why in found["based_on"].values())
    wrong = CliRunner().invoke(main, ["profiles", "suggest", tool, "-o", str(place / "x.toml"), *recorded(tmp_path)])
    assert (wrong.exit_code, f"Name the file {tool}.toml" in wrong.stderr) == (USAGE, True)
    assert list(place.iterdir()) == [file]
    profile = load([SHIPPED, place], check_example=None)[tool]
    assert within(profile, PROFILES[tool])
    assert decide(TOOLS[tool], beside, PROFILES[tool]).effect == "allow"
    assert [decide(TOOLS[tool], each, profile).effect for each in (fits, beside)] == ["allow", "deny"]
    again = CliRunner().invoke(main, ["profiles", "suggest", tool, "-o", str(file), *recorded(tmp_path)])
    assert (again.exit_code, "Name another file" in again.stderr) == (USAGE, True)


def test_without_calls_nothing_is_suggested(tmp_path: Path) -> None:
    """None was allowed in that time; a tool that does not exist is named."""
    (tmp_path / "none").mkdir()
    options = recorded(tmp_path, *ran(1))
    told = CliRunner().invoke(main, ["profiles", "suggest", "run_python", "--since", "2100-01-01", *options])
    assert (told.exit_code, "nothing can be suggested" in told.stdout) == (FAILED, True)
    wrong = CliRunner().invoke(main, ["profiles", "suggest", "run_pyhton", *options])
    assert (wrong.exit_code, 'The nearest is "run_python".' in wrong.stderr) == (USAGE, True)
    shown = CliRunner().invoke(main, ["profiles", "suggest", "run_python", *options])
    assert "at most 40 MiB in 1 call" in shown.stdout


def keys(place: Path, name: str) -> tuple[Path, Path]:
    """A private key in a file, and its public one."""
    key = X25519PrivateKey.generate()
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private, public = place / f"{name}.pem", place / f"{name}.pub"
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, none))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    for each in (private, public):
        each.chmod(0o600)
    return private, public


def sealed_call(sealer: Sealer, number: int, arguments: dict[str, Any]) -> CallDecided:
    """A call whose arguments were kept sealed."""
    caller = Principal(id="local:0", transport="stdio", client=None)
    call = ToolCall(
        id=f"c_{number}",
        principal=caller,
        session=None,
        tool="run_python",
        arguments=arguments,
        received=datetime.now(UTC),
    )
    return replace(decided(call.id), sealed_arguments=sealer.seal(call), arguments_digest=chain.digest(arguments))


def test_sealed_arguments_are_used_by_who_has_the_key_alone(tmp_path: Path) -> None:
    """Without it, or with another, unknown; as another call's they do not open, nor what its digest is not of."""
    private, public = keys(tmp_path, "mine")
    other, _ = keys(tmp_path, "other")
    sealer = Sealer.load(public)
    call = sealed_call(sealer, 1, {**CODE, "timeout_seconds": 25.0})
    moved = replace(call, call_id="c_2")
    forged = replace(call, arguments_digest=chain.digest(CODE))
    candidate = tmp_path / "run_python.toml"
    candidate.write_text((SHIPPED / "run_python.toml").read_text().replace("wall_seconds = 30", "wall_seconds = 20"))
    candidate.chmod(0o600)
    words = ["profiles", "simulate", str(candidate), "--json", *recorded(tmp_path, call, moved, forged)[:2]]
    for key, otherwise, unknown in ((private, ["c_1"], 2), (other, [], 3), (None, [], 3)):
        told = CliRunner().invoke(main, [*words, *(() if key is None else ("--key", str(key)))])
        found = json.loads(told.stdout)
        assert [each["call_id"] for each in found["otherwise"]] == otherwise
        assert found["unknown"] == {"run_python": unknown}
    log = (tmp_path / "state" / "audit" / "audit.jsonl").read_text()
    assert "timeout_seconds" not in log


def test_keys_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """The public in place of the private and the other way round, one that others can read; arguments too long."""
    private, public = keys(tmp_path, "mine")
    options = ["profiles", "simulate", str(SHIPPED / "run_python.toml"), *recorded(tmp_path, *ran(1))[:2], "--key"]
    wrong = CliRunner().invoke(main, [*options, str(public)])
    assert (wrong.exit_code, "does not hold an X25519 private key" in wrong.stderr) == (UNAVAILABLE, True)
    assert "genpkey" not in wrong.stderr  # it would write over the key that is there
    private.chmod(0o644)
    assert "others" in CliRunner().invoke(main, [*options, str(private)]).stderr
    private.chmod(0o600)
    assert CliRunner().invoke(main, [*options, str(private)]).exit_code == OK
    with pytest.raises(Exception, match="is no X25519 public key"):
        Sealer.load(private)
    assert sealed_call(Sealer.load(public), 1, {"code": "x" * sealed.MAX_BYTES}).sealed_arguments is None


def test_a_method_is_not_suggested_for_the_path_of_another(tmp_path: Path) -> None:
    """Methods share a rule where their paths are the same, and nowhere else."""
    events: list[Event] = []
    for number, (method, path) in enumerate([("GET", "a"), ("HEAD", "b"), ("GET", "c"), ("HEAD", "c")]):
        call, url = f"c_{number}", f"https://{'pypi.org' if path != 'c' else 'docs.python.org'}/simple/{path}"
        begun = replace(decided(call), tool="fetch_url", arguments={**PAGE, "url": url, "method": method})
        host = url.split("/")[2]
        events += [begun, reached(call, host, url, method), replace(finished(call), tool="fetch_url")]
    _, found = suggested(tmp_path, "fetch_url", *events)
    rules = {(each["host"], *each["methods"]): each["paths"] for each in found["profile"]["network"]["allow"]}
    assert rules == {
        ("pypi.org", "GET"): ["/simple/a"],
        ("pypi.org", "HEAD"): ["/simple/b"],
        ("docs.python.org", "GET", "HEAD"): ["/simple/c"],
    }
