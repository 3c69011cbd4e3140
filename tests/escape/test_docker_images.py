"""An image cannot change the sandbox: what it declares is overridden, or it is refused (I3)."""

import contextlib
import io
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from docker.errors import ImageNotFound
from tests.fixtures import wheels
from tests.fixtures.docker_sandboxes import client, program, spec

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.drivers.docker.image import build as images
from glovebox_sandboxes.drivers.docker.image.build import build, remove
from glovebox_sandboxes.runtime import environments, packages, runtime

pytestmark = pytest.mark.driver("docker")

Derive = Callable[..., str]


@pytest.fixture
def derive() -> Iterator[Derive]:
    """Makes an image with more lines than ours; returns its name. Removed afterwards."""
    names: list[str] = []
    ours = images.tag()

    def build(*lines: str) -> str:
        name = f"glovebox-test/hostile:{len(names)}"
        recipe = "\n".join((f"FROM {ours}", *lines)).encode()
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            entry = tarfile.TarInfo("Dockerfile")
            entry.size = len(recipe)
            tar.addfile(entry, io.BytesIO(recipe))
        archive.seek(0)
        with client() as api:
            for answer in api.build(
                fileobj=archive, custom_context=True, tag=name, network_mode="none", rm=True, decode=True
            ):
                assert "error" not in answer, answer
        names.append(name)
        return name

    yield build
    with client() as api:
        for name in names:
            with contextlib.suppress(ImageNotFound):
                api.remove_image(name, force=True)


@pytest.fixture
def bare(runtime_dir: Path) -> Iterator[str]:
    """A base of the bubblewrap driver's runtime: small without its packages, and its Python is compiled already."""
    built, content = runtime.find(runtime_dir), io.BytesIO()
    assert built is not None
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(built.root, ".", filter=lambda entry: None if entry.name.startswith("./opt/") else entry)
    with client() as api:
        api.import_image_from_data(content.getvalue(), repository="glovebox-test/bare", tag="1")
        yield "glovebox-test/bare:1"
        api.remove_image("glovebox-test/bare:1", force=True)


async def test_what_an_image_declares_does_not_reach_the_sandbox(
    monkeypatch: pytest.MonkeyPatch, derive: Derive
) -> None:
    """Entry point, command, user, variables, directory, health check, stop signal and labels are all ours."""
    hostile = derive(
        'ENTRYPOINT ["/bin/false"]',
        'CMD ["--evil"]',
        "USER 0:0",
        "WORKDIR /root",
        "ENV LD_PRELOAD=/evil.so PYTHONSTARTUP=/evil.py PATH=/evil HOME=/root",
        "HEALTHCHECK CMD /bin/true",
        "STOPSIGNAL SIGUSR1",
        "EXPOSE 2375",
        'LABEL dev.glovebox.owner="somebody" dev.glovebox.sandbox="another"',
    )
    monkeypatch.setattr(images, "tag", lambda: hostile)
    code = (
        "import os; print(os.getuid(), sorted(set(os.environ) & {'LD_PRELOAD', 'PYTHONSTARTUP'}), "
        "os.environ['PATH'], os.environ['HOME'])"
    )
    async with DockerDriver.connect() as driver:
        plan = driver.plan(spec())
        outcome, _, differences = await program(driver, code, plan)
        async with driver.open(plan) as sandbox:
            with client() as api:
                found = api.inspect_container(f"glovebox-{sandbox.id}")
    assert outcome.stdout.text == "65532 [] /usr/bin:/bin /tmp\n"
    assert differences == ()
    assert found["Config"]["Labels"]["dev.glovebox.sandbox"] == sandbox.id
    assert found["Config"]["Labels"]["dev.glovebox.owner"] != "somebody"
    assert found["Config"]["StopSignal"] == "SIGKILL"
    assert "Health" not in found["State"]
    assert found["Path"] == "/usr/bin/python3"


async def test_without_our_body_the_same_image_would_have_its_way(derive: Derive) -> None:
    """Control: asked for nothing else, the Engine takes entry point and variables from the image."""
    hostile = derive('ENTRYPOINT ["/bin/false"]', "ENV LD_PRELOAD=/evil.so", "USER 0:0")
    with client() as api:
        made = api.create_container_from_config({"Image": hostile})["Id"]
        try:
            found = api.inspect_container(made)
        finally:
            api.remove_container(made, force=True)
    assert found["Path"] == "/bin/false"
    assert "LD_PRELOAD=/evil.so" in found["Config"]["Env"]
    assert found["Config"]["User"] == "0:0"


