"""README.md and docs/: what they tell a reader to type runs, and what they quote, link to or price exists."""

import argparse
import ast
import csv
import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from conftest import ROOT, wait_until

import common.preemption  # noqa: F401  (before any script's main is called here)
from common.args import flag, parse

README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = [README, CHINESE, *sorted((ROOT / "docs").rglob("*.md"))]
# every command of these is run by a test, or says why not
MARKED = [ROOT / "docs" / name for name in ("cloud.md", "troubleshooting.md")]
CLOUD, TROUBLES = MARKED
# what a block that is not run needs
OUTSIDE = re.compile(r"\b(aws|gcloud|aliyun|sudo|pip install|conda|ssh|docker)\b")
# messages of other programs
THEIRS = {
    "no kernel image is available for execution on the device",
    "CUDA out of memory",
    "No working C++ compiler found",
    "Bus error",
    "No dashboards are active for the current data set.",
}
# flags of other programs, as they are named in the text
FOREIGN = {"--gpgpu", "--gpus", "--ip", "--host", "--bind_all", "--shm-size", "--purge_orphaned_data", "--logdir"}
FOREIGN |= {"--max-run-duration", "--local-ssd", "--instance-initiated-shutdown-behavior"}
FOREIGN |= {"--SpotInterruptionBehavior", "--AutoReleaseTime"}


class Block(NamedTuple):
    reason: str | None  # why no test runs it
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"(?:<!-- not run: (.*?) -->\n)?```sh\n(.*?)```\n", page.read_text(), re.DOTALL)
    return [Block(reason or None, text) for reason, text in found]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """Code between backticks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Our scripts that are started in a piece of shell, and the words after each."""
    text = re.sub(r"(^|\s)#.*", r"\1", text.replace("\\\n", " "))
    reader = shlex.shlex(text, posix=True, punctuation_chars=";&|()<>\n")
    reader.whitespace, reader.whitespace_split, reader.commenters = " \t", True, ""
    words, found = list(reader), []
    for i, word in enumerate(words):
        if any(character.isspace() for character in word.strip()):  # a command in quotes
            found += commands(word)
        elif word.endswith(".py") and (ROOT / word).is_file():
            end = next((j for j in range(i, len(words)) if set(words[j]) <= set(";&|()<>\n")), len(words))
            found.append((word, words[i + 1 : end]))
            if word == "sweep.py":  # the rest is its own
                break
    return found


class Parsed(Exception):
    pass


def parser_of(script: str, words: list[str], monkeypatch) -> argparse.ArgumentParser | type:
    """Have a script's own parser read a command line, and nothing else happen. Fails where it is refused."""
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    if hasattr(module, "Args"):
        parse(module.Args, words, "")
        return module.Args
    name = "parse_known_args" if script == "sweep.py" else "parse_args"
    original, parsers = getattr(argparse.ArgumentParser, name), []

    def parse_args(self, *args):
        parsers.append(self)
        original(self, words)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, name, parse_args)
        with pytest.raises(Parsed):
            module.main()
    return parsers[0]


def flags_of(parser: argparse.ArgumentParser | type) -> set[str]:
    if isinstance(parser, argparse.ArgumentParser):
        return set(parser._option_string_actions)
    names = {flag(field.name) for field in dataclasses.fields(parser)}
    return names | {"--no-" + name[2:] for name in names} | {"--help"}


