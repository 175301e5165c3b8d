"""Attention over ranks equals attention in one process: real processes, gloo, float64."""

from pathlib import Path

from tests.context_parallel import model_checks
from tests.context_parallel.processes import SIZES, run


def test_ranks_agree_with_one_process(tmp_path: Path) -> None:
    # One test, as processes are started once for all checks: these and those they build on.
    found = run(model_checks, tmp_path)
    errors = "\n".join(f"{name}: {error}" for name, error in found.items() if error)
    assert not errors, errors
    assert set(found) == {f"{name}-{ranks}" for name in model_checks.CHECKS for ranks in SIZES}
