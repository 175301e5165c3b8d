"""Attention over ranks equals attention in one process: real processes, gloo, float64."""

import pytest

from tests.context_parallel import model_checks
from tests.context_parallel.processes import run_checks

# Under pytest-xdist with --dist loadgroup one worker runs the group, so processes start once.
pytestmark = pytest.mark.xdist_group("context parallel processes")


@pytest.fixture(scope="session")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    """Errors of all checks, by name and group size."""
    return run_checks(model_checks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, id=f"{name}-{ranks} ranks")
        for name, check in model_checks.CHECKS.items()
        for ranks in check.sizes
    ],
)
def test_ranks_agree_with_one_process(
    name: str, ranks: int, errors: dict[tuple[str, int], str]
) -> None:
    assert (name, ranks) in errors, "not run, because an earlier check of this group failed"
    assert not errors[name, ranks], errors[name, ranks]
