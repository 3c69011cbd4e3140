"""``glovebox doctor``: what this host can enforce, what is missing, whether the profiles load. Changes nothing.

The checks are each driver's, and the claims that ``--prove`` tries are in ``glovebox_sandboxes.conformance``; here are
words, colours and exit codes.
"""

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, TypeVar, get_args
from urllib.parse import urlsplit

import anyio
import click
from rich.text import Text

from glovebox_audit.printable import printable
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED
from glovebox_sandboxes.conformance import case as cases
from glovebox_sandboxes.conformance import host as hosts
from glovebox_sandboxes.conformance.prove import CaseFinding, Proof, Start, Status, has_another_way, prepared, prove
from glovebox_sandboxes.contract.base import Capabilities, Driver, mechanisms
from glovebox_sandboxes.contract.errors import DiagnosedError, MisnamedError
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.host import surroundings
from glovebox_sandboxes.plural import counted
from glovebox_sandboxes.runtime import guest_tree
from glovebox_server import workspace
from glovebox_server.app import VERSION, load_profiles
from glovebox_server.calls import Principal
from glovebox_server.cli import state
from glovebox_server.cli.options import command, emit, err, out
from glovebox_server.cli.rules.token import TOKEN_FILE
from glovebox_server.cli.terminal import Shown, pick, table_of
from glovebox_server.exits import FAILED, OK, UNAVAILABLE, USAGE
from glovebox_server.secret_files import SecretFileError
from glovebox_server.settings import Settings
from glovebox_server.startup import governed, policy_file
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.keeping import require_apart, required
from glovebox_server.upkeep.readiness import Readiness, can_write, is_built
from glovebox_server.workspace import Workspace

if TYPE_CHECKING:
    from glovebox_server.mcp.catalogue import Manifest

T = TypeVar("T")
_COLOURS = {
    "fine": "green", "yes": "green", "usable": "green", "none": "yellow", "closed": "yellow",
    "wrong": "red", "no": "red", "not usable": "red",
}  # fmt: skip
_ANSWER_SECONDS, _ANSWER_BYTES = 10.0, 1 << 16
"""For a server that is asked."""
FORMAT = 1
"""Version of a proof's JSON; a change that could break a reader raises it."""
_WAYS: Mapping[Start, str] = {"cold": "started for a call", "forked": "prepared ahead, forked"}


@command("doctor", opens="settings")
@click.option("--prove", is_flag=True, help="Attack the sandboxes of this host and say what held: 0 all, 1 not all.")
@click.option("--driver", "names", multiple=True, type=click.Choice(registry.NAMES), help="Prove this one; else all.")
@click.option("--url", help="Ask this server for /ready and /health instead: http://127.0.0.1:8321.")
@click.option("--token-file", metavar="FILE", type=TOKEN_FILE, help="With a token, it says what is wrong.")
def doctor(settings: Settings, prove: bool, names: tuple[str, ...], url: str | None, token_file: str | None) -> int:
    """Show what this host can enforce, and what fixes the rest."""
    if url is not None:
        return _ask(url, token_file)
    if prove:
        return anyio.run(_prove, settings, names)
    if names:
        raise click.UsageError("--driver says what to prove; add --prove.")
    return anyio.run(_diagnose, state.locate(settings))


def _ask(url: str, token: str | None) -> int:
    """Print what a server answers; return ``UNAVAILABLE`` unless it is ready."""
    place = urlsplit(url)
    kind = HTTPSConnection if place.scheme == "https" else HTTPConnection
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    told: dict[str, dict[str, Any]] = {}
    for name in ("ready", "health"):
        try:
            with closing(kind(place.hostname or "", place.port, timeout=_ANSWER_SECONDS)) as link:
                link.request("GET", f"/{name}", headers=headers)
                answer = link.getresponse()
                told[name] = {**json.loads(answer.read(_ANSWER_BYTES))}
        except OSError as problem:
            fix = "Name the address that the server logged."
            raise DiagnosedError(f"Asking {url}/{name}", problem.strerror or str(problem), fix) from problem
        except (HTTPException, ValueError, TypeError, RecursionError) as problem:  # which may quote the token
            reason = "no Glovebox answers there, or it does not know the token"
            raise DiagnosedError(
                f"Asking {url}/{name}", reason, "Name its address, and a token of its own."
            ) from problem
    if not emit(told):
        for name, body in told.items():
            rows = ((printable(each), json.dumps(value)) for each, value in body.items() if each != "status")
            _block(name, "yes" if body.get("status") == "ok" else "no", *rows)
    return OK if told["ready"].get("status") == "ok" else UNAVAILABLE


