"""Compare CPython's regression tests in a sandbox with the host: ``make compat``.

Debian's own suite for the Python that sandboxes run is unpacked into ``.compat``. Each module runs once by
``run_python``, under its shipped profile with larger limits, and once on the host as a normal user with the same
interpreter. Tests that pass on the host alone are written to docs/internals/compat.csv, each with its reason from
``reasons.toml``, and the totals to compat-summary.csv. A difference without a reason is an error (exit 1).
"""

import argparse
import csv
import json
import os
import re
import shutil
import subprocess  # noqa: TID251 - runs the host's side, whose output goes to a file
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
from tests.fixtures.brokered import submitted, write_shipped
from tests.repo.files import ROOT

from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.calls import Principal
from glovebox_server.settings import Settings

PLACE = ROOT / ".compat"
KEPT = PLACE / "outcomes.json"  # what the last run found: a pair of outcomes by module
PYTHON = "python3.11"  # the suite is of one version: Debian 12's, of which the sandboxes' Python is a copy there
TABLE, SUMMARY = ROOT / "docs/internals/compat.csv", ROOT / "docs/internals/compat-summary.csv"
LIMITS = {"wall_seconds": "600", "cpu_seconds": "600", "memory": '"4 GiB"', "pids": "256", "scratch": '"2 GiB"'}
"""Instead of those shipped: a module of the suite is not a short program."""
HOST_SECONDS = 600
AT_ONCE = 3  # modules under way: most of the time they wait
NOBODY = 65534
UNLOADED = "unittest.loader._FailedTest."  # what unittest calls a module that cannot be imported
SHOWN = 40  # differences without a reason that are printed; all are in the table
Outcomes = Mapping[str, tuple[str, str]]
"""By a test's name: passed, failed, skipped or started, and the last line of its error."""


def unpack_suite(place: Path) -> Path:
    """Return the folder that holds the package ``test``; fetch and unpack Debian's package if it is not there."""
    tree = place / f"usr/lib/{PYTHON}"
    if not (tree / "test/test_json").exists():
        place.mkdir(exist_ok=True)
        fetched = subprocess.run(["apt-get", "download", f"lib{PYTHON}-testsuite"], cwd=place, check=False)
        packages = list(place.glob("*.deb"))
        if fetched.returncode != 0 or not packages:
            raise SystemExit(
                f"The test suite cannot be fetched: apt-get has no lib{PYTHON}-testsuite. Run on Debian 12."
            )
        subprocess.run(["dpkg-deb", "-x", packages[0], place], check=True)
        shutil.copytree(f"/usr/lib/{PYTHON}/test", tree / "test", dirs_exist_ok=True)
        shutil.rmtree(tree / "test/__pycache__", ignore_errors=True)
    return tree


def build_program(module: str, tree: str, place: str, results: str) -> str:
    """Return the program that runs one module."""
    head = f"MODULE, TREE, PLACE, RESULTS = {(module, tree, place, results)!r}\n"
    return head + (Path(__file__).parent / "run_module.py").read_text()


def parse_outcomes(module: str, text: str) -> Outcomes:
    """Return each test's worst outcome; a module that was cut short has the test it was in as ``started``."""
    worst = {"started": 0, "passed": 1, "skipped": 2, "failed": 3}
    outcomes: dict[str, tuple[str, str]] = {}
    whole = False
    for line in text.splitlines():
        with suppress(ValueError):  # the last line of a program that was killed
            name, outcome, why = json.loads(line)
            whole = whole or (name == module and outcome == "ended")
            if outcome != "ended" and worst[outcome] >= worst[outcomes.get(name, ("started", ""))[0]]:
                outcomes[name] = outcome, why
    if not whole:
        outcomes[module] = "failed", "the module did not come to its end"
    return outcomes


async def run_in_sandbox(app: App, module: str) -> Outcomes:
    """Run one module by ``run_python``."""
    code = build_program(module, "/workspace", "/tmp/compat", "/output/results.jsonl")  # noqa: S108 - the sandbox's
    result = await submitted(app, "run_python", {"code": code})
    for artifact in result.structured.get("artifacts", ()):
        if artifact["name"] == "results.jsonl":
            async with app.artifacts.open(artifact["uri"], Principal(id="local:test", transport="cli")) as reader:
                text = await reader.read(64 * 2**20)
            return parse_outcomes(module, text.decode())
    return {module: ("failed", "no results came out")}


def run_on_host(tree: Path, module: str) -> Outcomes:
    """Run one module with the same interpreter on the host, as a normal user in an empty home."""
    home = PLACE / "host" / module
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    program, results = home / "program.py", home / "results.jsonl"
    program.write_text(build_program(module, str(tree), str(home), str(results)))
    user = NOBODY if os.geteuid() == 0 else None
    if user:
        shutil.chown(home, user, user)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8", "TMPDIR": str(home)}
    command = [f"/usr/bin/{PYTHON}", "-X", "utf8=0", str(program)]
    with (home / "output").open("wb") as output, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=home, user=user,
            group=user, extra_groups=[] if user else None, timeout=HOST_SECONDS, check=False, start_new_session=True,
        )  # fmt: skip
    text = results.read_text() if results.exists() else ""
    return parse_outcomes(module, text)


