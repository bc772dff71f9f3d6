"""What a run costs: prices, dollars over interruptions, the limit."""

import datetime
import importlib
import json
import re
import time

import pytest
from conftest import read_scalars, run_script
from test_run import claim_run

import common.cost
from common.args import SharedArgs
from common.cost import Clock, age_of, dollars_per_hour, find_instance, read_prices
from common.errors import LimitReached, UsageError

HEADER = "provider,instance,gpu,gpus,vcpus,region,currency,on_demand,spot,usd_per_unit,rate_as_of,as_of,source\n"
FILE = (
    "# words\n" + HEADER + "aws,p3.2xlarge,V100,1,8,us-east-1,USD,3.06,0.52,1,,2024-01-02,here\n"
    "aws,p3.2xlarge,V100,1,8,us-west-2,USD,3.06,,1,,,there\n"
    "alibaba,gn6i,T4,1,,unknown,CNY,20,,0.15,2026-06-01,2026-06-01,\n"
    "aws,odd,T4,1,,unknown,EUR,20,much,,2026-06-01,2026-06-01,\n"
)


@pytest.fixture
def prices(tmp_path, monkeypatch):
    path = tmp_path / "prices.csv"
    path.write_text(FILE)
    monkeypatch.setattr(common.cost, "PRICES", path)
    return read_prices(path)


def test_an_instance_is_found_with_its_region_and_the_first_region_is_the_default(prices):
    assert find_instance("aws:p3.2xlarge", prices)["region"] == "us-east-1"
    assert find_instance("aws:p3.2xlarge@us-west-2", prices)["source"] == "there"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("aws:p3.2xlrage", "did you mean aws:p3.2xlarge?"),
        ("p3.2xlarge", "did you mean aws:p3.2xlarge?"),
        ("gn6i", "did you mean alibaba:gn6i?"),
        ("zzz", "known are alibaba:gn6i, aws:odd, aws:p3.2xlarge"),
        ("", "known are"),
        ("aws:p3.2xlarge@mars", "no price there, but in us-east-1, us-west-2"),
    ],
)
def test_an_unknown_instance_names_close_ones(prices, name, words):
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        find_instance(name, prices)


def test_a_price_is_in_dollars_or_unknown_or_refused(prices):
    assert dollars_per_hour(prices[0], spot=False) == 3.06
    assert dollars_per_hour(prices[0], spot=True) == 0.52
    assert dollars_per_hour(prices[1], spot=True) is None
    assert dollars_per_hour(prices[2], spot=False) == pytest.approx(3.0)
    for spot in (False, True):
        with pytest.raises(UsageError, match="is no price in US dollars"):
            dollars_per_hour(prices[3], spot)


def test_old_and_undated_prices_are_said_to_be_so(prices):
    today = datetime.date(2026, 12, 2)
    assert age_of(prices[0], today) == "as of 2024-01-02, 35 months old"
    assert age_of(prices[1], today) == "undated"
    assert age_of(prices[2], today) == "as of 2026-06-01"
    assert age_of({"as_of": "2025-06-01"}, today) == "as of 2025-06-01, 18 months old"


@pytest.mark.parametrize("content", [None, "", "a,b\n1,2\n", b"\xff\xfe\x00", HEADER])
def test_a_file_that_holds_no_prices_is_refused(tmp_path, content):
    path = tmp_path / "prices.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=r"prices"):
        read_prices(path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("aws,x,T4,1,eight,here,USD,1,,1,,,s", "vcpus eight must be a number"),
        ("aws,x,T4,1,0,here,USD,1,,1,,,s", "vcpus 0 must be a number"),
        ("aws,x,T4,1,8,here,USD,1,,2,,,s", "a US dollar is 1 US dollar: usd_per_unit must be 1"),
        ("aws,x,T4,1,8,here,EUR,1,,1.1,,,s", "the rate of EUR has no date"),
        ("aws,x,T4,1,8,here,USD,1,,1,,6.3.2025,s", "as_of 6.3.2025 is no date"),
        ("aws,x", "another number of fields"),
        ("aws,x,T4,1,8,here,USD,1,,1,,,s,more", "another number of fields"),
    ],
)
def test_a_wrong_row_of_prices_is_refused_by_its_name(tmp_path, row, words):
    path = tmp_path / "prices.csv"
    path.write_text(HEADER + row + "\n")
    with pytest.raises(UsageError, match=f"aws:x: {re.escape(words)}"):
        read_prices(path)