# ---- without running anything


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_valid_shell(page):
    text = page.read_text()
    assert len(blocks(page)) == len(re.findall(r"^```sh$", text, re.MULTILINE))
    assert len(re.findall("^```", text, re.MULTILINE)) % 2 == 0
    for block in blocks(page):
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), block.text


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
def test_a_block_that_no_test_runs_says_why_and_could_not_run_here(page):
    left_out = [block for block in blocks(page) if block.reason is not None]
    for reason, text in left_out:
        assert len(reason.split()) > 2, text
        assert OUTSIDE.search(text), f"could be run: {text}"
    assert len(left_out) == page.read_text().count("<!-- not run:")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_scripts_take_the_flags_with_which_the_pages_start_them(page, monkeypatch):
    for block in blocks(page):
        for script, words in commands(block.text):
            parser_of(script, words, monkeypatch)
    for span in spans(prose(page)):
        if " --" in span:
            for script, words in commands(span):
                own = words[: next((i for i, word in enumerate(words) if word.endswith(".py")), None)]
                # placeholders stand for values here, so that only the names are compared
                positional = ("evaluate.py", "sweep.py", "benchmark/scores.py", "benchmark/curves.py")
                minimum = ["x"] if script in positional else []
                known = flags_of(parser_of(script, minimum, monkeypatch))
                assert {word.partition("=")[0] for word in own if word.startswith("--")} <= known, span


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
def test_flags_that_are_named_exist(page, monkeypatch):
    scripts = ("ppo_atari.py", "ppo_continuous.py", "dqn_atari.py", "evaluate.py", "doctor.py")
    known = set().union(
        *(
            flags_of(importlib.import_module(name.removesuffix(".py")).Args)
            for name in scripts
            if (ROOT / name).exists()
        )
    )
    named = {span.split()[0] for span in spans(prose(page)) if re.match(r"--[a-zA-Z_-]+( [^:]+)?$", span)}
    assert named - FOREIGN <= known


