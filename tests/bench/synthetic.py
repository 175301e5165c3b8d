"""A report with invented numbers, for tests of tables and figures."""

import math

from reluformer.bench.cases import Case
from reluformer.bench.gate import Check
from reluformer.bench.measure import summarise
from reluformer.bench.report import MATMUL, Report

KINDS = {"relu triton": "relu", "SDPA-flash": "softmax", "SDPA-cuDNN": "softmax"}


def dense(n: int, causal: bool = False) -> Case:
    return Case("dense", "cuda", "bfloat16", 16384 // n, 32, 32, n, n, 64, causal)


DECODE = Case("decode", "cuda", "bfloat16", 1, 64, 8, 1, 8192, 128)
FEATURES = Case("features", "cuda", "bfloat16", 4, 32, 32, 4096, 4096, 64)


def report() -> Report:
    """Three dense cases, one decode and one features case; one refused, one absent, one skipped."""
    found = Report.begin("reluformer bench", [dense(1024), dense(4096), DECODE, FEATURES])
    found.cases.append(dense(1024, causal=True))
    for case in found.cases:
        kinds = {"plain": "relu", "dropout": "relu"} if case is FEATURES else KINDS
        found.checks += [Check(case.name, name, {"out": 2e-3, "dq": 3e-3}) for name in kinds]
        for mode in case.modes:
            times = {name: [1.0 + at, 2.0 + at] for at, name in enumerate(kinds)}
            times[MATMUL] = [1.4, 1.4]
            found.rows += summarise(
                case, mode, kinds, times, matmul_flops=2.0 * 8192**3, host={"relu triton": 60.0},
                peaks=dict.fromkeys(kinds, 64.0),
            )  # fmt: skip
    case = found.cases[0]
    errors = {"hard out": 0.24, "hard dq": math.inf}
    trick = "FlexAttention, log of ReLU"
    found.checks.append(Check(case.name, trick, errors, refused="error of hard dq inf"))
    found.checks.append(Check(case.name, "FlexAttention", absent="no compiler"))
    found.skipped["a case"] = "time was up"
    return found
