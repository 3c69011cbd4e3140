"""Bundles of a state directory: what a call or a run did, in one file to check anywhere."""

from functools import partial
from typing import Any

from glovebox_audit.bundle import archive
from glovebox_audit.chain import EvidenceError
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import effective
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_server import workspace
from glovebox_server.app import load_profiles
from glovebox_server.proof.lock import policy_keys
from glovebox_server.settings import Settings
from glovebox_server.startup import governed
from glovebox_server.upkeep.log import writing


def make(settings: Settings, of: str, identity: str) -> bytes:
    """Return the bundle of a ``call`` or a ``run``; what is not sealed yet is sealed. Raises EvidenceError."""
    directory, known = settings.state_dir / "audit", partial(texts, settings)
    try:
        return archive.make(directory, of, identity, known)
    except EvidenceError as problem:
        if problem.kind != "unsealed":
            raise
        with writing(settings) as log:
            log.seal()
        return archive.make(directory, of, identity, known)


def texts(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return profiles in effect, of each role too, and the policy, by digest; empty if they do not load."""
    try:
        profiles = load_profiles(settings)
        found = governed(settings, profiles, workspace.find(settings, "http"))
    except (ProfileError, MisnamedError):
        return {}, {}
    sets = [profiles, *(each.profiles for each in found.every)]
    by_digest = {each.digests[tool]: effective(each[tool]) for each in sets for tool in each}
    return by_digest, {} if found.policy is None else {found.digest or "": policy_keys(found.policy)}