async def _diagnose(settings: Settings) -> int:
    """Check and print.

    Returns ``USAGE`` if a profile or the workspace is invalid, because then nothing starts; else ``UNAVAILABLE`` if no
    driver is usable or the audit log cannot be written; else ``OK``.
    """
    unusable = _unusable_log(settings.state_dir)  # first, for it may fork, which no thread survives
    async with registry.opened(settings.data_dir, f"doctor{os.getpid()}") as available:
        found = [(await available.get(name)).capabilities for name in registry.NAMES]
    served, refused = _tried(lambda: workspace.find(settings, "cli"), Workspace(path=None))
    loaded, problem = _tried(lambda: _profiles(settings, served), "")
    file, objection = policy_file(settings), None
    if file is not None and not problem:
        _, objection = _tried(lambda: governed(settings, load_profiles(settings), Workspace(path=None)), None)
    ready = Readiness(
        runtime=is_built(settings.data_dir), log=not unusable, policy=objection is None, profiles=not problem
    )
    used = [each.driver for each in found if each.usable]
    advice = None
    if used and not ready.runtime:  # where none is usable, each says what it lacks
        advice = f"`glovebox setup` was not run here, so calls can only use {', '.join(used)}. Run it for the others."
    body = {
        "host": surroundings.facts(),
        "drivers": [*map(_capabilities_json, found)],
        "profiles": {"error": problem},
        "policy": {"error": objection, "path": file and str(file)},
        "ready": {"ready": ready.ready, **asdict(ready)},
        "workspace": {"error": refused, "path": served.path and str(served.path), **pick(served, "reason", "closed")},
        "advice": advice,
    }
    if not emit(body):
        _show_host(found)
        policy = [("policy", objection, str(file))] if file is not None and not problem else []
        for title, wrong, fine in (("profiles", problem, loaded), *policy):
            _block(title, "wrong" if wrong else "fine", ("problem" if wrong else "loaded", wrong or fine))
        word = "wrong" if refused else "none" if not served.path else "closed" if served.closed else "fine"
        _block("workspace", word, ("problem" if word in ("wrong", "closed") else "served", refused or str(served)))
        runtime = "" if ready.runtime else "the runtime, which `glovebox setup` builds"
        lacks = (runtime, unusable, *(f"valid {each}" for each in ("policy", "profiles") if not getattr(ready, each)))
        _block("ready", "yes" if ready.ready else "no", *(("missing", each) for each in lacks))
        if advice:
            out.print(f"\n{advice}")
    if problem or objection or refused:
        return USAGE
    return OK if ready.log and used else UNAVAILABLE


def _tried(find: Callable[[], T], instead: T) -> tuple[T, str | None]:
    """Return what is found, and None; else ``instead``, and what is wrong."""
    try:
        return find(), None
    except (ProfileError, MisnamedError) as problem:
        return instead, str(problem)


def _profiles(settings: Settings, served: Workspace) -> str:
    """Load the profiles, and name them."""
    found = load_profiles(settings)
    required(settings, found)
    sources = [(found.source(tool), profile) for tool, profile in found.items()]
    require_apart(sources, [] if served.path is None else [served.path])
    own = [tool for tool, _ in found.items() if found.source(tool).parent != SHIPPED]
    shipped = [tool for tool, _ in found.items() if tool not in own]
    parts = [f"{', '.join(tools)} ({whose})" for tools, whose in ((shipped, "shipped"), (own, "yours")) if tools]
    return "; ".join(parts)


