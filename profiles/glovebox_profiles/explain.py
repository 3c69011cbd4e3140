"""A profile in plain words, for a reviewer who does not read TOML: sections of sentences, and their text. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from glovebox_profiles import words
from glovebox_profiles.compile import CHANGES
from glovebox_profiles.model import CallLimits, Credential, Network, Profile
from glovebox_sandboxes.plural import counted


@dataclass(frozen=True, slots=True)
class Section:
    """A reviewer's question with its answer."""

    title: str
    sentences: tuple[str, ...]


def explain(profile: Profile) -> tuple[Section, ...]:
    """Return what the tool may read, write, reach and spend, which approvals it needs, and what it can never do."""
    purpose = (profile.description, f"Its author calls the risk {profile.risk}; that word grants and forbids nothing.")
    return (
        Section("What it is for", purpose),
        Section("What it may read", _read(profile)),
        Section("What it may write", _write(profile)),
        Section("What it may reach", _reach(profile.network)),
        Section("What it may spend on one call", _spend(profile.limits)),
        Section("What is asked of whom", _asked(profile)),
        Section("Where it runs", _runs(profile)),
        Section("What is recorded", _recorded(profile)),
        Section("What it can never do", _never(profile)),
    )


def render(sections: Iterable[Section]) -> str:
    """Return an explanation as text: titles, and one sentence a line below each."""
    return "\n\n".join("\n".join((each.title, *(f"  - {line}" for line in each.sentences))) for each in sections)


def _read(profile: Profile) -> tuple[str, ...]:
    files = profile.files
    workspace = (
        "Every file in the workspace that the operator serves, at /workspace.",
        "Not what is named as secrets are: neither for a caller nor for a program.",
        *(f"Shown all the same: {words.revealed(each)}." for each in files.reveal),
    )
    return (
        *(("Nothing of the workspace: it is not there.",) if files.workspace == "none" else workspace),
        "Files that earlier calls of the same caller gave back, if the caller names them, at /input."
        if files.inputs
        else "No files of earlier calls.",
        "The interpreter and its libraries, which hold nothing of the host's data.",
    )


def _write(profile: Profile) -> tuple[str, ...]:
    limits = profile.limits
    kept: tuple[str, ...] = (f"A private /tmp of {words.size(limits.scratch)}, gone after the call.",)
    if profile.files.workspace == "overlay":
        copied = f"{limits.workspace.files} files and {words.size(limits.workspace.bytes)}"
        kept += (
            f"A copy of the workspace, if that is at most {copied}; gone after the call.",
            f"What it changed there comes back as one patch of at most {words.size(limits.output.bytes)}.",
        )
    if not profile.files.output:
        return (*kept, "It gives no other files back." if len(kept) > 1 else "It gives no files back.")
    return (
        *kept,
        f"/output, from which at most {limits.output.files} files and {words.size(limits.output.bytes)} come back.",
        "Each file given back is checked, named by its content and kept apart from the workspace.",
        *(
            ("It is scanned for what acts when opened, in a sandbox of its own; the result tells what was found.",)
            if profile.files.scan
            else ()
        ),
    )


def _reach(network: Network) -> tuple[str, ...]:
    if network.mode == "none":
        return ("Nothing. The sandbox has no network.",)
    most = counted(network.max_connections, "connection")
    return (
        "Only the following, each connection decided and recorded by the broker:",
        *(words.rule(each) for each in network.allow),
        *_tls(network),
        f"At most {most}, and {words.size(network.max_bytes)} of each response.",
        f"At most {counted(network.max_redirects, 'redirect')}, each decided again.",
        "What it asks for is a message to the host that answers: a listed host can learn what the call knows.",
        *(sentence for each in network.credential for sentence in _lent(each)),
    )


