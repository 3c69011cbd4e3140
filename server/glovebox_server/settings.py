"""Where a server keeps things and what it serves: from the command line, else the environment, else the default.

No setting here can widen a profile; profiles are the only place where a tool is allowed anything.
"""

from pathlib import Path

import platformdirs
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Every setting. Environment variables have the prefix ``GLOVEBOX_``."""

    model_config = SettingsConfigDict(env_prefix="GLOVEBOX_", extra="ignore", frozen=True)

    workspace: Path = Field(default_factory=Path.cwd)
    """Directory that tools may read, read-only. The current directory unless given."""
    profiles_dir: Path = Field(default_factory=lambda: platformdirs.user_config_path("glovebox") / "profiles")
    """The operator's own profiles; each file replaces the shipped profile of the same tool."""
    data_dir: Path = Field(default_factory=lambda: platformdirs.user_data_path("glovebox"))
    """The sandboxes' Python runtime, which `glovebox setup` builds."""
    state_dir: Path = Field(default_factory=lambda: platformdirs.user_state_path("glovebox"))
    """Audit log, artifacts and the HTTP token. Only its owner may look into it."""
    artifact_hours: float = Field(default=24.0, gt=0, le=24 * 30)
    """How long artifacts can be read, in hours."""
    artifact_total_mib: int = Field(default=1024, ge=16)
    """Size of all artifacts together, in MiB."""