@pytest.mark.parametrize("page", [*PAGES, ROOT / "examples" / "README.md"], ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", prose(page)):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
def test_lines_are_no_wider_than_elsewhere(page):
    assert [line for line in prose(page).splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_the_chinese_readme_has_the_commands_the_map_and_the_exit_statuses_of_readme():
    assert sorted(block.text for block in blocks(CHINESE)) == sorted(block.text for block in blocks(README))
    folders = r"[^!]\[[^]]*\]\(((?:docs|recipes|examples|cluster)[^)]*)\)"
    links = [set(re.findall(folders, page.read_text())) for page in (README, CHINESE)]
    assert {link for link in links[0] if not link.endswith(".png")} == links[1]
    statuses = [re.findall(r"^\| (\d+) \|", page.read_text(), re.MULTILINE) for page in (README, CHINESE)]
    assert statuses[0] == statuses[1] == ["0", "75", "3", "2", "1"]
    flags = [set(re.findall(r"--[a-z][a-z-]+", page.read_text())) for page in (README, CHINESE)]
    assert flags[1] == flags[0]


def test_readme_evaluates_the_run_of_its_own_main_command():
    import ppo_atari
    from common.args import default_run_name

    ((_, words),) = [
        found
        for _, text in blocks(README)
        if "pip install" in text
        for found in commands(text)
        if found[0] == "ppo_atari.py"
    ]
    name = default_run_name(parse(ppo_atari.Args, words, ""), "ppo_atari")
    assert f"evaluate.py runs/{name} " in README.read_text()


def test_no_port_is_opened_to_everybody():
    for page in MARKED:
        for block in blocks(page):
            assert "0.0.0.0" not in block.text
            for port in ("6006", "8888"):
                assert not re.search(rf"(--port|tcp:|PortRange) ?{port}", block.text) or "127.0.0.1" in block.text
    openings = re.findall(r"(?:--cidr|--source-ranges|--SourceCidrIp) (\S+)", CLOUD.read_text())
    assert openings == ['"$ME/32"'] * 3


def test_prices_in_the_text_are_those_of_the_file():
    with open(ROOT / "benchmark" / "prices.csv", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    named = re.findall(
        r"^\| `(\w+):([\w.-]+)@([\w-]+)` \| ([\d.]+) \| ([\d.]+) \| (\S+) \|$", CLOUD.read_text(), re.MULTILINE
    )
    assert len(named) == 2
    for provider, instance, region, on_demand, spot, as_of in named:
        (row,) = [
            row for row in rows if (row["provider"], row["instance"], row["region"]) == (provider, instance, region)
        ]
        assert (row["on_demand"], row["spot"], row["currency"]) == (on_demand, spot, "USD")
        assert as_of == (row["as_of"] or "undated")


def test_what_is_typed_for_aws_fits_its_api():
    pytest.importorskip("botocore", reason="comes with requirements-cloud.txt")
    from botocore import xform_name
    from botocore.session import Session
    from botocore.validate import ParamValidator

    (text,) = [block.text for block in blocks(CLOUD) if "run-instances" in block.text]
    line = next(line for line in text.replace("\\\n", " ").split("\naws ") if line.startswith("ec2 run-instances"))
    words = shlex.split(line)[2:]
    shape = Session().get_service_model("ec2").operation_model("RunInstances").input_shape
    members = {"--" + xform_name(name, "-"): name for name in shape.members}
    given = {"MinCount": 1, "MaxCount": 1}  # the program's own default
    for option, value in zip(words[::2], words[1::2], strict=True):
        name = members[option]
        value = json.loads(value) if value[0] in "[{" else value
        if shape.members[name].type_name == "list" and not isinstance(value, list):
            value = [value]
        given[name] = value
    report = ParamValidator().validate(given, shape)
    assert not report.has_errors(), report.generate_report()
    root, data = (disk["Ebs"] for disk in given["BlockDeviceMappings"])
    assert root["VolumeSize"] >= 100
    assert data["VolumeSize"] >= 200
    assert root["DeleteOnTermination"] is data["DeleteOnTermination"] is True  # or it costs on
    assert given["InstanceMarketOptions"]["MarketType"] == "spot"
    assert given["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert given["MetadataOptions"]["HttpPutResponseHopLimit"] == 2


def messages() -> list[str]:
    """All strings of our programs but docstrings, with NUL for what is put in."""
    found = []
    for path in [*ROOT.glob("*.py"), *(ROOT / "common").glob("*.py")]:
        tree = ast.parse(path.read_text())
        parts = [value for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values]
        skip = {id(node) for node in parts}
        skip |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
                found.append(node.value)
    return found


def test_messages_are_quoted_as_the_programs_print_them():
    rows = re.findall(r"^\| (.*?) \|", prose(TROUBLES), re.MULTILINE)
    quoted = {span for row in rows for span in spans(row) if " " in span}
    ours = messages()
    for quote in sorted(quoted - THEIRS):
        if quote.endswith("whoever reaches it uses it") and not (ROOT / "doctor.py").exists():
            continue
        fragments = [re.escape(fragment) for fragment in quote.split("...")]
        assert max(map(len, fragments)) >= 6, quote
        pattern = re.compile(r"[^\n]*".join(fragments))
        assert any(pattern.search(message) for message in ours), quote
    assert quoted >= THEIRS
    assert len(quoted - THEIRS) > 25


# ---- running it


# What a test may change in a command, and nothing else: sizes, places, and an unused port.
SMALLER = {
    "ppo_atari.py": "ppo_atari.py --num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 32",
    "dqn_atari.py": "dqn_atari.py --num-envs 2 --buffer-size 1000 --learning-starts 64 --total-timesteps 128",
    "--episodes 10": "--episodes 1",
    "s3://MY-BUCKET/runs": "bucket/runs",
    "bin/tensorboard": "bin/tensorboard --port 0",
}
LOCAL_SSD = "/mnt/nvme"
RUN = "BreakoutNoFrameskip-v4__ppo_atari__1__*"


class Machine:
    """A copy of the repository in a folder, with the environment of these tests, and no way to switch anything off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "spotrl"
        unwanted = (".git", ".venv", ".pytest_cache", ".ruff_cache", "__pycache__", "runs", "out", "report", "tests")
        shutil.copytree(ROOT, self.folder, ignore=shutil.ignore_patterns(*unwanted))
        (self.folder / ".venv").symlink_to(sys.prefix)
        self.asked = folder / "asked"
        sudo = folder / "bin" / "sudo"
        sudo.parent.mkdir()
        sudo.write_text(f'#!/bin/sh\necho "$*" >> "{self.asked}"\n')
        sudo.chmod(0o755)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "TMUX"))}
        (folder / "home").mkdir()
        self.env = kept | {
            "PATH": f"{sudo.parent}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "TMUX_TMPDIR": str(folder),  # a server of its own
            "PYTHONPATH": "",
        }

    def start(self, text: str, **kwargs) -> subprocess.Popen:
        for old, new in (*SMALLER.items(), (LOCAL_SSD, str(self.folder / "nvme"))):
            text = text.replace(old, new)
        return subprocess.Popen(["bash", "-ec", text], cwd=self.folder, env=self.env, text=True, **kwargs)

    def type(self, text: str) -> str:
        process = self.start(text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = process.communicate(timeout=120)
        expected = (0, 1) if "doctor.py" in text else (0,)  # this machine may deserve a fail
        assert process.returncode in expected, said
        return said

    def tensorboard(self, text: str, shows: str) -> None:
        """Start it, wait until it shows a run, see that nobody else can, and end it."""
        errors = self.folder / "tensorboard.txt"
        with open(errors, "w") as file:
            process = self.start("exec " + text, stdout=file, stderr=file)
        try:
            wait_until(lambda: "http://localhost:" in errors.read_text(), seconds=60)
            port = int(re.search(r"http://localhost:(\d+)/", errors.read_text())[1])
            listening = [c.laddr for c in psutil.Process(process.pid).net_connections("tcp") if c.status == "LISTEN"]
            assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", port)]

            def runs() -> list[str]:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=10) as answer:
                    return json.load(answer)

            wait_until(lambda: any(re.match(shows, run) for run in runs()), seconds=30)
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    yield machine
    if shutil.which("tmux"):
        subprocess.run(["tmux", "kill-server"], env=machine.env, capture_output=True)


@pytest.mark.slow
def test_the_line_that_trains(machine):
    (text,) = [text for _, text in blocks(CLOUD) if re.match(r"\.venv/bin/python ppo_atari\.py", text)]
    said = machine.type(text)
    assert "aws:p3.2xlarge spot in us-east-1: $0.520 an hour, undated" in said
    assert "complete: runs/BreakoutNoFrameskip-v4__ppo_atari__1__" in said
    assert len(list((machine.folder / "runs").glob(f"{RUN}/summary.json"))) == 1
    assert list((machine.folder / "bucket" / "runs").glob(f"{RUN}/manifest-*.json"))


@pytest.mark.slow
def test_the_pages_work_from_top_to_bottom(machine):
    missing = [name for name in ("tmux", "zstd") if shutil.which(name) is None]
    missing += [name for name in ("minari", "h5py") if find_spec(name) is None]
    missing += [] if (ROOT / "doctor.py").exists() else ["doctor.py"]
    needs = {"tmux ": "tmux", "zstd": "zstd", "--dataset": "minari", "doctor.py": "doctor.py"}
    ran = []
    for page in MARKED:
        for reason, text in blocks(page):
            if reason or text in ran or any(word in text and name in missing for word, name in needs.items()):
                continue
            ran.append(text)
            if "tensorboard" in text:
                machine.tensorboard(text, RUN.replace("*", ""))
                continue
            machine.type(text)
            if "tmux " in text:
                wait_until(lambda: machine.asked.read_text().endswith("shutdown -h now\n"), seconds=60)
    assert len(ran) >= 2
    if "tmux" not in missing:
        assert machine.asked.read_text().splitlines() == ["shutdown -h +1440", "shutdown -h now"]
    (dqn,) = (machine.folder / "nvme" / "runs").glob("BreakoutNoFrameskip-v4__dqn_atari__1__*")
    assert (dqn / "summary.json").exists()
    assert list((machine.folder / "bucket" / "runs" / dqn.name).glob("manifest-*.json"))
    if "zstd" not in missing:
        assert len(list((machine.folder / "nvme" / "data" / "runs").glob(f"{RUN}/agent.pt"))) == 1
    if "minari" not in missing:
        assert (machine.folder / "nvme" / "minari" / "breakout" / "ppo-v0").is_dir()
    if missing:
        pytest.skip(f"the rest of the pages is right, what needs {', '.join(missing)} was left out")


@pytest.mark.slow
def test_the_machine_stays_on_while_the_job_is_not_done(machine):
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    (text,) = [text for _, text in blocks(CLOUD) if "tmux new-session" in text]
    refused = text.replace("--max-cost 5", "--max-cost -5")
    machine.type(
        refused.replace("case $? in", "status=$?; case $status in").replace("esac", "esac; echo $status > ended")
    )
    ended = machine.folder / "ended"
    wait_until(lambda: ended.exists() and ended.read_text() == "2\n", seconds=60)
    assert machine.asked.read_text() == "shutdown -h +1440\n"


def test_what_the_tests_change_in_commands_is_still_there():
    text = "".join(block.text for block in blocks(CLOUD))
    assert [old for old in (*SMALLER, LOCAL_SSD) if old not in text] == []
