"""A trial of sweep.py: the process of a training script, in a Ray actor, and what the script makes of command lines."""

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from common.errors import UsageError
from common.files import read_json

ROOT = Path(__file__).parent.parent
NO_GAME = -1e30  # mean return before a game is over; finite, for ASHA interpolates between returns
# seconds
POLL = 1.0  # after which Tune may stop a trial
AGAIN = 3.0  # between status 75, or a folder in use, and the next start
EXITS = 20.0  # that a trial has to save a checkpoint
MARK = "-- interrupted, status 75"  # in a trial's log

# Reads script and command lines from stdin: names of runs and what is wrong, without a word of the script being run.
CHECK = """
import importlib, json, sys
from pathlib import Path
root, script, lines = json.load(sys.stdin)
sys.path[:0] = [str(Path(script).resolve().parent), root]
module = importlib.import_module(Path(script).stem)
from common import args as common_args
if not hasattr(module, "Args"):
    sys.exit(f"{script} is no training script: it has no Args")

def environment(env_id, known={}):
    if env_id not in known:
        try:
            if hasattr(module, "AtariEnvs"):
                from common.envs import atari_settings
                atari_settings(env_id)
            if hasattr(module, "ControlEnvs"):
                from common.control import make_env
                make_env(env_id).close()
            known[env_id] = None
        except common_args.UsageError as error:
            known[env_id] = error
    if known[env_id]:
        raise known[env_id]

def look(words):
    try:
        args = common_args.parse(module.Args, words, "")
        args.check()
        environment(args.env_id)
        name = common_args.default_run_name(args, Path(script).stem)
        return {"name": name, "steps": args.total_timesteps, "env_id": args.env_id, "seed": args.seed}
    except common_args.UsageError as error:
        return {"error": " ".join(str(error).split())}

run = sys.modules.get("common.run")  # of all scripts of ours
print()
print(json.dumps({"revision": run and run.git_revision(), "runs": [look(words) for words in lines]}))
"""


def check(script: str, lines: list[list[str]]) -> tuple[list[dict[str, Any]], str | None]:
    """What the script makes of command lines, in one process of its own.

    Returns:
        for each `name` of the run, `steps`, `env_id` and `seed`, or `error`; and the revision of the code.

    Raises:
        UsageError: it cannot be imported.
    """
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        input=json.dumps([str(ROOT), script, lines]),
        capture_output=True,
        text=True,
        preexec_fn=die_with_parent,
    )
    if done.returncode:
        raise UsageError(f"{script}: {(done.stderr.strip() or 'it ended').splitlines()[-1]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["runs"], answer["revision"]


def die_with_parent() -> None:
    """In the child: the kernel ends it when its parent ends, however that does (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Training:
    """The process of one trial, started again as often as it leaves with status 75."""

    def __init__(self, job: dict[str, Any], words: list[str], name: str) -> None:
        """`job`: what all trials share, see `sweep.sweep`. `name`: of the run."""
        # of the copy of the code that this node has; a path that is none of ours is the same everywhere
        self.script = str(ROOT / job["script"])
        self.job, self.name = job, name
        self.run_dir = Path(job["runs_dir"]) / name
        self.words = [*words, "--runs-dir", job["runs_dir"]]
        if job["mirror"]:
            self.words += ["--mirror", job["mirror"]]
        if job["price_per_hour"]:
            self.words += ["--price-per-hour", repr(job["price_per_hour"] * share_of_node(job["cpus"], job["gpus"]))]
        self.log = Path(job["logs"]) / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.restarts = self.log.read_text(errors="replace").count(MARK) if self.log.exists() else 0
        self.process: subprocess.Popen | None = None
        self.start_at = 0.0

    def start(self) -> None:
        words = [sys.executable, self.script, *self.words]
        threads = str(max(1, int(self.job["cpus"])))
        with self.log.open("a") as log:
            print(f"$ OMP_NUM_THREADS={threads}", shlex.join(words), file=log, flush=True)
            # a session of its own: Ctrl-C is not for it
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ
                | {"OMP_NUM_THREADS": threads}
                | ({} if self.job["gpus"] else {"CUDA_VISIBLE_DEVICES": ""}),  # Ray leaves them visible
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def step(self) -> dict[str, Any]:
        """Wait a little and say how far it is.

        Raises:
            RuntimeError: it failed; the same command goes on from its last checkpoint.
        """
        if self.process is None:
            if (self.run_dir / "summary.json").exists():  # an earlier sweep's, or one by hand
                return self.result("complete")
            if time.monotonic() < self.start_at:
                time.sleep(min(POLL, self.start_at - time.monotonic()))
                return self.result()
            self.start()
        try:
            status = self.process.wait(POLL)
        except subprocess.TimeoutExpired:
            return self.result()
        self.process = None
        if status == 0:
            return self.result("complete")
        if status == 3:
            return self.result("limit")
        in_use = status == 2 and " is in use by " in self.last_line()
        if status == os.EX_TEMPFAIL or in_use:
            self.start_at = time.monotonic() + AGAIN
            if not in_use:
                self.restarts += 1
                with self.log.open("a") as log:
                    print(MARK, file=log)
            return self.result()
        if status == 2:
            return self.result("refused: " + self.last_line().removeprefix("error: "))
        raise RuntimeError(f"status {status}: {self.last_line()} ({self.log})")

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def result(self, end: str = "") -> dict[str, Any]:
        """A line of the report. `end`: how the trial ended, if it did."""
        status = read_json(self.run_dir / "status.json") | read_json(self.run_dir / "summary.json")
        mean = status.get("mean_return")
        return {
            "mean_return": NO_GAME if mean is None else mean,
            "global_step": status.get("global_step") or 0,
            "total_timesteps": status.get("total_timesteps") or 0,
            "games": status.get("games") or 0,
            "sps": status.get("sps") or 0.0,
            "seconds": status.get("seconds") or 0.0,
            "usd": status.get("usd") or 0.0,
            "restarts": self.restarts,
            "run": self.name,
            "state": end or ("interrupted" if self.process is None else status.get("phase") or "start"),
            "done": bool(end),
        }

    def stop(self) -> None:
        """Have it save a checkpoint and leave."""
        if self.process is None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXITS)
        self.process.kill()
        self.process.wait()


def share_of_node(cpus: float, gpus: float) -> float:
    """Of the machine on which this trial is, and whose price it pays."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (node,) = [node["Resources"] for node in ray.nodes() if node["NodeID"] == here]
    return max(cpus / node.get("CPU", cpus or 1), gpus / node.get("GPU", gpus or 1))


def end_with(driver: int) -> None:
    """End this process, and its trial with it, when the sweep's own is gone: Ray notices after half a minute."""

    def watch() -> None:
        while os.path.exists(f"/proc/{driver}"):
            time.sleep(POLL)
        os._exit(1)

    if os.path.exists(f"/proc/{driver}"):
        threading.Thread(target=watch, daemon=True).start()
