"""Packed sequences of the benchmark, in the interpreter: their lengths and their check."""

from dataclasses import replace

from reluformer.bench.cases import Case
from reluformer.bench.features import features
from reluformer.bench.gate import check
from tests.ops.backends.triton.test_op import on_cpu

pytestmark = on_cpu
RAGGED = "packed and ragged, for the same work"
CASE = Case("features", "cpu", "float32", 3, 2, 2, 24, 24, 16)


def test_packed_sequences_pass_the_gate() -> None:
    for case in (CASE, replace(CASE, causal=True)):
        found = features(case)
        for name in ("packed", RAGGED):
            assert check(case, found[name]).passed


def test_ragged_sequences_are_half_of_the_longest_on_average() -> None:
    ragged = features(CASE)[RAGGED]
    # 4 + 20, 12 + 12 and 20 + 4 tokens.
    assert ragged.work == 2 * (4**2 + 12**2 + 20**2) / (3 * 24**2)
    assert features(CASE)["packed"].work == 1.0


def test_the_gate_refuses_sequences_cut_elsewhere() -> None:
    found = features(CASE)
    whole = replace(found[RAGGED], run=found["packed"].run)
    assert check(CASE, whole).refused