async def compare(
    modules: Sequence[str], tree: Path, driver: str, sandbox: dict[str, Outcomes], host: dict[str, Outcomes]
) -> None:
    """Run the modules, each in the sandbox and then on the host, and keep the outcomes by module."""
    home = PLACE / "home"
    shutil.rmtree(home, ignore_errors=True)
    (home / "profiles").mkdir(parents=True)
    write_shipped(home / "profiles", driver)
    profile = home / "profiles/run_python.toml"
    text = profile.read_text().partition("\n[[example]]")[0]
    for key, value in LIMITS.items():
        text = re.sub(rf"(?m)^{key} = [^#\n]*", f"{key} = {value} ", text, count=1)
    profile.write_text(
        text.replace("[files]", '[files]\nreveal = [{ path = "test", reason = "Keys of the suite itself." }]', 1)
    )
    settings = Settings(workspace=tree, state_dir=home / "state", profiles_dir=home / "profiles")
    waiting = iter(tuple(enumerate(modules, 1)))

    async def work(app: App) -> None:
        for number, module in waiting:
            sys.stderr.write(f"\r\033[K{number}/{len(modules)} {module}")
            sys.stderr.flush()
            sandbox[module] = await run_in_sandbox(app, module)
            host[module] = await anyio.to_thread.run_sync(run_on_host, tree, module)
            KEPT.write_text(json.dumps([sandbox, host]))

    async with apps.opened(settings, "cli") as app, anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(work, app)
    sys.stderr.write("\r\033[K")


def find_differences(sandbox: Mapping[str, Outcomes], host: Mapping[str, Outcomes]) -> list[tuple[str, str, str]]:
    """Return the tests that pass on the host and not in the sandbox: name, outcome there, last line."""
    differences = []
    for module, outcomes in host.items():
        there = sandbox[module]
        unloaded = {name.removeprefix(UNLOADED): other for name, other in there.items() if name.startswith(UNLOADED)}
        cut = there.get(module, ("failed", "it is not among the module's tests in the sandbox"))
        for name, (outcome, _) in outcomes.items():
            broken = (other for part, other in unloaded.items() if name.startswith((f"{part}.", f"test.{part}.")))
            other = there.get(name) or next(broken, cut)
            if outcome == "passed" and other[0] != "passed":
                differences.append((name, *other))
    return differences


def explain(difference: tuple[str, str, str], reasons: Sequence[Mapping[str, str]]) -> str:
    """Return why a test differs, from the first reason whose patterns match it; empty if none does."""
    name, _, line = difference
    for reason in reasons:
        if re.search(reason.get("test", ""), name) and re.search(reason.get("line", ""), line):
            return reason["because"]
    return ""


def write_tables(rows: Sequence[Sequence[str]], totals: str) -> None:
    """Write the differences, and how many have which reason."""
    counts = Counter(row[3] for row in rows)
    summary = [(str(count), because or "no reason yet") for because, count in counts.most_common()]
    for path, header, lines in (
        (TABLE, ("test", "in the sandbox", "last line", "reason"), rows),
        (SUMMARY, ("tests", "why they differ"), [*summary, (str(len(rows)), totals)]),
    ):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(lines)


def main() -> int:
    """Run the comparison; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "modules", nargs="*", help="run these again, as test_json, beside what the last run kept; else all"
    )
    parser.add_argument("--driver", default="bubblewrap")
    given = parser.parse_args()
    tree = unpack_suite(PLACE)
    known = sorted({path.stem for path in (tree / "test").glob("test_*")})
    sandbox, host = json.loads(KEPT.read_text()) if given.modules and KEPT.exists() else ({}, {})
    anyio.run(compare, given.modules or known, tree, given.driver, sandbox, host)
    reasons = tomllib.loads((Path(__file__).parent / "reasons.toml").read_text())["reason"]
    rows = [(*difference, explain(difference, reasons)) for difference in find_differences(sandbox, host)]
    counted = {
        side: Counter(outcome for outcomes in by_module.values() for outcome, _ in outcomes.values())
        for side, by_module in (("sandbox", sandbox), ("host", host))
    }
    totals = "; ".join(
        f"{side}: {counts['passed']:,} passed, {counts['skipped']:,} skipped, {counts['failed']:,} failed"
        for side, counts in counted.items()
    )
    totals = f"{len(host)} modules. {totals}. {len(rows)} pass on the host alone."
    if host.keys() >= set(known):
        write_tables(sorted(rows), totals)
    sys.stdout.write(f"{totals}\n")
    unexplained = [row for row in rows if not row[3]]
    for name, outcome, line, _ in unexplained[:SHOWN]:
        sys.stdout.write(f"✗ {name} {outcome}: {line}\n")
    if unexplained:
        sys.stdout.write(f"✗ {len(unexplained)} differences have no reason in reasons.toml.\n")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
