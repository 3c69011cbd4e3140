"""Runs the program of an allowed call in a sandbox: its outcome is observed, then transformed."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.pool.pool import SandboxProvider, SandboxRequest
from glovebox_sandboxes.session.connection import AttestedSandbox, Input, StreamSink
from glovebox_sandboxes.session.run import Hooks, run
from glovebox_server.artifacts.collector import Collector
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import NOTHING
from glovebox_server.core.call import Call, Ran, Show
from glovebox_server.tools.base import cut_output


async def run_in_sandbox(call: Call, sandboxes: SandboxProvider, artifacts: ArtifactStore) -> Ran:
    """Run the program, and deliver its files."""
    now, request = call.now, call.request
    if now.spec is None:
        raise AssertionError(request.id)
    wanted = SandboxRequest(
        isolation=now.profile.isolation,
        spec=now.spec,
        prepared=now.profile.python.start == "warm",
        code=request.arguments.get("code"),
        key=request.principal.id,
    )
    inputs = now.inputs.contents() if now.inputs else []
    async with AsyncExitStack() as files:
        collect = _Collecting(call, now.spec, artifacts, files)
        call.listener.progress("Getting a sandbox")
        async with sandboxes.acquire(wanted, before_start=now.records.flush) as sandbox:
            await now.records.record(sandbox.record)
            sandbox.require_as_planned()
            call.listener.progress("Running")
            for hook in now.on_started:
                hook()
            outcome = await _run_program(call, sandbox, inputs, collect)
        outcome = await _pass_on(call, outcome)
        delivered = NOTHING
        if now.withheld is None and (collect.collector or _gives_files(outcome)):
            collector = await collect.open()
            delivered = await collector.deliver(outcome, keep_pictures=now.profile.files.output)
        return Ran(outcome=outcome, delivered=delivered, answer=call.tool.answer(outcome), plan=sandbox.plan)
    raise AssertionError(request.id)


class _Collecting:
    """The collection of a call's files, from the first one on. Holds no call: streams keep it until freed."""

    def __init__(self, call: Call, spec: SandboxSpec, artifacts: ArtifactStore, stack: AsyncExitStack) -> None:
        now, request = call.now, call.request
        self.collector: Collector | None = None
        self._collect = partial(artifacts.collect, request, spec.limits, now.rights.artifact_bytes, now.inspect_file)
        self._make = partial(Collector, recorder=now.records, call=request, mask=now.mask_name)
        self._stack = stack

    async def open(self) -> Collector:
        """Return the collector, made once; files come one after the other."""
        if self.collector is None:
            collection = await self._stack.enter_async_context(self._collect())
            self.collector = await self._stack.enter_async_context(self._make(collection))
        return self.collector

    async def accept(self, name: str, size: int, *, cut: bool = False) -> StreamSink | None:
        """Accept one file that the guest announces."""
        return await (await self.open()).accept(name, size, cut=cut)


async def _run_program(call: Call, sandbox: AttestedSandbox, inputs: Sequence[Input], collect: _Collecting) -> Outcome:
    now, request = call.now, call.request
    # Over HTTP, a caller must not learn the path of the workspace, nor test guesses.
    root = now.rights.workspace if request.principal.transport == "stdio" else None
    job = replace(call.tool.job(request.arguments, now.reveal, root=root), environment=now.environment)
    cut_file = partial(collect.accept, cut=True)
    hooks = Hooks(file=collect.accept, cut_file=cut_file, serve=now.serve, printed=_show_live(call))
    async with AsyncExitStack() as around:
        for scope in now.around_program:
            await around.enter_async_context(scope)
        return await run(sandbox, job, inputs=inputs, hooks=hooks)
    raise AssertionError(request.id)  # a scope that ends the program raises


def _gives_files(outcome: Outcome) -> bool:
    return bool(outcome.blobs or outcome.shown or outcome.skipped or cut_output(outcome)[1])


async def _pass_on(call: Call, outcome: Outcome) -> Outcome:
    now = call.now
    for observer in now.observers:
        await observer.ended(outcome)
    normal = outcome.ended == "exited" and all(observer.is_complete for observer in now.observers)
    for transform in now.transforms:
        outcome = await transform(outcome, normal)
    return outcome


def _show_live(call: Call) -> Callable[[bytes], None]:
    """Return a function that takes raw live output: observers first, then masks, then the listener."""
    show: Show = call.listener.printed
    for wrap in call.now.wrap_live:
        show = wrap(show)
    if len(call.now.observers) == 1:
        return call.now.observers[0].printed(show)
    if call.now.observers:
        raise AssertionError("live output has one observer")
    return lambda data: show(data.decode("utf-8", "replace"))