async def test_an_image_with_a_volume_is_refused(monkeypatch: pytest.MonkeyPatch, derive: Derive) -> None:
    """A volume is a writable directory of the host's without any limit: the driver is not usable, and says why."""
    hostile = derive("VOLUME /data")
    monkeypatch.setattr(images, "tag", lambda: hostile)
    async with DockerDriver.connect() as driver:
        assert not driver.capabilities.usable
        with pytest.raises(SandboxError, match="declares /data") as refusal:
            driver.plan(spec())
    assert "docker rmi" in refusal.value.fix


async def test_a_missing_image_is_told_with_the_command_that_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when another version's image is there: tags are content, so an old guest is never met."""
    monkeypatch.setattr(images, "tag", lambda: "glovebox/python:0000000000000000")
    async with DockerDriver.connect() as driver:
        with pytest.raises(SandboxError, match="lacks the image") as refusal:
            driver.plan(spec())
    assert refusal.value.fix == "Run `glovebox setup --docker`."


async def test_an_image_that_goes_away_is_told_the_same(monkeypatch: pytest.MonkeyPatch, derive: Derive) -> None:
    """The plan names the image by its digest; one that was removed meanwhile is not replaced by another."""
    passing = derive("ENV X=1")
    monkeypatch.setattr(images, "tag", lambda: passing)
    async with DockerDriver.connect() as driver:
        plan = driver.plan(spec())
        with client() as api:
            api.remove_image(passing, force=True)
        derive("ENV X=2")
        with pytest.raises(SandboxError, match="No such image") as refusal:
            async with driver.open(plan):
                pytest.fail("opened")
    assert "glovebox setup --docker" in refusal.value.fix


def test_the_name_is_the_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another lock, another image; the same content, the same name."""
    images.tag.cache_clear()
    name = images.tag()
    images.tag.cache_clear()
    assert images.tag() == name
    other = tmp_path / "lock"
    other.write_text("numpy==1")
    monkeypatch.setattr(images, "LOCK", other)
    images.tag.cache_clear()
    assert images.tag() != name
    images.tag.cache_clear()


async def test_building_what_is_there_changes_nothing() -> None:
    """The image of this version is found by its name; control for the next test."""
    with client() as api:
        there = api.inspect_image(images.tag())["Id"]
    assert await build("glovebox-test/no-such-base:1") == there


async def test_a_base_without_python_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which image, and how to name another; no container of the question stays."""
    base = "glovebox-test/empty:1"
    monkeypatch.setattr(images, "tag", lambda _: "glovebox-test/none:1")
    with client() as api:
        api.import_image_from_data(bytes(10_240), repository="glovebox-test/empty", tag="1")
        try:
            with pytest.raises(SandboxError, match=f"{base} cannot run python3") as refusal:
                await build(base)
            assert api.containers(all=True, filters={"ancestor": base}) == []
        finally:
            api.remove_image(base, force=True)
    assert "--base IMAGE" in refusal.value.fix


async def test_an_environment_is_an_image_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: str
) -> None:
    """Found by the lock that the data directory names; its packages are in no sandbox of the default's (control)."""
    wheels.make(tmp_path / "wheels", "package_one", "1.0", {"one.py": "SIZE = 1\n"})
    wheels.alone(monkeypatch, tmp_path / "wheels")
    (tmp_path / "one.toml").write_text('packages = ["package-one"]\nmodules = ["one"]\n')
    environment = environments.load("one", tmp_path)
    await packages.write_lock(environment, runtime.base_python(), lambda _: None)
    environments.record(tmp_path, environment, environment.locked())
    recipe = tmp_path / "recipe"
    shutil.copytree(images.RECIPE, recipe)
    finish = recipe / "finish.py"
    finish.write_text(finish.read_text().replace("    compile_below(library)\n", ""))
    monkeypatch.setattr(images, "RECIPE", recipe)
    try:
        image = await build(bare, environment=environment)
        async with DockerDriver.connect(data=tmp_path) as driver:
            plan = driver.plan(replace(spec(), environment="one"))
            assert plan.action["Image"] == image
            found, _, differences = await program(driver, "import one; print(one.SIZE)", plan)
            assert (found.stdout.text, differences) == ("1\n", ())
            without, _, _ = await program(driver, "import one")
        assert "one is in the environment one" in without.stderr.text
        lock = environment.locked()
        assert await remove(lock) == [images.tag(lock), images.runtime_tag(bare, lock)]
        assert await remove(lock) == []
        with client() as api:
            assert api.inspect_image(bare)  # the control: that from which it was made
    finally:
        with client() as api:
            for name in (images.tag(environment.locked()), images.runtime_tag(bare, environment.locked())):
                with contextlib.suppress(ImageNotFound):
                    api.remove_image(name, force=True)
