"""A cloud's notice, against a server that plays each cloud."""

import gc
import http.server
import json
import re
import threading
import time
import tracemalloc
from pathlib import Path

import psutil
import pytest
from conftest import wait_until

import common.checkpoint
import common.spot
import ppo_atari
from common.errors import Interrupted
from common.preemption import StopSignals
from common.spot import CLOUDS, SpotWatch, detect

CLOUD_NAMES = tuple(CLOUDS)
AWS_TOKEN, ALIBABA_TOKEN = "X-aws-ec2-metadata-token", "X-aliyun-ecs-metadata-token"
ACTION, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
TERMINATION = "/latest/meta-data/instance/spot/termination-time"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
INSTANCE, EVENTS = "/metadata/instance", "/metadata/scheduledevents"


class Played(http.server.ThreadingHTTPServer):
    """The metadata service of one cloud, on this machine."""

    daemon_threads = True

    def __init__(self, cloud: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cloud = cloud
        self.token: str | None = "AQAEAL-the-first-token=="
        self.notice: str | None = None  # the body that tells of the end
        self.advice: str | None = None
        self.machine, self.resources = "here", ["here"]
        self.rubbish: tuple[int, str] | None = None  # to every question
        self.delay = 0.0  # seconds before an answer about events
        self.questions: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, method: str, path: str, headers) -> tuple[int, str, dict[str, str]]:
        path = path.partition("?")[0]
        self.questions.append((method, path))
        if self.rubbish:
            return *self.rubbish, {}
        if self.cloud in ("aws", "alibaba"):
            name = AWS_TOKEN if self.cloud == "aws" else ALIBABA_TOKEN
            if (method, path) == ("PUT", "/latest/api/token") and headers[f"{name}-ttl-seconds"]:
                return (200, self.token, {}) if self.token else (403, "", {})
            if headers[name] != self.token:
                return 401, "", {}
            bodies = (
                {ACTION: self.notice, REBALANCE: self.advice} if self.cloud == "aws" else {TERMINATION: self.notice}
            )
            return (200, bodies[path], {}) if bodies.get(path) else (404, "<html>not found</html>", {})
        if self.cloud == "gcp" and path == PREEMPTED and headers["Metadata-Flavor"] == "Google":
            time.sleep(self.delay)
            return 200, self.notice or "FALSE", {"Metadata-Flavor": "Google"}
        if self.cloud == "azure" and headers["Metadata"] == "true":
            if path == INSTANCE:
                return 200, json.dumps({"compute": {"name": self.machine, "azEnvironment": "AzurePublicCloud"}}), {}
            if path == EVENTS:
                time.sleep(self.delay)
                return 200, self.notice or '{"DocumentIncarnation": 1, "Events": []}', {}
        return 404, "", {}


class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self) -> None:
        status, body, headers = self.server.answer(self.command, self.path, self.headers)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_PUT = reply

    def log_message(self, *words) -> None:
        pass


def azure_event(kind: str = "Preempt", machines=("here",)) -> str:
    event = {
        "EventId": "1",
        "EventType": kind,
        "Resources": list(machines),
        "NotBefore": "Mon, 19 Sep 2026 18:29:47 GMT",
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [event]})


NOTICES = {
    "aws": '{"action": "terminate", "time": "2026-12-02T08:22:00Z"}',
    "gcp": "TRUE",
    "azure": azure_event(),
    "alibaba": "2026-12-02T08:22:00Z",
}


@pytest.fixture
def played(monkeypatch):
    """`played(cloud)` plays one cloud; nobody answers for the others."""
    servers = []

    def play(cloud: str) -> Played:
        server = Played(cloud)
        servers.append(server)
        for name, kind in CLOUDS.items():
            port = server.server_address[1] if name == cloud else 9  # discard: refused
            monkeypatch.setattr(kind, "host", f"127.0.0.1:{port}")
        return server

    yield play
    for server in servers:
        server.shutdown()
        server.server_close()


class Told:
    """What a watcher says and does."""

    def __init__(self) -> None:
        self.signals, self.lines = StopSignals(), []

    def __enter__(self) -> "Told":
        self.signals.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.signals.__exit__(*error)

    def watch(self, name: str) -> SpotWatch:
        return SpotWatch(name, self.signals, self.lines.append)


def watching() -> bool:
    return any(thread.name == "spot-watch" for thread in threading.enumerate())


def quick(monkeypatch, poll: float = 0.02) -> None:
    monkeypatch.setattr(common.spot, "POLL", poll)