def test_the_file_that_is_shipped_can_be_read_and_every_price_has_a_source():
    rows = read_prices(common.cost.PRICES)
    assert {"aws:p3.2xlarge", "gcp:a2-highgpu-1g", "vast:rtx-3090"} <= {
        f"{row['provider']}:{row['instance']}" for row in rows
    }
    for row in rows:
        assert row["source"]
        assert dollars_per_hour(row, spot=False) > 0
        assert dollars_per_hour(row, spot=True) is None or dollars_per_hour(row, spot=True) > 0
        assert row["currency"] == "USD" or row["rate_as_of"]
        assert None not in {*row, *row.values()}, "a row with another number of fields"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"price_per_hour": 0.0}, "--price-per-hour 0.0: must be positive"),
        ({"price_per_hour": -1.0}, "must be positive"),
        ({"price_per_hour": float("nan")}, "finite"),
        ({"max_cost": 0.0, "price_per_hour": 1.0}, "--max-cost 0.0: must be positive"),
        ({"max_cost": 1.0}, "--max-cost 1.0: needs --price-per-hour or --instance"),
        ({"spot": True}, "--spot: means nothing without --instance"),
        ({"instance": "aws:p3.2xlarge", "price_per_hour": 1.0}, "means nothing with --price-per-hour"),
    ],
)
def test_bad_flags_are_refused(flags, words):
    with pytest.raises(UsageError, match=words):
        SharedArgs(**flags).check()


def test_an_instance_without_such_a_price_is_refused(prices):
    with pytest.raises(UsageError, match="no spot price; use --price-per-hour"):
        Clock(SharedArgs(instance="aws:p3.2xlarge@us-west-2", spot=True), "script")


class Time:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(common.cost.time, "perf_counter", lambda: self.now)


def clock_after(times, seconds, state=None, **flags):
    clock = Clock(SharedArgs(**flags), "script")
    if state:
        clock.load_state_dict(state)
    times.now += seconds
    return clock


def test_dollars_add_up_over_processes_of_different_prices(monkeypatch):
    times = Time(monkeypatch)
    first = clock_after(times, 1800, price_per_hour=2.0)
    assert first.dollars() == pytest.approx(1.0)
    second = clock_after(times, 3600, first.state_dict(), price_per_hour=0.5)
    assert (second.dollars(), second.seconds()) == (pytest.approx(1.5), 5400)
    assert second.dollars(more=3600) == pytest.approx(2.0)
    # without a price nothing is known to be spent now, and nothing that was spent is forgotten
    third = clock_after(times, 3600, second.state_dict())
    assert third.dollars() is None
    fourth = clock_after(times, 0, third.state_dict(), price_per_hour=3.0)
    assert fourth.dollars() == pytest.approx(4.5)  # the hour of unknown price counts as it would now


def test_the_later_of_heartbeat_and_checkpoint_counts(monkeypatch):
    times = Time(monkeypatch)
    clock = clock_after(times, 0, price_per_hour=1.0)
    clock.load_state_dict({"seconds": 7200.0, "dollars": 2.0, "unpriced_seconds": 0.0})
    clock.load_state_dict({"seconds": 3600.0, "dollars": 1.0, "unpriced_seconds": 0.0})
    assert (clock.seconds(), clock.dollars()) == (7200.0, 2.0)
    # of a version that counted no money
    old = clock_after(times, 0, {"seconds": 3600.0}, price_per_hour=4.0)
    assert old.dollars() == pytest.approx(4.0)


def test_the_limit_counts_what_is_still_to_come(monkeypatch):
    times = Time(monkeypatch)
    clock = clock_after(times, 1800, price_per_hour=2.0, max_cost=1.5)
    assert not clock.exceeds()
    assert not clock.exceeds(more=899)
    assert clock.exceeds(more=900)
    assert not clock_after(times, 1e9, price_per_hour=2.0).exceeds(1e9)


def test_money_stands_in_curves_status_progress_line_and_bill(tmp_path):
    with claim_run(tmp_path, price_per_hour=3600.0) as run:
        run.start()
        run.ready()
        run.clock.since = time.perf_counter() - 100.0  # as if it had lived so long: a dollar a second
        run.progress.global_step = 500
        run.sps = 5.0
        assert run.seconds_left() == 100.0
        line = run.progress_line()
        run.log_iteration({})
        status = json.loads((run.dir / "status.json").read_text())
        run.write_status()
        status = json.loads((run.dir / "status.json").read_text())
        bill = run.bill()
    assert "left 0:01:40  $100." in line
    assert " of 200." in line
    assert status["usd"] == pytest.approx(100, abs=5)
    assert status["usd_per_million_steps"] == pytest.approx(200_000, rel=0.05)
    assert status["price_per_hour"] == 3600.0
    assert bill.startswith("500 steps in 0:01:4")
    assert "at $3,600.000 an hour" in bill
    curves = read_scalars(tmp_path / "a", timed=True)
    assert curves["cost/usd"][0][1] == pytest.approx(100, abs=5)
    assert curves["cost/hours"][0][1] == pytest.approx(100 / 3600, rel=0.05)
    assert {"cost/usd_per_million_steps", "cost/projected_usd"} <= curves.keys()


