"""Decoding on a CPU: the native library of this package against CTranslate2 and transformers.

A softmax model with random weights is converted to CTranslate2's format, so that both run the same
model. A ReLUFormer of the same shape is timed beside it. Output lengths are forced. Contestants
take turns, and the shortest time of each counts, because other processes only add time.

    pip install ctranslate2 transformers
    python -m benchmarks.ctranslate2 --json > result.json     # about 10 minutes
    python -m benchmarks.ctranslate2 --memory                 # only peak memory, in a minute
    python -m benchmarks.ctranslate2 --quick                  # a tiny model, to test the benchmark

Nothing is timed unless both decode the same tokens in float32. `ceiling` is the time to read the
bytes of a step from memory, divided by the time of a step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.ctranslate2_model import NEVER_DECODED, convert, to_ids, to_text
from benchmarks.translate_cpu import Shape, marian, our_model, sources_of
from reluformer.model import ReLUFormer
from reluformer.model.pretrained import save_int8, save_pretrained
from reluformer.translation.native.model import NativeModel
from reluformer.translation.native.search import beam_search
from reluformer.translation.native.support import load
from reluformer.translation.search import SearchConfig, Task

Batch = list[list[int]]
Run = Callable[[Batch, int, int], list[list[int]]]
"""Function of a batch, the beam and the output length to tokens of each sentence."""

COMPUTE_TYPES = {"float32": (None, "float32"), "int8": ("int8", "int8_float32")}
"""Quantisation and compute type of CTranslate2 for each precision."""
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    precision: str
    threads: int
    batch: int
    beam: int


def random_model(shape: Shape, kind: str) -> ReLUFormer:
    """A model with random weights; all kinds have the same weights."""
    torch.manual_seed(0)
    return our_model(shape, kind)


def native_run(model: ReLUFormer, precision: Any) -> tuple[Run, NativeModel]:
    """The search of this package, and the model that counts skipped rows."""
    native = NativeModel.of(model, precision)

    def run(sources: Batch, beam: int, length: int) -> list[list[int]]:
        lengths = [length] * len(sources)
        task = Task(sources, lengths, lengths, keys=range(len(sources)))
        return [beams[0].tokens for beams in beam_search(native, task, SearchConfig(beam=beam))]

    return run, native


def ctranslate2_run(folder: Path, precision: str, threads: int) -> Run:
    """CTranslate2 on a converted model."""
    import ctranslate2

    translator = ctranslate2.Translator(
        str(folder), device="cpu", intra_threads=threads, compute_type=COMPUTE_TYPES[precision][1]
    )

    def run(sources: Batch, beam: int, length: int) -> list[list[int]]:
        results = translator.translate_batch(
            to_text(sources),
            beam_size=beam,
            min_decoding_length=length,
            max_decoding_length=length,
            max_input_length=0,
            length_penalty=1.0,
            return_scores=True,
            suppress_sequences=NEVER_DECODED,
        )
        return [to_ids(each.hypotheses[0]) for each in results]

    return run


def marian_run(shape: Shape) -> Run:
    """Hugging Face `generate` on a MarianMT model of the same shape, in float32."""
    model = marian(shape)

    @torch.inference_mode()
    def run(sources: Batch, beam: int, length: int) -> list[list[int]]:
        ids = torch.tensor(sources)
        tokens = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beam,
            do_sample=False,
            min_new_tokens=length + 1,
            max_new_tokens=length + 1,
        )
        return [row[1:-1] for row in tokens.tolist()]

    return run


def shortest(runs: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Shortest seconds of each function; they take turns."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeat):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def check_same(shape: Shape, ours: Run, theirs: Run) -> None:
    """Assert that both decode the same tokens of most sentences; the rest may round differently."""
    sources = sources_of([12] * 8, shape.vocabulary)
    pairs = zip(ours(sources, 1, 10), theirs(sources, 1, 10), strict=True)
    same = sum(one == other for one, other in pairs)
    assert same >= 6, f"only {same} of 8 translations are the same"


def step_bytes(shape: Shape, precision: str, native: NativeModel, length: int) -> float:
    """Bytes that a step with one row reads: weights, and keys and values in float32."""
    width, skipped = shape.width, native.skipped
    share = skipped.slots_read / max(1, skipped.slots)
    layer = (4 + 2) * width**2 + (1 + share) * width * shape.slots
    weights = shape.layers * layer + shape.vocabulary * width
    values = skipped.values_read / max(1, skipped.values)
    # Half the target on average, and the whole source.
    cache = shape.layers * 1.5 * length * width * (1 + values) * 4
    return weights * BYTES[precision] + cache


def measure(
    shape: Shape, case: Case, folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One row: tokens per second of each contestant, and ratios."""
    torch.set_num_threads(case.threads)
    length = arguments.length
    sources = sources_of([length - 1] * case.batch, shape.vocabulary)
    theirs = ctranslate2_run(folder / case.precision, case.precision, case.threads)
    softmax, _ = native_run(random_model(shape, "softmax"), case.precision)
    relu, native = native_run(random_model(shape, "relu"), case.precision)
    if case.precision == "float32":
        check_same(shape, softmax, theirs)
    runs: dict[str, Callable[[], object]] = {
        "CTranslate2": lambda: theirs(sources, case.beam, length),
        "softmax": lambda: softmax(sources, case.beam, length),
        "relu": lambda: relu(sources, case.beam, length),
    }
    if arguments.transformers and case.precision == "float32":
        generate = marian_run(shape)
        runs["transformers"] = lambda: generate(sources, case.beam, length)
    half = length // 2
    if case.batch == case.beam == 1:
        runs["half"] = lambda: relu(sources, case.beam, half)
    seconds = shortest(runs, arguments.repeat)
    tokens = case.batch * (length + 1)
    row: dict[str, Any] = asdict(case)
    for name in runs:
        if name != "half":
            row[f"{name} tokens/s"] = round(tokens / seconds[name], 1)
    for name in ("softmax", "relu"):
        row[f"{name} / CTranslate2"] = round(seconds["CTranslate2"] / seconds[name], 2)
    if "transformers" in seconds:
        row["relu / transformers"] = round(seconds["transformers"] / seconds["relu"], 2)
    if "half" in seconds:
        step = (seconds["relu"] - seconds["half"]) / (length - half)
        size = step_bytes(shape, case.precision, native, length)
        kernels = load()
        assert kernels is not None
        least = kernels.library.seconds_to_read(int(size), case.threads, 5 * arguments.repeat)
        row |= {
            "step ms": round(step * 1e3, 3),
            "step MB": round(size / 1e6, 1),
            "read GB/s": round(size / least / 1e9, 1),
            "ceiling": round(least / step, 2),
        }
    return row