# ---- which cloud


@pytest.mark.parametrize("cloud", CLOUD_NAMES)
def test_auto_finds_each_cloud_and_its_lead_time_within_two_seconds(cloud, played):
    played(cloud)
    began = time.monotonic()
    found = detect()
    assert time.monotonic() - began < 2
    assert type(found) is CLOUDS[cloud]
    assert found.lead == {"aws": 120, "gcp": 30, "azure": 30, "alibaba": 300}[cloud]


@pytest.mark.parametrize("answer", [(403, "denied"), (200, "<html>log in here</html>"), (200, "{}"), (500, "")])
def test_a_proxy_or_portal_that_answers_everything_is_no_cloud(answer, played):
    server = played("aws")
    for kind in CLOUDS.values():  # `played` puts them back
        kind.host = f"127.0.0.1:{server.server_address[1]}"
    server.rubbish = answer
    assert detect() is None
    assert len(server.questions) == len(CLOUDS)


def test_an_address_that_swallows_everything_costs_two_seconds_at_most(monkeypatch):
    listener = http.server.socketserver.TCPServer(("127.0.0.1", 0), Handler)  # accepts in its backlog, answers nothing
    for kind in CLOUDS.values():
        monkeypatch.setattr(kind, "host", f"127.0.0.1:{listener.server_address[1]}")
    began = time.monotonic()
    assert detect() is None
    assert time.monotonic() - began < 2
    listener.server_close()


def test_elsewhere_the_watcher_ends_and_says_nothing(monkeypatch):
    for kind in CLOUDS.values():
        monkeypatch.setattr(kind, "host", "127.0.0.1:9")
    monkeypatch.setattr(common.spot, "DMI", Path("/none"))
    with Told() as told, told.watch("auto"):
        wait_until(lambda: not watching())
        assert told.lines == []
        assert told.signals.lead is None


def test_off_starts_nothing(played):
    server = played("aws")
    server.notice = NOTICES["aws"]
    with Told() as told, told.watch("off"):
        assert not watching()
    assert server.questions == []


def test_proxies_of_the_environment_are_not_asked(played, monkeypatch):
    played("gcp")
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert isinstance(detect(), common.spot.Google)


def test_aws_out_of_reach_from_a_container_is_explained_in_one_line(tmp_path, monkeypatch):
    for kind in CLOUDS.values():
        monkeypatch.setattr(kind, "host", "127.0.0.1:9")
    monkeypatch.setattr(common.spot, "DMI", tmp_path)
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    for name in ("auto", "aws"):
        with Told() as told, told.watch(name):
            wait_until(lambda told=told: told.lines)
            (line,) = told.lines
        assert "--http-put-response-hop-limit 2" in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("file", "words", "name"),
    [
        ("sys_vendor", "Amazon EC2", "aws"),
        ("product_name", "Google Compute Engine", "gcp"),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),
        ("sys_vendor", "Alibaba Cloud", "alibaba"),
    ],
)
def test_a_cloud_that_made_the_machine_and_answers_late_is_watched(file, words, name, tmp_path, played, monkeypatch):
    quick(monkeypatch)
    server = played(name)
    server.rubbish = (503, "")  # while the machine starts
    monkeypatch.setattr(common.spot, "DMI", tmp_path)
    (tmp_path / file).write_text(words + "\n")
    with Told() as told, told.watch("auto"):
        wait_until(lambda: told.lines)
        assert "does not answer" in told.lines[0]
        server.rubbish, server.notice = None, NOTICES[name]
        wait_until(lambda: told.signals.asked)


# ---- the notice


@pytest.mark.slow
@pytest.mark.parametrize("cloud", CLOUD_NAMES)
def test_a_notice_counts_as_a_signal_within_six_seconds(cloud, played):
    server = played(cloud)
    with Told() as told, told.watch("auto"):
        wait_until(lambda: told.signals.lead)
        wait_until(lambda: len(server.questions) >= 3)  # the worst moment: just after a question
        assert told.signals.asked is None
        server.notice = NOTICES[cloud]
        assert wait_until(lambda: told.signals.asked) < 6
        assert told.signals.asked.startswith({"gcp": "Google"}.get(cloud, cloud.capitalize().replace("Aws", "AWS")))
        assert told.lines == []