def test_without_a_price_nothing_is_said_of_money(tmp_path):
    with claim_run(tmp_path) as run:
        run.start()
        run.ready()
        run.progress.global_step = 500
        assert "$" not in run.progress_line()
        assert "$" not in run.bill()
        run.log_iteration({})
        assert "usd" not in json.loads((run.dir / "status.json").read_text())
    assert {tag for tag in read_scalars(tmp_path / "a", timed=True) if "cost" in tag} == {"cost/hours"}


TINY = {
    "ppo_atari": dict(num_envs=2, num_steps=8, num_minibatches=1),
    "ppo_continuous": dict(env_id="Pendulum-v1", num_steps=64, num_minibatches=2),
    "dqn_atari": dict(num_envs=2, buffer_size=400, learning_starts=16, batch_size=2),
}
DOLLAR_A_SECOND = 3600.0


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[] if name == "ppo_atari" else pytest.mark.slow) for name in TINY]
)
def test_a_run_stops_in_time_at_its_limit(tmp_path, script, capsys):
    module = importlib.import_module(script)
    flags = dict(TINY[script], run_name="a", runs_dir=str(tmp_path), price_per_hour=DOLLAR_A_SECOND)
    with pytest.raises(LimitReached) as stop:
        module.train(module.Args(**flags, max_cost=5.0))
    status = json.loads((tmp_path / "a" / "status.json").read_text())
    assert status["phase"] == "limit"
    assert 3 < status["usd"] <= 5, "it stops before the limit, and not long before"
    assert status["global_step"] > 0
    (checkpoint,) = re.findall(r"checkpoints/step-(\d+).pt is saved", str(stop.value))
    # where an iteration takes longer than the one before, as on a busy machine, it was begun and not paid to its end
    begun = flags.get("num_steps", 0) * flags.get("num_envs", 1)
    assert 0 <= status["global_step"] - int(checkpoint) <= begun, "not more than one iteration is lost"
    capsys.readouterr()
    with pytest.raises(LimitReached):
        module.train(module.Args(**flags, max_cost=5.0))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("stopped at the limit"), "what was too little then is not tried again: nothing is restored"


@pytest.mark.slow
@pytest.mark.extended
def test_the_limit_is_status_3_at_once_the_second_time_and_a_higher_one_goes_on(tmp_path):
    flags = ["--env-id", "Pendulum-v1", "--num-steps", "64", "--num-minibatches", "2"]
    flags += ["--run-name", "a", "--runs-dir", str(tmp_path), "--price-per-hour", str(DOLLAR_A_SECOND), "--max-cost"]
    done = run_script("ppo_continuous.py", *flags, "15", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    *_, bill, last = done.stdout.splitlines()
    assert " at $3,600.000 an hour" in bill
    assert re.fullmatch(r"stopped at the limit, \$1\d\.\d+ of --max-cost 15 spent: .* is saved, .*", last)

    again = run_script("ppo_continuous.py", *flags, "15", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (3, "")
    (line,) = again.stdout.splitlines()
    assert line.startswith("stopped at the limit")

    more = run_script("ppo_continuous.py", *flags, "30", cwd=tmp_path)
    assert more.returncode == 3
    step = int(re.search(r"step-(\d+)\.pt is saved", last)[1])
    assert f"resumed at step {step:,} from" in more.stdout


@pytest.mark.slow
def test_an_instance_names_its_price_at_the_start_and_is_no_part_of_the_runs_name(tmp_path):
    tiny = ["--env-id", "Pendulum-v1", "--num-steps", "64", "--num-minibatches", "2", "--total-timesteps", "64"]
    tiny += ["--runs-dir", str(tmp_path)]
    done = run_script("ppo_continuous.py", *tiny, "--instance", "gcp:a2-highgpu-1g", "--spot", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gcp:a2-highgpu-1g spot in us-central1: $1.293 an hour, as of 2025-03-06" in done.stdout
    again = run_script("ppo_continuous.py", *tiny, cwd=tmp_path)
    assert "complete already" in again.stdout
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["usd"] == pytest.approx(summary["seconds"] / 3600 * 1.293, rel=1e-3)
