"""The folder that an operator promotes into in one case, and what they do there: by the parts that the commands use."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio.from_thread
import anyio.to_thread

from glovebox_audit.event import Event
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.app import App
from glovebox_server.promotion import plan, transaction
from glovebox_server.promotion.folder import opened
from glovebox_server.promotion.proposing import Proposals
from glovebox_server.promotion.transaction import roll_back

NAME: Final = "proof"
"""What the folder is called."""
_FILE: Final = "data.csv"
"""Of the workspace, and in the folder from the beginning."""


@dataclass(slots=True, kw_only=True)
class CaseFolder:
    """What one case promotes into."""

    app: App
    path: Path
    """Empty at first, and outside of the server's directories."""
    workspace: Path
    """Whose file it begins with, and where a planted link leads."""

    def __post_init__(self) -> None:
        """Put the file there that the case begins with."""
        shutil.copyfile(self.workspace / _FILE, self.path / _FILE)

    async def happens(self, step: str, uris: Mapping[str, str]) -> str:
        """Do one of ``FOLDER_STEPS``; ``done``, or the rule that refused it.

        Args:
            step: promote the call's files, apply its patch, put the last promotion back; or what somebody else does
                there meanwhile: edit the file, or put a link to the workspace in a folder's place.
            uris: the addresses of what the call gave back, by name.
        """
        return await anyio.to_thread.run_sync(self._happens, step, uris)

    def proposals(self) -> Proposals:
        """What makes the changes that the case's calls propose: the server's own, into this folder."""
        return Proposals(settings=self.app.settings, audit=self.app.audit, into=self._into)

    def held(self) -> dict[str, str]:
        """What lies in the folder, the target of a link in place of a content."""
        found = (each for each in self.path.rglob("*") if each.is_symlink() or each.is_file())
        return {
            str(each.relative_to(self.path)): "a link" if each.is_symlink() else each.read_text("utf-8", "replace")
            for each in found
        }

    def _happens(self, step: str, uris: Mapping[str, str]) -> str:
        file = self.path / _FILE
        try:
            match step:
                case "edit":
                    file.write_bytes(file.read_bytes() + b"mine\n")
                case "link":
                    (self.path / "plots").symlink_to(self.workspace)
                case "roll back":
                    self._roll_back()
                case _:
                    patches = [uri for name, uri in uris.items() if name.endswith(".patch")]
                    self._promote(patches if step == "apply" else list(uris.values()), apply=step == "apply")
        except RefusedError as refusal:
            return refusal.rule
        return "done"

    def _promote(self, uris: Sequence[str], *, apply: bool) -> None:
        settings = self.app.settings
        into = plan.target(settings, self._into(), NAME)
        with opened(into) as folder, transaction.locked(settings.state_dir) as journal:
            planned = plan.planned(settings, uris, NAME, folder, apply=apply)
            transaction.promote(folder, journal, planned.promotion, planned.content, self._record)

    def _roll_back(self) -> None:
        with transaction.locked(self.app.settings.state_dir) as journal:
            *_, last = (each for each in journal.all() if each.path == str(self.path.resolve()))
            roll_back(journal, last.id, self._record)

    def _into(self) -> dict[str, str]:
        return {NAME: str(self.path)}

    def _record(self, event: Event) -> None:
        anyio.from_thread.run(self.app.audit.append, event)
