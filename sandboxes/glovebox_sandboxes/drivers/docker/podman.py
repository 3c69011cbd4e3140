"""Translate the docker driver's plan to Podman's own API. Pure, except ``write_filter``.

Podman also answers the Engine's API on its socket, but silently ignores parts of "Create a container": cgroup
namespace, masked paths, runtime, and without root every ulimit. So containers are made by its own call
(https://docs.podman.io/en/latest/_static/api.html, "ContainerCreateLibpod"), which has a word for each; all else uses
the Engine's. A part of the plan without a word here is rejected.
"""

import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.drivers.docker.plan import READ_ONLY

CREATE = "/v4.0.0/libpod/containers/create"
INSPECT = "/v4.0.0/libpod/containers/{}/json"
INFO = "/v4.0.0/libpod/info"
FIX = "See Podman's log: journalctl -u podman, or with --user"
MINIMUM = (4, 3)
"""First version whose containers can lack the variables it sets itself."""
RUNTIMES = ("crun", "runc")
"""Low-level runtimes of Podman that make what the plan says; others are other levels."""
MOUNTS = ("/run/.containerenv",)
"""Podman's own mounts in each container: an empty file by which programs recognize it."""
_PROCESSES = 16_384
"""RLIMIT_NPROC: all sandboxes of a host are one user's, so it must only be out of the way; the control group counts.
Podman's default is a million, which a service without CAP_SYS_RESOURCE may not set."""
_PERIOD = 100_000
"""Microseconds in which NanoCpus are counted, as in the Engine."""

# Set by the guest itself, or fixed in Podman. Rejected with any other value.
_SETTLED: Mapping[str, Any] = {"Cmd": [], "Tty": False, "StdinOnce": True, "AttachStdin": True, "AttachStdout": True,
                               "AttachStderr": True}  # fmt: skip
_HOST_SETTLED: Mapping[str, Any] = {"AutoRemove": True, "LogConfig": {"Type": "none", "Config": {}}, "Init": False,
                                    "Devices": [], "UTSMode": "", "UsernsMode": "",
                                    # Podman's own, always.
                                    "ReadonlyPaths": list(READ_ONLY)}  # fmt: skip
_RENAMED = {"Entrypoint": "entrypoint", "User": "user", "WorkingDir": "work_dir", "Hostname": "hostname",
            "Healthcheck": "healthconfig", "Labels": "labels", "OpenStdin": "stdin"}  # fmt: skip
_HOST_RENAMED = {"Runtime": "oci_runtime", "Privileged": "privileged", "ReadonlyRootfs": "read_only_filesystem",
                 "CapAdd": "cap_add", "CapDrop": "cap_drop", "ShmSize": "shm_size", "OomScoreAdj": "oom_score_adj",
                 "MaskedPaths": "mask"}  # fmt: skip
_FIXED: Mapping[str, Any] = {
    "command": [], "remove": True, "log_configuration": {"driver": "none"}, "systemd": "false",
    "image_volume_mode": "ignore",
    # All that the image and Podman itself would add; the plan's variables are set after it.
    "unsetenvall": True,
    # No files of Podman's making in /etc: its hosts file would name the host's own hosts.
    "manage_password": False, "use_image_hosts": True, "use_image_resolve_conf": True,
}  # fmt: skip
_OTHERWISE = ("nr_inodes", "uid", "gid", "mode")
"""Options of a tmpfs that Podman lacks, or rejects in combination with those."""


def specification(name: str, body: Mapping[str, Any], filters: Mapping[str, str]) -> dict[str, Any]:
    """Return the body for ``CREATE``; ``filters`` are files of seccomp documents, by their text.

    Raises UnsupportedSpecError: a field of the Engine's has no counterpart.
    """
    top, host = dict(body), dict(body["HostConfig"])
    del top["HostConfig"]
    for settled, found in ((_SETTLED, top), (_HOST_SETTLED, host)):
        for field, value in settled.items():
            if found.pop(field, value) != value:
                raise _unsupported(field)
    variables = [entry.partition("=") for entry in top.pop("Env")]
    spec: dict[str, Any] = {
        "name": name,
        "image": top.pop("Image").removeprefix("sha256:"),
        "env": {key: value for key, given, value in variables if given},
        "stop_signal": int(signal.Signals[top.pop("StopSignal")]),
        **_FIXED,
        **{ours: top.pop(theirs) for theirs, ours in _RENAMED.items()},
        **{ours: host.pop(theirs) for theirs, ours in _HOST_RENAMED.items()},
        **_security(host.pop("SecurityOpt"), filters),
        "netns": {"nsmode": host.pop("NetworkMode")},
        "ipcns": {"nsmode": host.pop("IpcMode")},
        "pidns": {"nsmode": host.pop("PidMode") or "private"},
        "utsns": {"nsmode": "private"},
        "cgroupns": {"nsmode": host.pop("CgroupnsMode")},
        "r_limits": [
            *({"type": each["Name"], "soft": each["Soft"], "hard": each["Hard"]} for each in host.pop("Ulimits")),
            {"type": "nproc", "soft": _PROCESSES, "hard": _PROCESSES},
        ],
        "mounts": [*(_tmpfs(*each) for each in host.pop("Tmpfs").items()), *map(_bind, host.pop("Mounts"))],
        **_resources(host),
    }
    if top.pop("NetworkDisabled") != (spec["netns"]["nsmode"] == "none"):
        raise _unsupported("NetworkDisabled")
    for field in (*top, *host):
        raise _unsupported(field)
    return spec


def _unsupported(field: str) -> UnsupportedSpecError:
    return UnsupportedSpecError(f"plan.{field}", "Podman has no counterpart for its value", "Report this as a bug.")


def _security(options: list[str], filters: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name == "no-new-privileges":
            found["no_new_privileges"] = True
        elif name == "seccomp" and value in filters:
            found["seccomp_profile_path"] = filters[value]
        else:
            raise _unsupported(f"SecurityOpt {name}")
    return found


def _tmpfs(target: str, options: str) -> dict[str, Any]:
    kept = [each for each in options.split(",") if each.partition("=")[0] not in _OTHERWISE]
    # Podman makes it root's: so all may write; only the guest's user is inside. Memory bounds the number of files.
    own = [*kept, "mode=1777", "notmpcopyup"]
    return {"destination": target, "type": "tmpfs", "source": "tmpfs", "options": own}


def _bind(mount: Mapping[str, Any]) -> dict[str, Any]:
    kind = "bind" if mount["BindOptions"]["NonRecursive"] else "rbind"
    access = "ro" if mount["ReadOnly"] else "rw"
    options = [kind, access, mount["BindOptions"]["Propagation"], "nosuid", "nodev"]
    return {"destination": mount["Target"], "type": "bind", "source": mount["Source"], "options": options}


def _resources(host: dict[str, Any]) -> dict[str, Any]:
    if "Memory" not in host:
        return {}
    limits = {
        "memory": {"limit": host.pop("Memory"), "swap": host.pop("MemorySwap")},
        "pids": {"limit": host.pop("PidsLimit")},
        "cpu": {"period": _PERIOD, "quota": host.pop("NanoCpus") * _PERIOD // 1_000_000_000},
    }
    return {"resource_limits": limits}


def write_filter(text: str) -> Path:
    """Write a seccomp document as the only file of a new directory: Podman's API takes a path, the Engine's the text.

    Readable by all, because Podman may be another user's; it is no secret.
    """
    file = Path(tempfile.mkdtemp(prefix="glovebox-filters-")) / "filter.json"
    file.write_text(text)
    file.parent.chmod(0o755)
    file.chmod(0o644)
    return file
