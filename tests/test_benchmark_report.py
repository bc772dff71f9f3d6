"""Which GPU, how fast, how many dollars: result files, the audit, the projection, the report."""

import argparse
import copy
import datetime
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, run_script

from benchmark import projection, report, results
from benchmark.audit import audit, frames_of, read_published
from benchmark.figures import KINDS, Number
from benchmark.projection import Model, calibrate, check
from common.cost import PRICES, age_of, read_prices

# ---- result files whose truth is known


def setting(name, num_envs, sps, shares, script="ppo_atari", kind="script", precision="fp32"):
    one = dict(windows=[sps * x for x in (0.9, 1.0, 1.2)], shares=shares, peak_memory_mib=500.0, gpu_memory_mib=None)
    about = dict(name=name, kind=kind, script=script, precision=precision, num_envs=num_envs, command="python x.py")
    return {**about, "rounds": [{**one, "power_w": None}]}


def result_of(model: Model, envs=(2, 4, 8, 16), slower: float = 1.0):
    """What a machine would measure that is exactly as the model says, or `slower` where it has not been fitted."""
    settings = []
    for num_envs in envs:
        parts = model.parts(num_envs)
        total = sum(parts.values()) * (1.0 if num_envs in (envs[0], envs[-1]) else slower)
        shares = {part: time / sum(parts.values()) for part, time in parts.items()}
        settings.append(setting(projection.SWEEP.format(num_envs), num_envs, 1e6 / total, shares))
    for script in ("ppo_atari", "dqn_atari"):
        sps = model.sps(8, script) / slower
        settings.append(setting(f"{script} fp32", 8, sps, {"environment": 0.2}, script))
    machine = {"cpu": "Test <b>CPU</b>", "available_cores": model.cores, "torch_threads": model.cores, "gpu": None}
    machine |= {"cuda": None, "packages": {"torch": "2.13.0", "ale-py": "0.12.1"}}
    content = {"schema": results.SCHEMA, "version": results.VERSION, "measured_on": "2026-12-02", "command": []}
    return {**content, "machine": machine, "settings": settings}


TRUTH = Model(emulation=900.0, call=1500.0, observation=150.0, rate=120_000.0, cores=2)


def test_the_operations_of_the_network_are_counted_from_torchs_own_layers():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from ppo_atari import Agent

    agent = Agent(4)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        agent(torch.zeros(1, 84, 84, 4, dtype=torch.uint8))
    with FlopCounterMode(display=False) as both:
        log_probs, value = agent(torch.zeros(1, 84, 84, 4, dtype=torch.uint8))
        (log_probs.sum() + value.sum()).backward()
    assert forward.get_total_flops() == pytest.approx(projection.FORWARD, rel=0.01)
    assert both.get_total_flops() == pytest.approx(projection.FORWARD + projection.BACKWARD, rel=0.01)