# `ru_maxrss` would count the memory of the process that starts this one.
_PEAK = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) / 1024)
"""
_CTRANSLATE2 = """
import sys, ctranslate2
model = ctranslate2.Translator(sys.argv[1], device="cpu", intra_threads=1, compute_type=sys.argv[2])
model.translate_batch([["t5"] * 20] * 4, beam_size=4, min_decoding_length=20,
                      max_decoding_length=20)
"""
_RELUFORMER = """
import sys, torch
from pathlib import Path
from reluformer.model import ReLUFormer
from reluformer.model.pretrained import read_pretrained
from reluformer.translation.native.model import NativeModel
from reluformer.translation.native.search import beam_search
from reluformer.translation.search import SearchConfig, Task
torch.set_num_threads(1)
model = NativeModel.read(read_pretrained(ReLUFormer, Path(sys.argv[1])), sys.argv[2])
beam_search(model, Task([[5] * 20] * 4, [20] * 4, [20] * 4, range(4)), SearchConfig(beam=4))
"""


def peak_memory(code: str, *arguments: str) -> float:
    """Peak memory in MB of a process that loads a model and translates one batch."""
    command = [sys.executable, "-c", code + _PEAK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return round(float(done.stdout.split()[-1]), 1)


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """All rows that were asked for."""
    for values in product(arguments.precision, arguments.threads, arguments.batch, arguments.beam):
        yield Case(*values)


def main() -> None:
    """Measure and print a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(description="Decoding on a CPU against CTranslate2.")
    parser.add_argument("--quick", action="store_true", help="tiny model")
    parser.add_argument("--precision", nargs="+", default=["int8", "float32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--beam", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--length", type=int, default=40, help="source and target tokens")
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--transformers", action="store_true", help="also time generate")
    parser.add_argument("--memory", action="store_true", help="measure peak memory only")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shape = Shape(arguments.vocabulary, 512, arguments.heads, 6, arguments.slots)
    if arguments.quick:
        shape = Shape(500, 32, 4, 2, 64)
    with tempfile.TemporaryDirectory() as temporary:
        folder, model = Path(temporary), random_model(shape, "softmax")
        for precision in arguments.precision:
            convert(model, folder / precision, COMPUTE_TYPES[precision][0])
        rows = []
        for case in () if arguments.memory else cases(arguments):
            rows.append(measure(shape, case, folder, arguments))
            print(rows[-1], file=sys.stderr, flush=True)
        memory = measure_memory(model, folder, arguments.precision)
    report({"shape": asdict(shape), "length": arguments.length, "rows": rows, "memory": memory},
           arguments.json)  # fmt: skip


def measure_memory(model: ReLUFormer, folder: Path, precisions: list[str]) -> list[dict[str, Any]]:
    """Peak memory of both libraries for each precision."""
    rows = []
    for precision in precisions:
        ours = folder / f"ours-{precision}"
        ours.mkdir()
        (save_int8 if precision == "int8" else save_pretrained)(model, ours)
        theirs = str(folder / precision), COMPUTE_TYPES[precision][1]
        rows.append({
            "precision": precision,
            "CTranslate2 MB": peak_memory(_CTRANSLATE2, *theirs),
            "reluformer MB": peak_memory(_RELUFORMER, str(ours), precision),
        })  # fmt: skip
    return rows


def report(result: dict[str, Any], as_json: bool) -> None:
    """Print the result."""
    if as_json:
        print(json.dumps(result, indent=1))
        return
    for table in (result["rows"], result["memory"]):
        names = list({name: None for row in table for name in row})
        for line in (names, ["---"] * len(names), *([r.get(n, "") for n in names] for r in table)):
            print("| " + " | ".join(str(value) for value in line) + " |")
        print()


if __name__ == "__main__":
    main()
