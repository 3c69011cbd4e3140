"""The plan in Podman's words: all of it, or a refusal; and the file with the filter."""

import copy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.unit.test_docker_plan import HOST, SECCOMP, SPEC

from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.drivers.docker import driver, podman
from glovebox_sandboxes.drivers.docker.plan import filter_text, make

FILTER = "/somewhere/filter.json"
FILTERS = {filter_text(SECCOMP): FILTER}


def body() -> dict[str, Any]:
    """A plan's body, free to be changed."""
    return copy.deepcopy(dict(make(SPEC, HOST, SECCOMP).action))


def test_every_guard_of_the_plan_is_asked_for() -> None:
    """Nothing is left to Podman's defaults, which differ from the Engine's and from version to version."""
    found = podman.specification("name", body(), FILTERS)
    wanted = {
        "image": HOST.image.removeprefix("sha256:"), "user": "65532:65532", "privileged": False, "cap_drop": ["ALL"],
        "cap_add": [], "no_new_privileges": True, "seccomp_profile_path": FILTER, "read_only_filesystem": True,
        "netns": {"nsmode": "none"}, "cgroupns": {"nsmode": "private"}, "ipcns": {"nsmode": "private"},
        "pidns": {"nsmode": "private"}, "utsns": {"nsmode": "private"}, "systemd": "false", "unsetenvall": True,
        "use_image_hosts": True, "manage_password": False, "image_volume_mode": "ignore", "remove": True,
        "log_configuration": {"driver": "none"}, "oci_runtime": "runc", "stop_signal": 9,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert found["resource_limits"]["memory"] == {"limit": 512 * 2**20, "swap": 512 * 2**20}
    assert found["resource_limits"]["pids"] == {"limit": 64}
    assert found["resource_limits"]["cpu"] == {"period": 100_000, "quota": 100_000}
    mounts = {each["destination"]: each["options"] for each in found["mounts"]}
    assert {"bind", "ro", "rprivate", "nosuid", "nodev"} == set(mounts["/workspace"])
    for place in ("/tmp", "/input", "/output"):  # noqa: S108 - inside the sandbox
        assert {"nosuid", "nodev", "noexec", "notmpcopyup"} <= set(mounts[place])
        assert any(option.startswith("size=") for option in mounts[place])


@pytest.mark.parametrize(
    ("field", "value"),
    [("Binds", ["/:/host"]), ("UsernsMode", "host"), ("Devices", [{}]), ("SecurityOpt", ["label=x"]), ("New", 1)],
)
def test_what_has_no_word_is_refused(field: str, value: object) -> None:
    """A field this translation does not know, or a value Podman would not take, is never left out in silence."""
    changed = body()
    changed["HostConfig"][field] = value
    with pytest.raises(UnsupportedSpecError, match="Podman has no counterpart"):
        podman.specification("name", changed, FILTERS)


def test_another_filter_than_the_file_has_is_refused() -> None:
    """Its text would be lost."""
    with pytest.raises(UnsupportedSpecError, match="SecurityOpt seccomp: Podman has no counterpart"):
        podman.specification("name", body(), {"{}": FILTER})


def test_the_filter_is_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a new directory, writable by nobody else, and readable by all."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = podman.write_filter("{}"), podman.write_filter("{}")
    assert first.parent != second.parent
    assert first.read_text() == "{}"
    assert (first.parent.stat().st_mode & 0o777, first.stat().st_mode & 0o777) == (0o755, 0o644)


async def test_without_room_for_the_filter_the_driver_is_unusable_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe never fails: the doctor tells it, and a call goes to the next driver."""
    monkeypatch.setattr(driver, "Engine", lambda _: Mock(podman=True))
    monkeypatch.setattr("glovebox_sandboxes.drivers.docker.probe.probe", lambda *_: (None, None))
    monkeypatch.setattr(podman, "write_filter", Mock(side_effect=OSError(28, "No space left on device")))
    async with driver.DockerDriver.connect() as found:
        assert "No space left on device" in found.capabilities.missing[0].what