RUBBISH = [
    ("aws", "<html>TRUE</html>"),
    ("aws", '["terminate"]'),
    ("aws", '{"action": "none"}'),
    ("gcp", "FALSE"),
    ("gcp", "<html>TRUE</html>"),
    ("azure", "TRUE"),
    ("azure", '{"Events": "Preempt"}'),
    ("azure", '{"Events": ["Preempt"]}'),
    ("azure", azure_event("Freeze")),
    ("azure", azure_event(machines=["another_of_the_scale_set"])),
    ("alibaba", "soon"),
    ("alibaba", "<html>2026-12-02T08:22:00Z</html>"),
]


@pytest.mark.parametrize(("cloud", "body"), RUBBISH)
def test_what_is_no_notice_stops_nothing_and_the_next_one_is_seen(cloud, body, played, monkeypatch):
    quick(monkeypatch)
    server = played(cloud)
    server.notice = body
    with Told() as told, told.watch(cloud):
        wait_until(lambda: len(server.questions) > 8)
        assert told.signals.asked is None
        server.notice = NOTICES[cloud]
        wait_until(lambda: told.signals.asked)


def test_what_comes_over_the_network_is_fit_for_a_terminal(played, monkeypatch):
    quick(monkeypatch)
    server = played("aws")
    server.notice = json.dumps({"action": "stop", "time": "\x1b[2J" + "9" * 500})
    with Told() as told, told.watch("aws"):
        wait_until(lambda: told.signals.asked)
        assert "\x1b" not in told.signals.asked
        assert len(told.signals.asked) < 80


@pytest.mark.parametrize("cloud", ["aws", "alibaba"])
def test_a_token_that_ran_out_is_renewed(cloud, played, monkeypatch):
    quick(monkeypatch)
    server = played(cloud)
    with Told() as told, told.watch(cloud):
        wait_until(lambda: len(server.questions) > 4)
        server.token = "AQAEAL-the-second-token=="
        server.notice = NOTICES[cloud]
        wait_until(lambda: told.signals.asked)
    assert server.questions.count(("PUT", "/latest/api/token")) == 2


def test_a_token_is_renewed_before_it_runs_out(played, monkeypatch):
    quick(monkeypatch)
    monkeypatch.setattr(common.spot, "TOKEN_TTL", 0.2)
    server = played("aws")
    with Told() as told, told.watch("aws"):
        wait_until(lambda: server.questions.count(("PUT", "/latest/api/token")) >= 3)
    assert told.lines == []


def test_a_machine_that_answers_without_a_token_is_watched_too(played, monkeypatch):
    quick(monkeypatch)
    server = played("aws")
    server.token = None  # refused; questions without one are answered
    server.notice = NOTICES["aws"]
    with Told() as told, told.watch("aws"):
        wait_until(lambda: told.signals.asked)


def test_advice_to_rebalance_asks_for_one_checkpoint_and_stops_nothing(played, monkeypatch):
    quick(monkeypatch)
    server = played("aws")
    server.advice = '{"noticeTime": "2026-12-02T08:22:00Z"}'
    with Told() as told, told.watch("aws"):
        wait_until(lambda: told.signals.advised)
        told.signals.advised = False
        seen = len(server.questions)
        wait_until(lambda: len(server.questions) > seen + 6)
        assert not told.signals.advised
        assert told.signals.asked is None
        assert told.lines == [
            "AWS's advice of 2026-12-02T08:22:00Z to rebalance: a checkpoint is made, training goes on"
        ]


def test_azure_may_take_minutes_for_its_first_answer_about_events(played, monkeypatch):
    quick(monkeypatch)
    monkeypatch.setattr(common.spot, "ANSWER", 0.2)
    server = played("azure")
    server.notice, server.delay = NOTICES["azure"], 1.0
    with Told() as told, told.watch("azure"):
        wait_until(lambda: told.signals.asked)
    assert server.questions.count(("GET", EVENTS)) == 1


def test_a_service_that_falls_silent_is_reported_once_and_asked_again(played, monkeypatch):
    quick(monkeypatch)
    monkeypatch.setattr(common.spot, "SILENT", 0.1)
    monkeypatch.setattr(common.spot, "ANSWER", 0.1)
    server = played("gcp")
    with Told() as told, told.watch("gcp"):
        wait_until(lambda: len(server.questions) > 3)
        server.delay = 0.5
        wait_until(lambda: told.lines)
        server.rubbish, server.delay = (503, ""), 0.0
        seen = len(server.questions)
        wait_until(lambda: len(server.questions) > seen + 5)
        assert len(told.lines) == 1
        assert "Google does not answer" in told.lines[0]
        server.rubbish = None
        wait_until(lambda: len(told.lines) == 2)
        assert told.lines[1] == "Google answers again"
        server.notice = "TRUE"
        wait_until(lambda: told.signals.asked)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("cloud", CLOUD_NAMES)