def test_a_machine_that_is_as_the_model_says_is_found_again_and_predicted_without_error():
    result = results.parse(result_of(TRUTH))
    model = calibrate(result)
    for name in ("emulation", "call", "observation", "rate"):
        assert getattr(model, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    checks = check(result, model)
    assert [one.name for one in checks] == [
        "ppo_atari fp32, 4 envs",
        "ppo_atari fp32, 8 envs",
        "ppo_atari fp32",
        "dqn_atari fp32",
    ]
    assert projection.error(checks) == pytest.approx(0.0, abs=1e-6)


def test_the_error_that_is_printed_is_that_of_settings_which_were_not_seen():
    result = results.parse(result_of(TRUTH, slower=1.25))
    checks = check(result, calibrate(result))
    assert [one.error for one in checks] == pytest.approx([0.25] * 4)
    assert projection.error(checks) == pytest.approx(0.25)


def test_a_step_waits_for_the_slowest_emulator_and_for_all_parts_one_after_the_other():
    model = Model(emulation=100.0, call=80.0, observation=10.0, rate=projection.PPO / 40, cores=4)
    assert model.parts(8) == pytest.approx({"environment": 25.0, "inference": 20.0, "learning": 40.0})
    assert model.parts(9)["environment"] == pytest.approx(100 * 3 / 9)
    assert model.sps(8) == pytest.approx(1e6 / 85)
    dqn = 4 * (49.46 + 18.69) / (49.46 * 4) * 2  # 32 samples with targets every 4 steps, against 4 epochs
    assert model.parts(8, "dqn_atari")["learning"] == pytest.approx(40 * dqn, rel=1e-3)


def test_no_projection_without_two_numbers_of_environments():
    content = result_of(TRUTH)
    content["settings"] = [one for one in content["settings"] if "envs" not in one["name"]]
    result = results.parse(content)
    assert calibrate(result) is None
    money = report.Money(None, "")
    text = report.to_markdown(report.Report([result], read_prices(PRICES), 1e6, money), [])
    assert "No projection" in text
    assert "~" not in text.split("## Measured here")[1]


# ---- files of others


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(schema="other"), "is no result file"),
        (lambda c: c.update(version=2), "of version 2, this program reads 3"),
        (lambda c: c.pop("machine"), "damaged: KeyError 'machine'"),
        (lambda c: c["settings"][0]["rounds"][0].pop("windows"), "damaged"),
        (lambda c: c["settings"][0]["rounds"][0].update(windows=[]), "no speeds of ppo_atari fp32, 2 envs"),
        (lambda c: c["settings"][0]["rounds"][0].update(windows=[-1.0]), "no speeds"),
        (lambda c: c["settings"][0]["rounds"][0].update(windows=["fast"]), "no speeds"),
        (lambda c: c["settings"][0].update(rounds=[]), "no rounds"),
        (lambda c: c["settings"][0].update(num_envs=0), "no number of environments"),
        (lambda c: c["machine"].update(available_cores="two"), "damaged"),
        (lambda c: c.update(settings=None), "holds no settings"),
        (lambda c: c.update(settings=5), "damaged"),
        (lambda c: c["settings"][0].update(name=5), "without a name that is a word"),
        (lambda c: c["machine"].pop("packages"), "damaged: KeyError 'packages'"),
        (lambda c: c["settings"][0]["rounds"][0]["shares"].update(environment="half"), "no shares of time"),
        (lambda c: c["settings"][0]["rounds"][0]["shares"].update(environment=0.9), "leave none for learning"),
    ],
)
def test_broken_and_foreign_result_files_are_named(tmp_path, change, words):
    content = copy.deepcopy(result_of(TRUTH))
    change(content)
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(results.ForeignFile, match=re.escape(str(path))) as refused:
        results.read(path)
    assert words in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"null"])
def test_what_is_no_json_is_named(tmp_path, content):
    path = tmp_path / "theirs.json"
    path.write_bytes(content)
    with pytest.raises(results.ForeignFile, match=re.escape(str(path))):
        results.read(path)


def test_every_result_file_that_is_shipped_can_be_read_and_projected():
    files = sorted((ROOT / "benchmark" / "results").glob("*.json"))
    assert files
    shipped = [results.read(path) for path in files]
    assert any(calibrate(result) for result in shipped)
    assert all(result.measured_on and "platform" not in result.machine for result in shipped)


def test_the_report_that_is_shipped_comes_from_the_result_files_that_are_shipped(tmp_path, monkeypatch):
    shipped = (ROOT / "docs" / "report" / "report.md").read_text()
    here = ROOT / "benchmark" / "results" / "amd-epyc-avx512-2-cores.json"
    others = [path for path in sorted(here.parent.glob("*.json")) if path != here]
    found = [results.read(path) for path in (here, *others)]
    of_that_day = datetime.date.fromisoformat(found[0].measured_on)
    monkeypatch.setattr(report, "age_of", lambda row: age_of(row, of_that_day))
    prices = read_prices(PRICES)
    frames = frames_of(read_published()[0])
    files = report.build(found, tmp_path, prices, frames, report.money_of(SHIPPED_WITH, prices))
    assert {file.name for file in files} == {file.name for file in (ROOT / "docs" / "report").iterdir()}
    assert (tmp_path / "report.md").read_text() == shipped


SHIPPED_WITH = argparse.Namespace(price_per_hour=None, instance=None, spot=False, watts=None, price_per_kwh=None)


# ---- the audit


