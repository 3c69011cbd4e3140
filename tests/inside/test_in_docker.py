"""Inside a Docker container: refused with the default options, and with the options that the refusal names it works."""

import io
import os
import re
import shlex
import subprocess  # noqa: TID251 - containers are started as people start them
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.inside.place import PROGRAM, SECONDS, USER, Place, assert_reached, assert_refused, look

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.driver("docker")]

ENGINE = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
DOCKER = ("/usr/bin/env", f"DOCKER_HOST={ENGINE}", "docker")
IMAGE = "glovebox-tests/inside"
CANNOT = "it cannot make namespaces: bwrap: "
#: What a program of this machine needs of it.
SYSTEM = ("/usr", "/etc/ld.so.cache")


def _tar() -> bytes:
    """A root with nothing in it but this machine's links into /usr, and places to mount things."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as root:
        for name in ("bin", "sbin", "lib", "lib64", "lib32", "libx32"):
            if Path("/", name).is_symlink():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
                root.addfile(link)
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        root.addfile(folder)
    return content.getvalue()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """An image that lends everything from this machine, so that nothing has to be built or downloaded."""
    subprocess.run([*DOCKER, "import", "-", IMAGE], input=_tar(), check=True, capture_output=True, timeout=SECONDS)
    yield IMAGE
    subprocess.run([*DOCKER, "rmi", "--force", IMAGE], check=True, capture_output=True, timeout=SECONDS)


def container(place: Place, image: str, *options: str, user: int = USER) -> tuple[str, ...]:
    """What runs the rest of a command in a container, as a user who owns the place."""
    environment = place.environment()
    shown = [f"--volume={path}:{path}:ro" for path in (*SYSTEM, *PROGRAM)]
    shown += [f"--volume={path}:{path}" for path in dict.fromkeys((place.root, place.data))]
    told = [f"--env={name}={value}" for name, value in environment.items()]
    start = (
        *DOCKER,
        "run",
        "--rm",
        "--interactive",
        "--network=none",
        f"--user={user}:{user}",
        "--workdir",
        str(Path.cwd()),
    )
    return (*start, *shown, *told, *options, image)


@pytest.fixture
def ours(place: Place) -> Place:
    """The user's place; it is the Engine that becomes the user."""
    return replace(place, become=())


async def test_the_default_options_are_refused_and_those_that_are_named_work(ours: Place, image: str) -> None:
    """The options are taken out of the very sentence that a person reads."""
    refused = await look(ours, container(ours, image))
    assert_refused(refused, CANNOT, "This container refuses user namespaces")
    assert {"container", "system-call filter"} <= set(refused.doctor["host"]["inside"])
    (options,) = re.findall("`([^`]+)`", refused.fatal[1])
    assert_reached(await look(ours, container(ours, image, *shlex.split(options))), "rlimit")


async def test_a_container_that_only_hides_proc_is_told_the_one_option_left(ours: Place, image: str) -> None:
    """Nobody is told to take down more than stands in the way."""
    seen = await look(ours, container(ours, image, "--security-opt", "seccomp=unconfined"))
    assert_refused(seen, "Can't mount proc", "This container hides parts of procfs")
    (options,) = re.findall("`([^`]+)`", seen.fatal[1])
    assert "systempaths=unconfined" in options
    assert "seccomp" not in options


async def test_a_privileged_container_needs_nothing_else(ours: Place, image: str) -> None:
    """As a normal user in it: limits hold per process."""
    assert_reached(await look(ours, container(ours, image, "--privileged")), "rlimit")


async def test_root_of_a_container_reaches_control_groups_where_they_can_be_written(
    roots_place: Place, image: str
) -> None:
    """As docs/operate/install.md says, on version 1; without that volume, per process (the control)."""
    options = ("--security-opt", "seccomp=unconfined", "--security-opt", "systempaths=unconfined")
    seen = await look(roots_place, container(roots_place, image, *options, user=0))
    assert_reached(seen, "rlimit")
    assert seen.driver["missing"][0]["fix"].startswith("Control groups are absent or read-only here")
    if seen.doctor["host"]["control_groups"] == "v1":
        writable = (*options, "--volume=/sys/fs/cgroup:/sys/fs/cgroup:rw", "--cgroupns=private")
        assert_reached(await look(roots_place, container(roots_place, image, *writable, user=0)), "cgroup v1")
