"""The image of Dockerfile, run by a real Engine with the options that docs/operate/install.md shows."""

import json
import shlex
import socket
import subprocess  # noqa: TID251 - types the commands a person would
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus

import httpx2
import pytest
from tests.inside.place import Seen, ask_over_http, assert_reached
from tests.repo.files import ROOT
from tests.repo.pages import blocks

pytestmark = [pytest.mark.driver("docker"), pytest.mark.timeout(900)]

NAME = "glovebox-tests"
GLOVEBOX = "/opt/glovebox/bin/glovebox"
PAGE = "docs/operate/install.md"
HEALTHY_SECONDS = 60
#: Prints the number of its user, and what comes of writing below / and of a call that the filter refuses.
LOOK = """
import ctypes, errno, os
try:
    open("/opt/glovebox/new", "w")
except OSError as problem:
    written = errno.errorcode[problem.errno]
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall(250, 0, 0, 0)  # keyctl
print(os.getuid(), written, errno.errorcode.get(ctypes.get_errno(), "fine"))
"""


def docker(*arguments: str) -> str:
    """What a command of Docker's printed; it must succeed."""
    done = subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


def documented() -> list[str]:
    """The words of ``docker run``, as the page shows it."""
    shown = [block.text for block in blocks(PAGE, (ROOT / PAGE).read_text()) if "docker run" in block.text]
    (line,) = (
        line for text in shown for line in text.replace("\\\n", "").splitlines() if line.startswith("docker run")
    )
    return shlex.split(line)[2:]


@pytest.fixture(scope="module")
def image() -> str:
    """The image; `scripts/test` has built it, and what it is made of decides whether that is up to date."""
    made = subprocess.run([ROOT / "tests/tools/make_server_image"], capture_output=True, text=True, check=False)
    if made.returncode == 69:
        pytest.skip(f"no base image: {made.stderr[-300:]}")
    assert made.returncode == 0, f"{made.stdout[-3000:]}{made.stderr[-3000:]}"
    return f"{NAME}/server"


@dataclass(frozen=True, slots=True)
class Container:
    """One that runs."""

    id: str
    url: str

    def run(self, *command: str) -> str:
        """What a command in it printed."""
        return docker("exec", self.id, *command)

    def wait(self) -> None:
        """Until its own check says that it is healthy."""
        deadline = time.monotonic() + HEALTHY_SECONDS
        while (state := docker("inspect", "--format", "{{.State.Health.Status}}", self.id)) != "healthy":
            assert time.monotonic() < deadline, f"{state}: {docker('logs', self.id)}"
            time.sleep(0.5)

    def wait_for(self, token: str) -> None:
        """Until a token that was made just now is in effect."""
        deadline = time.monotonic() + HEALTHY_SECONDS
        headers = {"Authorization": f"Bearer {token}"}
        while (status := httpx2.get(f"{self.url}/health", headers=headers).status_code) != HTTPStatus.OK:
            assert time.monotonic() < deadline, status
            time.sleep(0.1)


@pytest.fixture(scope="module")
def running(image: str) -> Iterator[Container]:
    """The command of the page; only the names are the test's, the port on this machine, and how often it is checked."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    *options, last = documented()
    assert last == "glovebox"
    stands_for = {
        "glovebox": f"{NAME}-{port}", "glovebox:/var/lib/glovebox": f"{NAME}-{port}:/var/lib/glovebox",
        "127.0.0.1:8321:8321": f"127.0.0.1:{port}:8321",
        "$PWD/examples:/workspace:ro": f"{ROOT}/examples:/workspace:ro",
    }  # fmt: skip
    assert stands_for.keys() <= {*options}
    serves = json.loads(docker("inspect", "--format", "{{json .Config.Cmd}}", image))
    words = [stands_for.get(word, word) for word in options]
    name = docker("run", "--health-interval=1s", *words, image, *serves, "--allowed-host", f"127.0.0.1:{port}")
    try:
        yield Container(name, f"http://127.0.0.1:{port}")
    finally:
        docker("rm", "--force", name)
        docker("volume", "rm", f"{NAME}-{port}")


async def test_with_the_options_of_the_page_a_call_over_http_is_whole(running: Container) -> None:
    """Healthy by its own check; a real client's call is measured; limits hold per process; nothing is left of it."""
    running.wait()
    seen = Seen(doctor=json.loads(running.run(GLOVEBOX, "doctor", "--json")))
    token = json.loads(running.run(GLOVEBOX, "token", "create", "default", "--json"))["token"]
    running.wait_for(token)
    await ask_over_http(seen, running.url, token)
    assert_reached(seen, "rlimit")
    assert {"container", "system-call filter"} <= set(seen.doctor["host"]["inside"])
    states = running.run("sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null").splitlines()
    assert [line for line in states if line.rpartition(")")[2].split()[0] == "Z"] == []


def test_what_the_options_leave_to_the_server_itself(running: Container) -> None:
    """No root, nothing to write but its state, and no key ring."""
    assert running.run("/opt/glovebox/bin/python", "-I", "-c", LOOK) == "8321 EROFS EPERM"


def test_control_without_them_the_call_is_refused_and_says_which_are_missing(image: str) -> None:
    """As the server in it says to every client; and without the filter of the page there is a key ring."""
    call = ["call", "run_python", "--args", '{"code": "6 * 7"}']
    plain = subprocess.run(["docker", "run", "--rm", image, *call], capture_output=True, text=True, check=False)
    assert plain.returncode == 4, plain.stderr
    assert "--security-opt seccomp=unconfined --security-opt systempaths=unconfined" in " ".join(plain.stderr.split())
    open_ = ["--security-opt", "seccomp=unconfined", "--entrypoint", "/opt/glovebox/bin/python"]
    assert not docker("run", "--rm", "--read-only", *open_, image, "-I", "-c", LOOK).endswith("EPERM")
