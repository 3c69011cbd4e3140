"""The system-call policy of sandboxed programs, in the two forms that drivers need.

``policy.json`` is the source, ``policy`` reads it, ``filters`` turns it into a BPF program and into Docker's document.
"""

from glovebox_sandboxes.seccomp.filters import bpf, bpf_for_filtering, bpf_for_zygote, docker_profile, for_programs
from glovebox_sandboxes.seccomp.policy import digest, load

__all__ = ["bpf", "bpf_for_filtering", "bpf_for_zygote", "digest", "docker_profile", "for_programs", "load"]
