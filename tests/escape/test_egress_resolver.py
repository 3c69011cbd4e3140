"""The real resolver against a real DNS server, in namespaces of their own (E4, E6)."""

import json
import subprocess  # noqa: TID251 - runs our own probe inside namespaces; nothing here comes from a sandbox
import sys
from ipaddress import ip_address
from pathlib import Path

import anyio
import pytest
from tests.fixtures.internet import unavailable

from glovebox_profiles.egress.targets import Address
from glovebox_server.egress.dial import resolve
from glovebox_server.egress.events import PeerError

PROBE = Path(__file__).parents[1] / "tools" / "dns_probe.py"
ROOT = Path(__file__).parents[2]


def test_a_public_name_is_never_tried_in_the_hosts_own_domains(tmp_path: Path) -> None:
    """E4: with a search domain set, a plain look-up of a missing name goes to the internal zone; ours does not."""
    settings = tmp_path / "resolv.conf"
    settings.write_text("nameserver 127.0.0.1\nsearch corp.example\noptions ndots:5 timeout:1 attempts:1\n")
    script = 'ip link set lo up && mount --bind $1 /etc/resolv.conf || exit 77;shift; exec "$@"'
    command = ["unshare", "--mount", "--net", "sh", "-c", script, "sh", str(settings)]
    names = ["files.example.org", "files.example.net"]
    done = subprocess.run(
        [*command, sys.executable, str(PROBE), *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        unavailable(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["found"]["files.example.org"] == ["93.184.1.1"]
    assert report["found"]["files.example.net"] == "The name files.example.net could not be resolved."
    assert report["questions"] == names[::-1]
    assert report["plain"]["files.example.net"] == ["10.0.0.1"]


async def test_a_resolver_that_does_not_answer_is_given_up() -> None:
    """E16: a name server under the attacker's control cannot hold a call; one that answers is believed in time."""

    async def silent(_: str) -> tuple[Address, ...]:
        await anyio.sleep_forever()
        return ()

    async def prompt(_: str) -> tuple[Address, ...]:
        return (ip_address("93.184.1.1"),)

    with pytest.raises(PeerError, match=r"^The name a\.example\.org was not resolved in time\.$"):
        await resolve("a.example.org", silent, 0.05)
    assert await resolve("a.example.org", prompt, 0.05) == (ip_address("93.184.1.1"),)


async def test_an_address_is_not_looked_up() -> None:
    """A literal needs no resolver, so none is asked; an empty answer is a failure."""

    async def empty(_: str) -> tuple[Address, ...]:
        return ()

    assert await resolve("93.184.1.1", empty, 1) == (ip_address("93.184.1.1"),)
    with pytest.raises(PeerError, match="has no address"):
        await resolve("a.example.org", empty, 1)
