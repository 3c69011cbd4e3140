"""What the bubblewrap driver runs: exactly this."""

import json
from pathlib import Path

from tests.fixtures.specs import SPEC
from tests.unit.test_gvisor_plan import RUNTIME

from glovebox_sandboxes.contract.base import DEFAULT, Plan, SandboxSpec
from glovebox_sandboxes.drivers.bubblewrap.driver import Bubblewrap
from glovebox_sandboxes.host import identity
from glovebox_sandboxes.host.cgroup import Hierarchy
from glovebox_sandboxes.runtime import guest_tree

GOLDEN = Path(__file__).parent / "golden" / "bubblewrap_plan.json"


def plan(spec: SandboxSpec = SPEC) -> Plan:
    """The plan of an imagined host's driver; nothing of it is started."""
    hierarchy = Hierarchy(version=1, parents=(Path("/groups"),))
    return Bubblewrap(("/usr/bin/bwrap",), "0.8.0", {DEFAULT: RUNTIME}, hierarchy).plan(spec)


def test_the_plan_is_exactly_the_golden_one() -> None:
    found = json.loads(json.dumps(plan().action))
    # Of the policy's content, which changes with it.
    found.pop("seccomp")
    zygote = found.pop("zygote")
    argv = found["argv"]
    wall, inside = argv.index("--") + 1, argv[argv.index("--") + 1 :]
    found["argv"] = argv[:wall]
    assert found == json.loads(GOLDEN.read_text())
    # Shared with the other drivers, and so not repeated in this one's golden file.
    assert inside[:-1] == list(guest_tree.command("/usr/bin/python3", SPEC, hidden=(), elsewhere={})[:-1])
    # What forks sandboxes has less to write to, and nobody's data.
    assert {"/output", "/input"} & set(zygote[: zygote.index("--")]) == set()
    assert ("--info-fd" in zygote) == identity.has_users()
    assert "--disable-userns" not in zygote