def _unusable_log(directory: Path) -> str:
    """Return why a server could not write its log, or make one before its first start; empty if it could."""

    def can_make() -> bool:
        place = directory.absolute() / "audit"
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        return can_write(place)

    try:
        why = "" if state.run_as_owner(directory, can_make) else f"look at {directory}"
    except SecretFileError as problem:
        why = str(problem)
    return why and f"an audit log that can be written: {why}"


def _show_host(found: Sequence[Capabilities]) -> None:
    """Print this host's facts, and the drivers' findings, which follow from them."""
    facts = surroundings.facts()
    rows = {
        "as": "root" if facts["root"] else "a normal user",
        "inside": ", ".join(facts["inside"]) or "no container or sandbox, as far as can be seen",
        "groups": f"control groups {facts['control_groups']}",
    }
    _block("here", f"{facts['system'] or 'Linux'}, kernel {facts['kernel']}", *rows.items())
    for each in found:
        told = [("level", each.level), ("version", each.version)]
        if each.usable:
            told.append(("limits by", mechanisms({name: by for name, by in each.limits.items() if by != "none"})))
        if each.driver == "bubblewrap":
            told.append(("process 1", f"of prepared sandboxes is in {_language()}"))
        for missing in each.missing:
            told += [("missing", missing.what), ("", f"→ {missing.fix}")]
        out.print()
        _block(each.driver, "usable" if each.usable else "not usable", *told)
    out.print()


def _language() -> str:
    digest, why = guest_tree.process_1()
    return f"C ({digest[:19]})" if digest else f"Python: {why}"


def _block(title: str, verdict: str, *rows: tuple[str, str]) -> None:
    out.print(Text.assemble((title, "bold"), ": ", (verdict, _COLOURS.get(verdict, "default"))))
    for label, words in rows:
        if words:
            out.print(f"  {label:<10}{words}")


@command("capabilities", opens="settings")
def capabilities(settings: Settings) -> None:
    """Show what can be used here, before any call.

    Drivers, limits, network modes, tools, digests, and what is refused.
    """
    found = anyio.run(_find, settings)
    emit(found, *_told(found))


async def _find(settings: Settings) -> "Manifest":
    catalogue = importlib.import_module("glovebox_server.mcp.catalogue")  # imports the SDK
    profiles = load_profiles(settings)
    roles = governed(settings, profiles, workspace.find(settings, "cli"))
    async with registry.opened(settings.data_dir, f"capabilities{os.getpid()}") as available:
        found: Manifest = await catalogue.build_manifest(
            tools=TOOLS,
            rights=roles.rights_of(Principal(id=f"local:{os.getuid()}", transport="cli")),
            environments=required(settings, profiles),
            drivers=available,
            version=VERSION,
        )
    return found


def _told(found: "Manifest") -> Iterator[Shown | None]:
    yield f"Glovebox {found['glovebox']}, tools {found['tools_digest']}, profiles {found['profiles_digest']}"
    if found["policy_digest"]:
        yield f"role {found['role'] or 'none'}, policy {found['policy_digest']}"
    drivers, tools = [], []
    for each in found["drivers"]:
        usable = "no" if not each["usable"] else "experimental" if each["experimental"] else "yes"
        drivers.append((each["name"], each["level"], usable, each["version"], mechanisms(each["limits"])))
    for tool in found["tools"]:
        names = (tool[name] or "none" for name in ("name", "driver", "network", "workspace"))
        tools.append((*names, tool["output"], tool["inputs"], tool["refused"]))
    yield ""
    yield table_of(["driver", "level", "usable", "version", "limits by"], drivers)
    yield ""
    titles = ["tool", "driver", "network", "workspace", "files out", "files in", "why it does not run here"]
    yield table_of(titles, tools)
    if found["workspace"]["refused"]:
        yield f"\n{found['workspace']['refused']}"
    yield Text("\nunsupported or experimental in a profile", style="bold")
    for feature in found["features"]:
        told = f'{feature["key"]} = "{feature["value"]}": {feature["status"]}'
        yield f"{told}: {feature['reason']}. {feature['instead']}"


