"""``glovebox notify``: notifications, as servers send them."""

import secrets

import anyio
import click

from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import command, emit
from glovebox_server.exits import FAILED, OK
from glovebox_server.notify.news import News
from glovebox_server.notify.sender import Target
from glovebox_server.settings import Settings


@click.group(cls=LazyGroup)
def notify() -> None:
    """Notifications of what waits, alarms or is stopped."""


@command("test", notify)
def notify_test(settings: Settings) -> int:
    """Send a test, once, and say what came back."""
    if settings.notify is None:
        raise click.UsageError("Set GLOVEBOX_NOTIFY first, to a webhook's address or exec:COMMAND.")
    told = News(secrets.token_hex(32), "test", "This is a test.", "now")
    answer = anyio.run(Target(settings).send, told)
    said = f"{'Sent' if answer.ok else 'Not sent'}: {answer.words}."
    emit({"sent": answer.ok, "answer": answer.words, "body": answer.body}, said, answer.body or None)
    return OK if answer.ok else FAILED