def test_prices_of_others_need_not_have_the_articles_machines_nor_every_price(tmp_path):
    rows = read_prices(PRICES)
    own = [row for row in rows if row["provider"] == "vast"] + [dict(rows[-1], gpu="B200", instance="new")]
    found = audit(read_published(), own)
    assert {one.what for one in found} == {
        "RTX 3090: electricity",
        "V100: frames, RTX 3090 has",
        "V100: cost",
        "A100: frames, RTX 3090 has",
        "A100: cost",
    }
    result = results.parse(result_of(TRUTH))
    text = report.to_markdown(report.Report([result], own, 1e6, report.Money(None, "")), [])
    assert "No row for B200: not in gpus.csv" in text
    unknown = [dict(row, on_demand="", spot="") for row in rows]
    text = report.to_markdown(report.Report([result], unknown, 1e6, report.Money(None, "")), [])
    assert "its price is unknown" in text


def test_machines_whose_files_cannot_test_the_projection_are_named():
    other = result_of(TRUTH)
    other["machine"]["cpu"] = "Other CPU"
    other["settings"] = other["settings"][-2:]
    pair = [results.parse(result_of(TRUTH)), results.parse(other)]
    text = report.to_markdown(report.Report(pair, read_prices(PRICES), 1e6, report.Money(None, "")), [])
    assert "Not used: 2 cores of Other CPU, without runs" in text


def finding(findings, what):
    (one,) = [one for one in findings if one.what == what]
    return one


def test_every_number_of_the_audit():
    found = audit(read_published(), read_prices(PRICES))
    frames = {one.what: one.recomputed.value for one in found if "frames" in one.what}
    assert frames == {
        "V100: frames, RTX 3090 has": pytest.approx(311.04),
        "A100: frames, RTX 3090 has": pytest.approx(352.8),
    }
    assert finding(found, "V100: frames, RTX 3090 has").agrees
    a100 = finding(found, "A100: frames, RTX 3090 has")
    assert not a100.agrees
    assert "24.7 h" in a100.words
    v100 = finding(found, "V100: cost")
    assert (v100.published.value, v100.recomputed.value, v100.agrees) == (144, pytest.approx(146.88), False)
    cost = finding(found, "A100: cost")
    assert (cost.published.value, cost.recomputed.value, cost.agrees) == (201, pytest.approx(82.04), False)
    assert "$201 would be $7.18 an hour" in cost.words
    whole = finding(found, "A100: cost at the whole machine's price")
    assert whole.recomputed.value == pytest.approx(102.84, abs=0.01)
    assert "the GPU alone" in whole.words
    power = finding(found, "RTX 3090: electricity")
    assert power.recomputed.value == pytest.approx(25.2)
    assert "$0.20 a kWh" in power.words
    on_demand = finding(found, "a cup of coffee buys 8 hours of a V100, on demand")
    spot = finding(found, "a cup of coffee buys 8 hours of a V100, spot")
    assert (on_demand.recomputed.value, on_demand.agrees) == (pytest.approx(5 / 3.06), False)
    assert (spot.recomputed.value, spot.agrees) == (pytest.approx(5 / 0.52), True)
    assert all(one.published.kind in ("published", "recomputed") for one in found)
    assert all(one.recomputed.kind == "recomputed" for one in found)


def test_the_four_kinds_of_numbers_look_different_everywhere():
    numbers = [Number(5.0, kind, 1) for kind in KINDS]
    assert len({number.markdown() for number in numbers}) == 4
    assert all(f'class="{number.kind}"' in number.html() for number in numbers)
    assert all(f".{kind} {{" in report.STYLE for kind in KINDS)
    from benchmark.pictures import LOOKS

    assert len({json.dumps(LOOKS[kind], sort_keys=True) for kind in KINDS}) == 4
    assert Number(1900.0, "projected", error=0.2).plain() == "1,900 ±20% or more"
    assert Number(None, "measured").markdown() == "unknown"


# ---- the report


