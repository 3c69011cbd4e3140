"""What one caller may do: the profiles and the workspace that its role leaves it. Frozen data."""

from dataclasses import dataclass
from pathlib import Path

from glovebox_profiles.load.loader import ProfileSet
from glovebox_profiles.policy.model import Budget, Rate
from glovebox_sandboxes.contract.errors import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What one caller may do."""

    profiles: ProfileSet
    """Of each tool, narrowed by the caller's role."""
    workspace: Path | None
    """The directory its tools read."""
    role: str | None = None
    """Name of the role; None without a policy."""
    policy_digest: str | None = None
    """``sha256:…`` of the policy; None without one."""
    budgets: tuple[Budget, ...] = ()
    """What the caller may spend."""
    rates: tuple[Rate, ...] = ()
    """How often its calls may connect to a host."""

    def refusal(self, _tool: str) -> Refusal | None:
        """Why the role does not have this tool; None where it has."""
        return None