def _tls(network: Network) -> tuple[str, ...]:
    blind = any("CONNECT" in rule.methods for rule in network.allow)
    unread = ("Inside a tunnel (CONNECT) the broker sees neither method nor path nor answer.",) if blind else ()
    if network.tls == "tunnel":
        return unread
    other = "All other TLS" if blind else "The TLS"
    return (*unread, f"{other} of its programs ends inside the sandbox, so that each request is decided like any.")


def _lent(each: Credential) -> tuple[str, ...]:
    place = f"header {each.header}" if each.header else f"query parameter {each.query}"
    return (
        f"With the key {each.name}: {words.rule(each.rule())}, which is whatever that key may do there.",
        f"That key comes from {each.source}. The broker adds it, as {place}, over TLS and to {each.host} alone.",
        *(f"Headers of such requests: {text}." for text in words.headers(each)),
        *((f"Only where a program put there what it finds in {each.env}, which is no key.",) if each.env else ()),
    )


def _spend(limits: CallLimits) -> tuple[str, ...]:
    wall, processor = counted(limits.wall_seconds, "second"), counted(limits.cpu_seconds, "second")
    busy = counted(limits.processors, "processor")
    return (
        f"{wall} of real time, {processor} of processor time.",
        f"{words.size(limits.memory)} of memory, {limits.pids} processes and threads at a time; at most {busy} busy.",
        f"{words.size(limits.stream)} of stdout and as much of stderr are kept; the rest is counted and dropped.",
        "Limits hold for the sandbox as a whole; a host that cannot do that is refused."
        if limits.enforce == "cgroup"
        else "Limits hold for the sandbox as a whole where the host can, and otherwise for each process.",
    )


def _asked(profile: Profile) -> tuple[str, ...]:
    if profile.tool == CHANGES:
        change = "An approval changes files in a folder that the policy names: exactly as that person was shown."
        return ("A person is asked before every call; without an answer nothing changes.", change)
    if profile.approval == "ask":
        return ("A person is asked before every call; without an answer nothing runs.",)
    return ("Nobody is asked: calls that this profile allows run at once, all others are refused.",)


def _runs(profile: Profile) -> tuple[str, ...]:
    first, *others = profile.isolation
    fallback = f", else by {', else by '.join(others)}" if others else ""
    alone = f"In a sandbox made for this call alone, by {first}{fallback}; otherwise it is refused."
    packages = f"Programs import what the environment {profile.python.environment} has, and install nothing."
    if profile.python.start == "cold":
        return (alone, packages, "Its interpreter is started when the call comes.")
    preload = profile.python.preload
    imported = f"{words.listed(preload)}{', for a program that may want them' if preload else ''}"
    return (
        alone,
        packages,
        "It stands ready before the call comes. With bubblewrap, those of one tool share memory layout and hash seed.",
        f"Imported before the call comes: {imported}.",
    )


_REDACTED = {
    "refuse": "An output with what only a secret looks like is given to nobody, and recorded without it.",
    "mask": "What only a secret looks like is replaced by its kind, in results and in what is kept.",
    "none": "Secrets in output are given back, and kept, as they are.",
}


def _recorded(profile: Profile) -> tuple[str, ...]:
    full = f"In full: {words.listed(profile.audit.keep)}. The rest by digest and size."
    return (
        "Every call, decided before and finished after, with its isolation as measured.",
        full if profile.audit.keep else "Arguments and output are recorded by digest and size, not by content.",
        _REDACTED[profile.result.redact],
    )


def _never(profile: Profile) -> tuple[str, ...]:
    return (
        "Change a file of the host otherwise than a person was shown, and said yes to."
        if profile.tool == CHANGES
        else "Change a file of the workspace or of the host.",
        "See the host's other files, its processes, its environment or its secrets.",
        "Reach any host, local or remote."
        if profile.network.mode == "none"
        else "Reach a host that is not listed, or any address that is not public: loopback, local networks, "
        "cloud metadata.",
        "Keep anything running or stored in the sandbox after the call.",
        "Change any of this: a caller's arguments and the workspace's files can only narrow it.",
    )
