"""Signals: one flag, handlers put back, and threads that can't have any."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from conftest import ROOT

from common.preemption import SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def hang_ups_are_not_ignored():
    """As they are when the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_each_signal_sets_the_flag_and_a_second_one_changes_nothing(number):
    before = [signal.getsignal(one) for one in SIGNALS]
    with StopSignals() as signals:
        assert signals.asked is None
        os.kill(os.getpid(), number)
        assert signals.asked == number.name
        for other in SIGNALS:
            os.kill(os.getpid(), other)
        assert signals.asked == number.name
    assert [signal.getsignal(one) for one in SIGNALS] == before
    with StopSignals() as signals:
        assert signals.asked is None


def test_a_signal_that_no_run_looked_at_is_the_next_runs():
    with StopSignals() as first:
        assert first.asked is None
        os.kill(os.getpid(), signal.SIGTERM)  # after its last look
    with StopSignals() as second:
        assert second.asked == "SIGTERM"
    with StopSignals() as third:
        assert third.asked is None


def test_a_run_within_another_does_not_hide_the_signal():
    with StopSignals() as outer:
        with StopSignals() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.asked == "SIGTERM"
        assert outer.asked == "SIGTERM"


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.asked is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_installs_no_handler_and_can_be_asked():
    seen = []

    def work():
        with StopSignals() as signals:
            seen.append(signals.asked)
            signals.ask("somebody")
            seen.append(signals.asked)

    before = [signal.getsignal(one) for one in SIGNALS]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, "somebody"]
    assert [signal.getsignal(one) for one in SIGNALS] == before


@pytest.mark.parametrize(("name", "caught"), [("my_script.py", True), ("evaluate.py", False)])
def test_a_training_script_listens_from_its_first_import_on_and_other_programs_do_not(tmp_path, name, caught):
    (tmp_path / "common").mkdir()
    for module in ("preemption.py", "signals.py"):
        (tmp_path / "common" / module).write_text((ROOT / "common" / module).read_text())
    (tmp_path / name).write_text(
        "import common.preemption, os, signal\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "with common.preemption.StopSignals() as signals:\n"
        "    print(signals.asked)\n"
    )
    done = subprocess.run([sys.executable, str(tmp_path / name)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == ((0, "SIGTERM\n") if caught else (-signal.SIGTERM, ""))