def test_the_report_holds_tables_pictures_and_every_figure_of_the_result_file(tmp_path):
    path = tmp_path / "mine.json"
    content = result_of(TRUTH)
    content["settings"].append(setting("ppo_atari bf16", 8, 100.0, {}, precision="bf16"))
    content["settings"].append({**setting("broken", 8, 1.0, {}), "error": "it ended with status 2"})
    path.write_text(json.dumps(content))
    out = tmp_path / "report"
    flags = ["--out", str(out), "--watts", "350", "--price-per-kwh", "0.2", "--frames", "1e9"]
    done = run_script("benchmark/report.py", str(path), *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    names = {"report.md", "report.html", "frames_per_second.png", "dollars.png", "return_against_dollars.png"}
    assert {file.name for file in out.iterdir()} == names
    text = (out / "report.md").read_text()
    sps = TRUTH.sps(8)
    assert (
        f"| ppo_atari fp32 | 8 | **{sps:,.0f}** | {0.9 * sps:,.0f} to {1.2 * sps:,.0f} | **{4 * sps:,.0f}** |" in text
    )
    hours = 1e9 / (4 * sps) / 3600
    assert f"= {hours:,.1f} | = ${hours * 0.07:,.2f} | 350 W given, $0.2 a kWh" in text
    ratio = 100.0 / TRUTH.sps(8)
    assert f"| *1.30 x* (p) | **{ratio:.2f} x** | not tested | bf16 against fp32" in text
    assert "failed: it ended with status 2" in text
    # the truth has no best number; the first of the fastest is four a core or more
    fastest = max((2, 4, 8, 16), key=TRUTH.sps)
    assert f"| 2 to 4 workers a core | 2 to 4 | **{fastest / 2:.1f}** |" in text
    p3 = calibrate(results.read(path)).on(8, 15.7)
    best = max(p3.sps(n) for n in report.ENVS)
    assert "| aws:p3.2xlarge (V100, 8 vCPUs), on demand | " in text
    assert f"~ {4 * best:,.0f} ±0% or more" in text
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert 'src="http' not in page
    assert "<b>CPU</b>" not in page
    assert "Test &lt;b&gt;CPU&lt;/b&gt;" in page


def test_a_broken_file_is_left_out_and_is_status_1_and_none_that_can_be_used_is_status_2(tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(result_of(TRUTH)))
    bad.write_text("{}")
    done = run_script("benchmark/report.py", str(good), str(bad), cwd=tmp_path)
    assert done.returncode == 1
    assert f"left out: {bad} is no result file" in done.stderr
    assert (tmp_path / "report" / "report.html").exists()
    done = run_script("benchmark/report.py", str(bad), "--out", "other", cwd=tmp_path)
    assert done.returncode == 2
    assert "no result file that can be used" in done.stderr
    assert not (tmp_path / "other").exists()


def test_without_matplotlib_the_pages_are_written_and_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "benchmark.pictures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = results.parse(result_of(TRUTH))
    files = report.build([result], tmp_path / "out", read_prices(PRICES), 1e6, report.Money(None, "nobody said"))
    assert [file.name for file in files] == ["report.md", "report.html"]
    assert "no pictures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--frames", "0"], "--frames must be positive"),
        (["--frames", "nan"], "--frames must be positive"),
        (["--price-per-hour", "-1"], "--price-per-hour -1.0: must be positive"),
        (["--price-per-hour", "1", "--instance", "aws:p3.2xlarge"], "one price is enough"),
        (["--instance", "aws:p3.2xlarg"], "did you mean aws:p3.2xlarge?"),
        (["--instance", "vast:h100", "--spot"], "no such price"),
        (["--spot"], "means nothing without --instance"),
        (["--watts", "3"], "means nothing without --price-per-kwh"),
        (["--out", "/proc/nowhere"], "cannot write into /proc/nowhere"),
    ],
)
def test_bad_input_of_the_report_is_one_line(tmp_path, flags, words, monkeypatch, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(result_of(TRUTH)))
    monkeypatch.setattr(sys, "argv", ["report.py", str(path), "--out", str(tmp_path / "out"), *flags])
    with pytest.raises(SystemExit, match="2"):
        report.main()
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_power_that_was_measured_prices_an_own_machine():
    args = report.argparse.Namespace(price_per_hour=None, instance=None, spot=False, watts=None, price_per_kwh=0.5)
    assert report.money_of(args, [], power=200.0).dollars_per_hour == pytest.approx(0.1)
    assert report.money_of(args, []) == report.Money(None, "no power was measured: give --watts")


# ---- the program that measures


def run_benchmark(tmp_path, *flags):
    command = [sys.executable, str(ROOT / "benchmark" / "run.py"), "--out", str(tmp_path / "out"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rounds", "0"], "--rounds and --frames must be positive"),
        (["--frames", "-1"], "--rounds and --frames must be positive"),
        (["--only", "sac"], "--only sac: none of ppo_atari fp32"),
        (["--instance", "zzz"], "not in prices.csv"),
        (["--out", "/proc/nowhere"], "cannot write into /proc/nowhere"),
    ],
)
def test_bad_input_of_the_benchmark_is_refused_before_anything_is_measured(tmp_path, flags, words, monkeypatch, capsys):
    import benchmark.run as benchmark

    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out"), *flags])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    out, err = capsys.readouterr()
    assert words in err
    assert "$ python" not in out
    assert not (tmp_path / "out").exists()