async def _prove(settings: Settings, names: tuple[str, ...]) -> int:
    """Prove and print; see ``glovebox doctor --prove``. One exit code for a gate: 0, 1, or 4 if nothing can run.

    ``names`` must be proved; every usable driver if empty.
    """
    suite = cases.load()
    began = datetime.now(UTC)
    proofs: list[Proof] = []
    unusable: list[Capabilities] = []
    async with hosts.planted() as host, registry.opened(settings.data_dir, f"prove{os.getpid()}") as available:
        for name in names or registry.NAMES:
            driver = await available.get(name)
            if not driver.capabilities.usable:
                unusable.append(driver.capabilities)
                continue
            proofs += await _proved(driver, suite, host)
    missing = [each for each in unusable if names or not proofs]
    holds = all(proof.holds for proof in proofs) and not missing
    value = {
        "format": FORMAT,
        "glovebox": VERSION,
        "suite": {"digest": cases.digest(suite), "cases": len(suite)},
        "host": surroundings.facts(),
        "started": began.isoformat(timespec="seconds"),
        "holds": holds,
        "drivers": [*map(_proof_json, proofs), *({**_capabilities_json(each), "proved": False} for each in unusable)],
    }
    if not emit(value, f"Glovebox {VERSION}, {len(suite)} cases ({cases.digest(suite)[:19]})"):
        for proof in proofs:
            _print_proof(proof)
        for each in unusable:
            out.print(f"\n{each.driver}: not usable here, nothing proved", style="yellow")
            for item in each.missing:
                out.print(f"  {item.what}\n    → {item.fix}")
    if missing:
        return UNAVAILABLE
    return OK if holds else FAILED


async def _proved(driver: Driver, suite: tuple[cases.Case, ...], host: hosts.Planted) -> list[Proof]:
    """Prove every claim about sandboxes that are started for a call, and about prepared ones if those differ."""
    name = driver.name
    with err.status(f"proving {name}") as status:

        def tell(finding: CaseFinding) -> None:
            status.update(f"proving {name}: {finding.id}")

        found = [await prove(driver, suite, host, tell)]
        if await has_another_way(driver):
            async with prepared(driver) as forked:
                found.append(await prove(forked, suite, host, tell, "forked"))
    if not err.is_terminal:
        err.print(f"{name}: {sum(each.seconds for each in found):.0f} s")
    return found


def _capabilities_json(found: Capabilities) -> dict[str, Any]:
    return {**asdict(found), "limits": dict(found.limits), "usable": found.usable}


def _proof_json(proof: Proof) -> dict[str, Any]:
    told = {**_capabilities_json(proof.capabilities), "proved": True, **pick(proof, "start", "holds", "seconds")}
    counts = {status: proof.count(status) for status in get_args(Status)}
    return told | {"findings": [asdict(each) for each in proof.findings], "notes": list(proof.notes), "counts": counts}


def _print_proof(proof: Proof) -> None:
    found = proof.capabilities
    out.print()
    limits = f"limits by {mechanisms(found.limits)}"
    words = f"{found.driver}  {found.level}  {found.version}  {limits}  {_WAYS[proof.start]}"
    out.print(words, style="bold")
    for title, status, style in (
        ("failed", "failed", "red"), ("known gap that holds now: delete the entry", "closed", "red"),
        ("known gap", "gap", "yellow"), ("not run", "skipped", "dim"),
    ):  # fmt: skip
        told = ""
        for each in (each for each in proof.findings if each.status == status):
            out.print(Text.assemble((f"{title}: ", style), (each.id, "bold"), f"  {each.claim}"))
            words = "\n".join([f"because {each.reason}"] * bool(each.reason) + [*each.seen] * (status == "failed"))
            # One sandbox that did not start fails many claims for one reason.
            if words and words != told:
                out.print(indent(printable(words, "\n"), "    "))
            told = words
    for note in proof.notes:
        out.print(f"note: {note}", style="yellow")
    words = f"{proof.count('held')} of {len(proof.findings)} claims hold, {counted(proof.count('gap'), 'known gap')}"
    words += f", {proof.count('skipped')} not run, {proof.seconds:.0f} s"
    verdict = ("PROVED", "bold green") if proof.holds else ("NOT PROVED", "bold red")
    out.print(Text.assemble(verdict, f"  {found.driver}, {_WAYS[proof.start]}: {words}"))
