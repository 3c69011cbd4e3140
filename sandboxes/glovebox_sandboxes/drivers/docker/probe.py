"""Probe what the Engine on this host can enforce. Blocking calls: run it in a thread.

Only asks; each sandbox measures whether it is as planned (see ``contract.measure``).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glovebox_sandboxes.contract.base import Capabilities, Missing
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers import boundary
from glovebox_sandboxes.drivers.docker import podman
from glovebox_sandboxes.drivers.docker.engine import Engine, find_image, translated
from glovebox_sandboxes.drivers.docker.image import build as images
from glovebox_sandboxes.drivers.docker.plan import DRIVER, GROUPS_FIX, LEVEL, Host, Runtime
from glovebox_sandboxes.runtime import environments

SETUP = "glovebox setup --docker"
MINIMUM_API = (1, 41)
"""Engine 20.10: the first that can give a container its own cgroup namespace."""
# Field of the Engine's "info", its limit, and the kernel's controller.
_CONTROLLERS = {"MemoryLimit": ("memory_bytes", "memory"), "PidsLimit": ("pids", "pids"), "CpuCfsQuota": ("cpu", "cpu")}
_RUNTIME_FIX: Mapping[Runtime, str] = {
    "runc": "Run `apt-get install runc`.",
    "crun": "Run `apt-get install crun`.",
    "runsc": "Add gVisor's runsc to the Engine's runtimes as docs/operate/drivers.md says, and restart it.",
}
_GROUP_FIX = "Enable it on the kernel's command line (cgroup_enable={0}) and restart the Engine."


def probe(engine: Engine, runtime: Runtime, data: Path | None = None) -> tuple[Capabilities, Host]:
    """Return what the Engine can do with a runtime. Raises SandboxError if it does not answer.

    ``data`` is the data directory, which names the built environments; without one there is the default alone.
    """
    with translated(f"Asking the Docker Engine at {engine.host} what it can do"):
        info: Mapping[str, Any] = engine.api.info()
        own = engine.podman_info() if engine.podman else None
        image = find_image(engine.api, images.tag())
        built = environments.recorded(data) if data is not None else {}
        others = {name: find_image(engine.api, images.tag(each.lock)) for name, each in built.items()}
    options = [option.removeprefix("name=").partition(",")[0] for option in info.get("SecurityOptions") or ()]
    configuration: Mapping[str, Any] = (image or {}).get("Config") or {}
    fit = {name: each for name, each in others.items() if each is not None and not each["Config"].get("Volumes")}
    every = [configuration, *(each["Config"] for each in fit.values())]
    # Podman's answer in the Engine's format describes the kernel, even if its user may use none of it.
    wanted = {controller for _, controller in _CONTROLLERS.values()}
    groups = info.get("CgroupDriver") != "none" if own is None else wanted <= set(own["cgroupControllers"])
    if own is not None and runtime == "runc" and own["ociRuntime"]["name"] == "crun":
        runtime = "crun"
    host = Host(
        image=(image or {}).get("Id", ""),
        image_environment=tuple(sorted({entry.partition("=")[0] for each in every for entry in each.get("Env") or ()})),
        environments={name: each["Id"] for name, each in fit.items()},
        elsewhere=environments.elsewhere(data) if data is not None else {},
        apparmor="apparmor" in options,
        user_namespace="userns" in options
        or "rootless" in options
        or (own is not None and own["security"]["rootless"]),
        socket=engine.socket,
        runtime=runtime,
        groups=groups,
        processors=int(info.get("NCPU") or 1),
        added=("/etc/hostname", *(() if own is None else podman.MOUNTS)),
    )
    # A volume is a writable directory of the host's, outside every limit.
    volumes, tag = ", ".join(sorted(configuration.get("Volumes") or ())), images.tag()
    missing = [
        *_gaps(info, engine.version, options, host, own),
        (image is None, f"the image {tag}", f"Run `{SETUP}`.", True),
        (volumes, f"an image without volumes ({tag} declares {volumes})",
         f"Build it again: `docker rmi {tag} && {SETUP}`", True),
    ]  # fmt: skip
    limits = boundary.mechanisms(
        f"cgroup v{info.get('CgroupVersion') or '1'}" if groups else "",
        counted=False,
        **dict.fromkeys(("wall_seconds", "output_files"), "guest and broker"),
        # The group counts the threads of gVisor's kernel too.
        **({"pids": "rlimit"} if runtime == "runsc" else {}),
    )
    return Capabilities(
        driver=DRIVER[runtime],
        level=LEVEL[runtime],
        version=_version(engine.version, runtime),
        limits=limits,
        missing=tuple(Missing(what=what, fix=fix, fatal=fatal) for lacks, what, fix, fatal in missing if lacks),
    ), host


def unavailable(problem: SandboxError, runtime: Runtime) -> Capabilities:
    """Return the capabilities of an Engine that does not answer."""
    missing = Missing(what=f"a Docker Engine that answers ({problem.reason})", fix=problem.fix, fatal=True)
    return Capabilities(driver=DRIVER[runtime], level=LEVEL[runtime], version="", limits={}, missing=(missing,))


_Gap = tuple[object, str, str, bool]
"""True if it is missing; its name, the fix, and whether it is fatal."""


def _gaps(
    info: Mapping[str, Any], version: Mapping[str, Any], options: list[str], host: Host, own: Mapping[str, Any] | None
) -> list[_Gap]:
    if own is None:
        api = tuple(int(part) for part in str(version.get("ApiVersion", "0")).split("."))
        gaps: list[_Gap] = [
            (info.get("OSType") != "linux" or api < MINIMUM_API,
             "a Docker Engine 20.10 or newer for Linux", "Run `apt-get install docker.io`.", True),
            ("seccomp" not in options,
             "seccomp in the Docker Engine", "Use a kernel and an Engine built with seccomp.", True),
            (host.runtime not in (info.get("Runtimes") or {}),
             f"the runtime {host.runtime} in the Docker Engine", _RUNTIME_FIX[host.runtime], True),
        ]  # fmt: skip
    else:
        release = tuple(int(part) for part in str(info.get("ServerVersion", "0")).split(".")[:2])
        used = own["ociRuntime"]["name"]
        gaps = [
            (release < podman.MINIMUM,
             "Podman 4.3 or newer", "Use a newer distribution, or the Docker Engine.", True),
            (not own["security"]["seccompEnabled"],
             "seccomp in Podman", "Use a kernel and a Podman built with seccomp.", True),
            (host.runtime == "runsc", "a Docker Engine: Podman is not asked for gVisor",
             "Install what the driver needs to start runsc itself, see docs/operate/drivers.md.", True),
            (host.runtime != "runsc" and used not in podman.RUNTIMES,
             f"crun or runc as Podman's runtime, which is {used}",
             'Set runtime = "crun" in the [engine] section of containers.conf, and restart the service.', True),
        ]  # fmt: skip
    if not host.groups:
        return [*gaps, (True, "no control groups: limits hold per process", GROUPS_FIX, False)]
    gaps += [
        (not info.get(field), f"the {name} controller, which enforces {limit}", _GROUP_FIX.format(name), True)
        for field, (limit, name) in _CONTROLLERS.items()
    ]
    # Podman would warn of it in each container, and a warning means that a part was left out.
    has_swap = re.search(r"^SwapTotal: *[1-9]", Path("/proc/meminfo").read_text(), re.MULTILINE)  # the Engine's too
    swap = not info.get("SwapLimit") and (own is not None or has_swap)
    what = "swap accounting: memory_bytes could be exceeded into swap"
    return [*gaps, (swap, what, "Boot with swapaccount=1, or turn swap off: `swapoff -a`", True)]


def _version(version: Mapping[str, Any], runtime: Runtime) -> str:
    """Return Engine and runtime: "20.10.24 (runc 1.1.5)"; the Engine knows no version of others than runc."""
    parts = {part.get("Name"): part.get("Version") for part in version.get("Components") or ()}
    if "Podman Engine" in parts:
        return f"Podman {version.get('Version', '')}"
    if runtime != "runc":
        return f"{version.get('Version', '')} ({runtime})"
    words = f" (runc {parts['runc']})" if parts.get("runc") else ""
    return f"{version.get('Version', '')}{words}"
