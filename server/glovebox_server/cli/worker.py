"""``glovebox worker``: the process that prepares sandboxes, in the foreground."""

from glovebox_sandboxes.worker import main as workers
from glovebox_server.cli.options import command
from glovebox_server.settings import Settings


@command("worker", json="")
def worker(settings: Settings) -> None:
    """Prepare sandboxes for the servers of a state directory.

    The first of them starts one itself. It ends a minute after the last has gone.
    """
    workers.main(settings.state_dir, settings.data_dir, alone=True)
