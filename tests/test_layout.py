"""Who may import whom, and how long files may become."""

import ast
import re

import pytest
from conftest import ROOT

SCRIPTS = ("ppo_atari", "ppo_continuous", "dqn_atari", "ppo_atari_ray")
SMALL = ("errors", "files", "signals", "track", "transfer")  # which the rest of common/ may import
MAX_LINES = {
    "ppo_atari": 400,
    "ppo_continuous": 400,
    "dqn_atari": 450,
    "ppo_atari_ray": 475,
    "sweep": 620,
    "doctor": 760,
}


def imports(path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def project_imports(path) -> set[str]:
    mine = {"common", "benchmark", "evaluate", "doctor", "drill", "sweep", *SCRIPTS}
    return {name for name in imports(path) if name.split(".")[0] in mine}


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.name)
def test_a_script_imports_common_and_no_other_script(path):
    allowed = ("common.", *SCRIPTS) if path.stem == "evaluate" else ("common.",)
    assert all(name.startswith(allowed) for name in project_imports(path))


@pytest.mark.parametrize("path", sorted((ROOT / "common").glob("*.py")), ids=lambda path: path.name)
def test_common_imports_nothing_of_ours_but_the_small_shared_helpers(path):
    assert project_imports(path) <= {f"common.{name}" for name in SMALL}


@pytest.mark.parametrize("path", sorted((ROOT / "benchmark").glob("*.py")), ids=lambda path: path.name)
def test_the_benchmark_starts_scripts_instead_of_importing_them(path):
    assert not project_imports(path) & set(SCRIPTS)


@pytest.mark.parametrize("script", MAX_LINES)
def test_a_script_can_be_read_in_one_sitting(script):
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    assert len(lines) <= MAX_LINES[script]


def test_common_stays_small():
    # a mirror, four clouds, clusters and sweeps are two fifths of it
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "common").glob("*.py")) < 5560


def test_requirements_are_pinned_to_exact_versions():
    for name in (
        "requirements.txt",
        "requirements-v100.txt",
        "requirements-cloud.txt",
        "requirements-extras.txt",
        "requirements-ray.txt",
    ):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        assert lines
        for line in lines:
            assert re.fullmatch(r"[a-z0-9-]+(\[[a-z0-9,]+\])?==[0-9][0-9.]*", line), line
