"""``glovebox doctor --prove``: the claims against the drivers of this host, as a scorecard or as JSON, and a verdict.

The claims are in ``glovebox_sandboxes.conformance``; here are words, colours and exit codes.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from textwrap import indent
from typing import Any

from rich.text import Text

from glovebox_audit.printable import printable
from glovebox_sandboxes.conformance import case as cases
from glovebox_sandboxes.conformance import host as hosts
from glovebox_sandboxes.conformance.host import Planted
from glovebox_sandboxes.conformance.prove import CaseFinding, Proof, Start, has_another_way, prepared, prove
from glovebox_sandboxes.contract.base import Capabilities, Driver, mechanisms
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.host import surroundings
from glovebox_sandboxes.plural import counted
from glovebox_server.app import VERSION
from glovebox_server.cli.options import emit, err, out
from glovebox_server.cli.terminal import pick
from glovebox_server.exits import FAILED, OK, UNAVAILABLE
from glovebox_server.settings import Settings

FORMAT = 1
"""Version of the JSON; a change that could break a reader raises it."""


async def run(settings: Settings, *, names: tuple[str, ...]) -> int:
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
    if not emit(_json(suite, proofs, unusable, began=began, holds=holds)):
        _print(suite, proofs, unusable)
    if missing:
        return UNAVAILABLE
    return OK if holds else FAILED


async def _proved(driver: Driver, suite: tuple[cases.Case, ...], host: Planted) -> list[Proof]:
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


def _json(
    suite: tuple[cases.Case, ...], proofs: list[Proof], unusable: list[Capabilities], *, began: datetime, holds: bool
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "glovebox": VERSION,
        "suite": {"digest": cases.digest(suite), "cases": len(suite)},
        "host": surroundings.facts(),
        "started": began.isoformat(timespec="seconds"),
        "holds": holds,
        "drivers": [*map(_proof_json, proofs), *({**_capabilities_json(each), "proved": False} for each in unusable)],
    }


def _capabilities_json(found: Capabilities) -> dict[str, Any]:
    return {**asdict(found), "limits": dict(found.limits), "usable": found.usable}


def _proof_json(proof: Proof) -> dict[str, Any]:
    told = pick(proof, "start", "holds", "seconds")
    found = {"findings": [asdict(each) for each in proof.findings], "notes": list(proof.notes)}
    counts = _counts(proof.findings)
    return {**_capabilities_json(proof.capabilities), "proved": True, **told, **found, "counts": counts}


_STATUSES = ("held", "failed", "gap", "closed", "skipped")


def _counts(findings: Iterable[CaseFinding]) -> Mapping[str, int]:
    found = dict.fromkeys(_STATUSES, 0)
    for each in findings:
        found[each.status] += 1
    return found


_WAYS: Mapping[Start, str] = {"cold": "started for a call", "forked": "prepared ahead, forked"}


def _print(suite: tuple[cases.ClaimCase, ...], proofs: list[Proof], unusable: list[Capabilities]) -> None:
    out.print(f"Glovebox {VERSION}, {len(suite)} cases ({cases.digest(suite)[:19]})")
    for proof in proofs:
        _print_proof(proof)
    for each in unusable:
        out.print()
        out.print(f"{each.driver}: not usable here, nothing proved", style="yellow")
        for item in each.missing:
            out.print(f"  {item.what}\n    → {item.fix}")


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
