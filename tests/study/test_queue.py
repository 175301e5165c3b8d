"""Commands side by side, their clocks and their failures."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reluformer.study import queue as queue_module
from reluformer.study.queue import Clock, JobQueue, cpu_seconds


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_failures_say_why_and_cut_commands_do_not(tmp_path: Path) -> None:
    # The log of an earlier start is not this one's.
    (tmp_path / "silent.log").write_text("earlier\n", encoding="utf-8")
    lines: list[str] = []
    queue = JobQueue(2, time.monotonic() + 60, tmp_path, lines.append)
    commands = {
        "good": python("print('well')"),
        "bad": python("import sys; print('first', flush=True); sys.exit('the reason\\n')"),
        "silent": python("import sys; sys.exit(4)"),
    }
    assert queue.run(lambda: commands) == ["good"]
    assert queue.failed == {
        "bad": "exit status 1: the reason",
        "silent": "exit status 4: empty log",
    }
    queue.end = time.monotonic() + 0.3
    slow = {"slow": python("import time; time.sleep(60)")}
    assert queue.run(lambda: slow) == []
    assert "slow" not in queue.failed and "slow: stopped" in lines[-1]


def test_time_of_the_device_is_shared(tmp_path: Path) -> None:
    queue = JobQueue(2, time.monotonic() + 60, tmp_path, lambda line: None)
    sleep = python("import time; time.sleep(0.4)")
    queue.run(lambda: {"a": sleep, "b": sleep})
    for clock in queue.clocks.values():
        assert clock.device_seconds < 0.8 * clock.seconds


def test_time_in_which_the_runner_was_suspended_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + suspended)

    def ready() -> dict[str, list[str]]:
        nonlocal suspended
        suspended = 500.0
        return {"a": python("")}

    queue = JobQueue(1, monotonic() + 5000, tmp_path, lambda line: None)
    queue.run(ready)
    assert 0 < queue.clocks["a"].seconds < 100


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_a_stalled_command_is_started_again_and_a_busy_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "_STALL", 1.0)
    once = f"import os, time; path = {str(tmp_path / 'once')!r}; first = not os.path.exists(path); "
    once += "open(path, 'w').close(); time.sleep(60 * first)"
    busy = "import time; end = time.monotonic() + 4\nwhile time.monotonic() < end: pass"
    lines: list[str] = []
    queue = JobQueue(4, time.monotonic() + 60, tmp_path, lines.append)
    always = python("import time; time.sleep(60)")
    waits = python(f"import subprocess; subprocess.run({python(busy)!r}, check=True)")
    commands = {"once": python(once), "busy": python(busy), "waits": waits, "always": always}
    assert set(queue.run(lambda: commands)) == {"once", "busy", "waits"}
    assert queue.failed == {"always": "stalled: no CPU time for 1 s"}
    restarts = [line.partition(":")[0] for line in lines if line.endswith("started again")]
    assert sorted(restarts) == ["always", "always", "once"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_a_suspended_command_has_not_stalled() -> None:
    child = subprocess.Popen(python("import time; time.sleep(60)"))
    try:
        assert cpu_seconds(child.pid) is not None
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert cpu_seconds(child.pid) is None
    finally:
        child.kill()
        child.wait()
    assert cpu_seconds(child.pid) is None


def test_a_command_that_becomes_ready_does_not_wait_for_the_others(tmp_path: Path) -> None:
    child = tmp_path / "child"
    # The slow command ends when the child of the quick one has run.
    wait = f"import os, time\nwhile not os.path.exists({str(child)!r}): time.sleep(0.02)"
    commands = {"quick": python(""), "slow": python(wait)}
    written = python(f"open({str(child)!r}, 'w')")

    ended: list[dict[str, Clock]] = []

    def ready() -> dict[str, list[str]]:
        ended.append(queue.collect_clocks())
        return {**commands, "child": written} if len(ended) > 1 else commands

    queue = JobQueue(2, time.monotonic() + 30, tmp_path, lambda line: None)
    assert set(queue.run(ready)) == {"quick", "child", "slow"}
    assert not queue.failed
    # The clock of a command is complete when it is collected.
    assert ended[0] == {} and list(ended[1]) == ["quick"]
    clocks = {
        name: clock for part in [*ended, queue.collect_clocks()] for name, clock in part.items()
    }
    assert clocks["slow"].seconds > clocks["quick"].seconds
    assert not queue.clocks


def test_commands_end_with_a_runner_that_is_killed(tmp_path: Path) -> None:
    """Also if the runner is killed before the command watches it, as during imports."""
    watched = "import time; from reluformer.study.queue import end_with_runner as watch; "
    command = watched + "time.sleep(0.3); watch(); print('watching', flush=True); time.sleep(60)"
    runner = (
        "import os, sys, time; from pathlib import Path; from reluformer.study import queue\n"
        f"jobs = queue.JobQueue(1, time.monotonic() + 60, Path({str(tmp_path)!r}), print)\n"
        f"jobs._start('cell', [sys.executable, '-c', {command!r}])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    # The command inherits this pipe as its input; the pipe closes when the command ends.
    read, write = os.pipe()
    killed = subprocess.run([sys.executable, "-c", runner], stdin=write, check=False)
    os.close(write)
    assert killed.returncode == -9 and select.select([read], [], [], 30)[0]
    assert not (tmp_path / "cell.log").read_text()
    os.close(read)
