"""Settings of every test: one seed, one thread, uninitialised memory filled with NaN."""

import logging
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Without a GPU the kernels run in Triton's interpreter, which is chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The suite runs in parallel, so more threads per process would compete for cores. Examples are the
# same in every run, so that a failure stays until its cause is fixed.
torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, max_examples=20, derandomize=True)
settings.register_profile("release", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("suite")

# Left out of `make quick`: tests that interpret kernels, train models or start processes.
SLOW = (
    "tests/bench/test_command.py::test_a_quick_run",
    "tests/benchmarks/test_training.py",
    "tests/context_parallel/test_context_parallel.py",
    "tests/fuzz/test_random_damage.py",
    "tests/model/test_learning.py",
    "tests/model/test_transformer.py::test_compiles",
    "tests/nn/test_core.py::test_compiles",
    "tests/nn/test_multihead.py::test_compiles",
    "tests/ops/backends/cpu/native/test_library.py",
    "tests/ops/backends/triton/",
    "tests/ops/test_varlen.py",
    "tests/study/test_run.py",
    "tests/test_cli.py::test_a_closed_pipe",
    "tests/test_cli.py::test_a_full_disk",
    "tests/test_cli.py::test_any_bytes",
    "tests/test_cli.py::test_two_ranks",
    "tests/train/test_alignment.py",
    "tests/train/test_data_parallel.py",
    "tests/train/test_kill.py",
    "tests/translation/test_translator.py::test_a_line_of_100_000_characters",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow folders and files."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")


class FailuresAtOnce:
    """Plugin that prints a failure when it happens, because a time limit may cut the summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the end of the traceback of a failed test."""
        if report.failed:
            text = "\n".join(report.longreprtext.splitlines()[-30:])
            self.terminal.write_line(f"\n{report.nodeid}\n{text}", flush=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print failures at once with `pytest -v`."""
    config = session.config
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    # The project settings hold a `-q`.
    if config.option.verbose >= 0 and isinstance(terminal, pytest.TerminalReporter):
        config.pluginmanager.register(FailuresAtOnce(terminal))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch before each test, and return the seed."""
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True)
def unchanged_settings() -> Iterator[None]:
    """Restore settings of the process that benchmarks and the server change."""
    log = logging.getLogger("reluformer")
    level, precision = log.level, torch.get_float32_matmul_precision()
    yield
    log.setLevel(level)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill memory from `torch.empty` and similar functions with NaN (integers: the largest value).

    Fresh memory is often zero, so a kernel that forgets to write its output could pass. The switch
    is torch's own and also works in C++, in compiled code and for `new_empty`.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