def test_the_settings_of_a_machine_with_a_gpu_and_of_one_without():
    from benchmark.run import programs

    cpu = {one.name: one for one in programs(gpu=False, cores=2, quick=False, peers=False)}
    assert {f"ppo_atari fp32, {n} envs" for n in (2, 4, 8, 16)} < cpu.keys()
    assert {"ppo_atari fp32", "dqn_atari fp32", "ppo_continuous fp32", "ppo_atari bf16"} < cpu.keys()
    assert cpu["ppo_atari bf16"].command[-3:] == ["--amp", "--amp-dtype", "bf16"]
    assert {name for name, one in cpu.items() if one.kind == "floor"} == {
        f"floor {script}" for script in ("ppo_atari", "dqn_atari", "ppo_continuous")
    }
    gpu = {one.name: one for one in programs(gpu=True, cores=12, quick=False, peers=True)}
    assert {f"ppo_atari fp32, {n} envs" for n in (8, 12, 24, 48, 96)} < gpu.keys()
    assert {"ppo_atari tf32", "ppo_atari amp", "sb3 ppo_atari", "sb3 dqn_atari", "sb3 ppo_continuous"} < gpu.keys()
    assert "--no-tf32" in gpu["ppo_atari fp32"].command
    assert "--no-tf32" not in gpu["ppo_atari tf32"].command
    # an environment more than a minibatch has samples
    assert all(one.window > 0 for one in programs(True, 64, False, True) if one.kind != "floor")
    assert len(programs(False, 2, True, False)) == 3


@pytest.mark.slow
def test_the_benchmark_measures_prints_its_commands_and_writes_result_and_report(tmp_path):
    only = ["--only", "ppo_atari fp32, 8", "ppo_atari fp32, 2", "ppo_continuous fp32", "sb3 ppo_continuous", "floor"]
    done = run_benchmark(tmp_path, *only, "--peers", "--instance", "aws:p3.2xlarge")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.index("$ python ppo_continuous.py --env-id HalfCheetah-v5") < done.stdout.index(
        "ppo_continuous fp32:"
    )
    result = results.read(tmp_path / "out" / "result.json")
    for name in ("ppo_atari fp32, 2 envs", "ppo_atari fp32, 8 envs", "ppo_continuous fp32"):
        one = result.settings[name]
        (measured,) = one.rounds
        assert len(measured["windows"]) >= 5
        assert one.sps.low > 10
        assert sum(measured["shares"].values()) == pytest.approx(1.0, abs=0.01)
        assert one.largest("peak_memory_mib") > 100
    assert result.settings["ppo_continuous fp32"].frames is None
    assert result.settings["sb3 ppo_continuous"].sps.median > 10
    ratio = result.ratio("ppo_continuous fp32", "floor ppo_continuous").median
    assert 0.1 < ratio < 1.2
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"**{result.settings['ppo_atari fp32, 8 envs'].sps.median:,.0f}**" in text
    assert "hostname" not in json.dumps(result.machine)


@pytest.mark.slow
def test_a_script_that_fails_half_way_is_shown_the_rest_goes_on_and_the_status_is_1(tmp_path, monkeypatch, capsys):
    import benchmark.run as benchmark

    control = ["ppo_continuous.py", "--env-id", "Pendulum-v1", "--num-steps", "64", "--num-minibatches", "2"]
    monkeypatch.setattr(benchmark, "WINDOWS", 5)
    chosen = [
        benchmark.Program("bad", "ppo_continuous", [*control, "--gamma", "2"], num_envs=1, window=64),
        benchmark.Program("good", "ppo_continuous", control, num_envs=1, window=64),
    ]
    monkeypatch.setattr(benchmark, "programs", lambda *_: chosen)
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out")])
    assert benchmark.main() == 1
    out, err = capsys.readouterr()
    assert "error: --gamma 2.0: must be" in err
    assert "good: " in out
    result = results.read(tmp_path / "out" / "result.json")
    assert len(result.settings["good"].rounds[0]["windows"]) == 5
    assert result.failed["bad"].startswith("ppo_continuous.py ended with status 2: error: --gamma 2.0")
