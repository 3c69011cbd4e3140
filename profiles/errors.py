"""The one failure of this package: a profile that does not load. One level, no tree."""

from pathlib import Path


class ProfileError(Exception):
    """A profile cannot be used as it is written, so the server does not start with it."""

    def __init__(self, path: Path | str, line: int | None, key: str, problem: str, hint: str) -> None:
        """Say which file, line (from 1, None for the file as a whole) and dotted key, what is wrong, and the fix.

        The message is for the operator's terminal and log; it names host paths and never goes to a client.
        """
        where = f"{path}:{line}" if line else f"{path}"
        super().__init__(f"{where}: {f'{key}: ' if key else ''}{problem}. {hint}")
        self.path = Path(path)
        self.line = line
        self.key = key
        self.problem = problem
        self.hint = hint
