"""The module that holds the differences between Triton versions."""

import logging

import pytest
import triton

from reluformer.ops.backends.triton import direct, versions


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The way to pretend that another version is installed."""
    for function in (versions.runs_hopper, versions.has_known_launcher, versions.warn_if_untested):
        function.cache_clear()
        monkeypatch.setattr(versions, function.__name__, function.__wrapped__)
    return monkeypatch


def test_the_installed_version_is_tested() -> None:
    assert versions.PORTABLE[0] <= versions.installed() <= versions.PORTABLE[1]


def test_the_installed_version_has_every_renamed_function() -> None:
    for function in (versions.thread_barrier, versions.tma_load, versions.tma_store):
        assert function.__triton_builtin__


@pytest.mark.parametrize(
    ("name", "hopper", "known_launcher"),
    [("3.6.0", True, True), ("3.7.1", False, False), ("3.9.0+git1", True, True),
     ("3.10.0rc1", False, False), ("4.0.0", False, False)],
)  # fmt: skip
def test_only_tested_versions_run_hopper_kernels(
    version: pytest.MonkeyPatch, name: str, hopper: bool, known_launcher: bool
) -> None:
    version.setattr(triton, "__version__", name)
    assert versions.runs_hopper() == hopper
    assert versions.has_known_launcher() == known_launcher


@pytest.mark.parametrize(
    ("name", "is_hopper", "warning"),
    [("3.6.0", True, ""), ("3.8.0", False, ""), ("3.9.0", False, ""),
     ("3.9.0", True, ""),
     ("3.7.1", True, "The Hopper kernels are not tested with Triton 3.7.1 (tested: 3.6 and 3.9)"),
     ("3.8.0", True, "The Hopper kernels are not tested with Triton 3.8.0"),
     ("3.10.0", False, "Triton 3.10.0 is not tested"), ("3.10.0", True, "portable kernels")],
)  # fmt: skip
def test_an_untested_version_is_logged(
    version: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, is_hopper: bool,
    warning: str,
) -> None:  # fmt: skip
    version.setattr(triton, "__version__", name)
    with caplog.at_level(logging.WARNING, logger="reluformer"):
        versions.warn_if_untested(is_hopper)
    assert warning in caplog.text and bool(warning) == bool(caplog.records)


def test_the_warning_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    versions.warn_if_untested.cache_clear()
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    with caplog.at_level(logging.WARNING, logger="reluformer"):
        for _ in range(3):
            versions.warn_if_untested(True)
    versions.warn_if_untested.cache_clear()
    assert len(caplog.records) == 1


def test_an_unknown_launcher_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "has_known_launcher", lambda: False)
    # Not even the attributes of the compiled kernel are read.
    assert direct.direct_launch(object(), (), (), ()) is None