def test_a_day_of_questions_leaves_no_memory_and_no_connection(cloud, played, monkeypatch):
    """24 hours, 17,280 questions: the clock of the watcher stands still between two."""
    monkeypatch.setattr(common.spot, "POLL", 0.0)
    server = played(cloud)
    process = psutil.Process()
    server.questions = Count()
    per_poll = 2 if cloud == "aws" else 1

    def traced() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with Told() as told, told.watch(cloud):
        wait_until(lambda: server.questions.number > 500)
        tracemalloc.start()
        try:
            memory, files, threads = traced(), process.num_fds(), threading.active_count()
            wait_until(lambda: server.questions.number > per_poll * 17280, seconds=280)
            assert traced() - memory < 100_000
            assert process.num_fds() <= files + 4  # those of the moment
            assert threading.active_count() <= threads + 2
        finally:
            tracemalloc.stop()
        assert told.lines == []
        assert told.signals.asked is None


class Count:
    """In place of a list that would grow."""

    number = 0

    def append(self, question) -> None:
        self.number += 1


# ---- in a run


SMALL = dict(num_envs=2, num_steps=16, num_minibatches=2, update_epochs=1, total_timesteps=320, checkpoint_minutes=0.0)


def train(tmp_path, name: str, **flags):
    return ppo_atari.train(ppo_atari.Args(runs_dir=str(tmp_path), run_name=name, **{**SMALL, **flags}))


def test_a_notice_ends_a_run_as_a_signal_does_and_the_same_command_goes_on(tmp_path, played, monkeypatch, capsys):
    quick(monkeypatch)
    server = played("gcp")
    server.notice = "TRUE"
    with pytest.raises(Interrupted, match=r"interrupted by Google's notice of preemption: .*step-.* is saved"):
        train(tmp_path, "a", total_timesteps=32_000)
    assert json.loads((tmp_path / "a" / "status.json").read_text())["phase"] == "interrupted"
    server.notice = None
    saved = max((tmp_path / "a" / "checkpoints").glob("step-*.pt"))
    assert f"{saved} is saved, the same command goes on from there" in capsys.readouterr().out
    server.notice = "TRUE"  # the machine is still there, and so is its notice
    with pytest.raises(Interrupted, match="interrupted by Google"):
        train(tmp_path, "a", total_timesteps=32_000)
    status = json.loads((tmp_path / "a" / "status.json").read_text())
    assert status["cut_restores"]["count"] == 0


def test_advice_makes_a_checkpoint_in_a_run_that_goes_on(tmp_path, played, monkeypatch):
    quick(monkeypatch)
    server = played("aws")
    saved = []
    real = ppo_atari.Checkpoints._write

    def noting(checkpoints):
        saved.append(checkpoints.snapshot["progress"]["global_step"])
        real(checkpoints)
        server.advice = '{"noticeTime": "2026-12-02T08:22:00Z"}'

    monkeypatch.setattr(ppo_atari.Checkpoints, "_write", noting)
    assert train(tmp_path, "a", total_timesteps=640)["global_step"] == 640
    assert len(saved) == 3  # the first boundary, the advice, the end
    assert saved[0] == 0 < saved[1] < 640 == saved[2]


@pytest.mark.parametrize(("lead", "warned"), [(60.0, False), (8.2, True)])
def test_a_save_that_a_notice_is_too_short_for_is_warned_of_once(tmp_path, played, monkeypatch, capsys, lead, warned):
    played("gcp")
    monkeypatch.setattr(common.spot.Google, "lead", lead)  # 6 until it is seen, 1 to leave, three times a save
    real = common.checkpoint.pack

    def slow(content):
        time.sleep(0.5)
        return real(content)

    monkeypatch.setattr(common.checkpoint, "pack", slow)
    train(tmp_path, "a", total_timesteps=128, checkpoint_minutes=1e-6, spot_watch="gcp")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a save took")]
    assert len(lines) == warned
    if warned:
        assert float(re.match(r"a save took ([\d.]+) s", lines[0])[1]) >= 0.5
        assert "this cloud gives 8;" in lines[0]
        assert "--checkpoint-minutes" in lines[0]
