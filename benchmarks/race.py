"""Race two checkouts of this package against each other and against cuDNN's softmax, in one run.

    git worktree add ../before COMMIT
    python benchmarks/race.py ../before . --out race.json

One process serves each checkout. The parent asks them in turn for one measurement at a time, so
that both run at the same clocks and temperature. `kernel` is the GPU time of a call recorded in a
CUDA graph. `call` is the wall time of a call through the public function with gradients on, Python
included. A refactoring that leaves the machine code alone stays within the spread of the first and
may only improve the second.
"""

import argparse
import inspect
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENS, WIDTH = 16_384, 2048
ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "relu": {},
    "default": {"power": 4, "threshold": -4.0, "row_normalise": 1e-4},
    "square": {"power": 2, "threshold": -4.0, "row_normalise": 1e-4},
    "zeros70": {"power": 4, "threshold": 0.5, "row_normalise": 1e-4},
}
"""Softmax is SDPA with cuDNN; the others are options of `relu_attention`. With `zeros70` about 70 %
of the weights are 0, as in trained models; with `default` and `square` almost none are."""


def cases(lengths: list[int]) -> list[dict[str, Any]]:
    """Every shape with every attention, as keywords of `Racer.measure`."""
    return [
        {"attention": name, "width": width, "causal": causal, "length": length}
        for name in ATTENTIONS
        for width in (64, 128)
        for causal in (False, True)
        for length in lengths
    ]


class Racer:
    """Runs inside one checkout: builds a call and times it."""

    def __init__(self, root: Path) -> None:
        sys.path.insert(0, str(root))
        import torch

        import reluformer

        if root.resolve() not in Path(reluformer.__file__).resolve().parents:
            raise SystemExit(f"reluformer came from {reluformer.__file__}, not from {root}")
        self.torch, self.relu_attention = torch, reluformer.relu_attention
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.calls: dict[str, Callable[[bool], None]] = {}
        self.graphs: dict[str, Any] = {}

    def prepare(self, attention: str, width: int, causal: bool, length: int) -> Callable[..., None]:
        """One call: forward, or forward and backward if its argument is true."""
        torch = self.torch
        key = json.dumps([attention, width, causal, length])
        if key in self.calls:
            return self.calls[key]
        shape = (max(TOKENS // length, 1), WIDTH // width, length, width)
        if self.device == "cpu":
            shape = (1, 2, length, width)
        q, k, v = (
            torch.randn(shape, device=self.device, dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        )
        grad = torch.randn_like(q)
        attend = self._attention(attention, causal, shape[1])

        def call(backward: bool) -> None:
            out = attend(q, k, v)
            if backward:
                torch.autograd.grad(out, (q, k, v), grad)

        self.calls[key] = call
        return call

    def _attention(self, attention: str, causal: bool, heads: int) -> Callable[..., Any]:
        torch = self.torch
        if attention == "softmax":
            return self._softmax(causal)
        options = dict(ATTENTIONS[attention])
        if "row_normalise" not in inspect.signature(self.relu_attention).parameters:
            # The name before it was changed.
            options = {key.replace("row_normalise", "normalise"): options[key] for key in options}
        if "threshold" in options:
            options["threshold"] = torch.full((heads,), options["threshold"], device=self.device)
        return lambda q, k, v: self.relu_attention(q, k, v, causal=causal, **options)

    def _softmax(self, causal: bool) -> Callable[..., Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        if self.device == "cpu":
            return lambda q, k, v: sdpa(q, k, v, is_causal=causal)

        def attend(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return sdpa(q, k, v, is_causal=causal)

        return attend

    def kernel_ms(self, backward: bool, **case: Any) -> float:
        """GPU time of one call: the median of five replays of a recorded graph."""
        torch = self.torch
        call = self.prepare(**case)
        if self.device == "cpu":
            return self.call_ms(backward, 1, **case)
        key = json.dumps([backward, case])
        if key not in self.graphs:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    call(backward)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call(backward)
            self.graphs[key] = graph
        graph, times = self.graphs[key], []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def call_ms(self, backward: bool, repeats: int = 30, **case: Any) -> float:
        """Wall time of one call through the public function, Python included."""
        call, torch = self.prepare(**case), self.torch
        for _ in range(3):
            call(backward)
        if self.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call(backward)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / repeats * 1e3

    def serve(self) -> None:
        """Answer requests on standard input, one JSON line each, until it ends."""
        for line in sys.stdin:
            request = json.loads(line)
            kind, backward, case = request["kind"], request["backward"], request["case"]
            try:
                value = (self.kernel_ms if kind == "kernel" else self.call_ms)(backward, **case)
                answer: dict[str, Any] = {"ms": value}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(answer), flush=True)


def start(root: Path) -> "subprocess.Popen[str]":
    """A process that serves one checkout."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(root)]
    return subprocess.Popen(command, stdin=-1, stdout=-1, text=True)


def ask(process: "subprocess.Popen[str]", **request: Any) -> dict[str, Any]:
    """One measurement of one checkout."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    return json.loads(line) if line else {"error": "the process ended"}


def warm_up(roots: list[Path], lengths: list[int]) -> None:
    """Compile every variant of both checkouts, one process each; Triton keeps the code on disk."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for root in roots:
        for case in cases(lengths):
            if case["attention"] != "softmax":
                key = (root, case["attention"], case["width"], case["causal"])
                groups.setdefault(key, []).append(case)
    processes = [(start(key[0]), group) for key, group in groups.items()]
    for process, group in processes:
        assert process.stdin is not None
        for case in group:
            process.stdin.write(json.dumps({"kind": "call", "backward": True, "case": case}) + "\n")
        process.stdin.close()
    for process, _ in processes:
        assert process.stdout is not None
        process.stdout.read()
        process.wait()


def race(roots: list[Path], lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Medians over the rounds: one row a case and pass, with both checkouts and softmax."""
    processes = [start(root) for root in roots]
    rows = []
    for case in cases(lengths):
        # The time of Python matters only where kernels are short.
        for kind in ("kernel", "call") if case["length"] == min(lengths) else ("kernel",):
            for backward in (False, True):
                # Softmax is the same in both checkouts.
                racers = processes[1:] if case["attention"] == "softmax" else processes
                answers: list[list[dict[str, Any]]] = [[] for _ in racers]
                for _ in range(rounds):
                    for process, told in zip(racers, answers, strict=True):
                        told.append(ask(process, kind=kind, backward=backward, case=case))
                row = {**case, "kind": kind, "backward": backward}
                errors = [a["error"] for told in answers for a in told if "error" in a]
                if errors:
                    row["error"] = errors[0]
                else:
                    row["ms"] = [statistics.median(a["ms"] for a in told) for told in answers]
                rows.append(row)
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """One line a case: ms before and after, their ratio, and the ratio to softmax."""
    shape = ("width", "causal", "length", "kind", "backward")
    softmax = {
        tuple(row[key] for key in shape): row["ms"][0]
        for row in rows
        if row["attention"] == "softmax" and "ms" in row
    }
    lines = ["attention width mask length | kind pass | before after ms | speed-up | x softmax"]
    for row in rows:
        if row["attention"] == "softmax" and "error" not in row:
            continue
        mask, both = "causal" if row["causal"] else "full", "both" if row["backward"] else "fwd"
        head = f"{row['attention']:8} {row['width']:4} {mask:6} {row['length']:6}"
        head += f" | {row['kind']:6} {both:4} |"
        if "error" in row:
            lines.append(f"{head} {row['error']}")
            continue
        before, after = row["ms"]
        other = softmax.get(tuple(row[key] for key in shape))
        ratio = f"{other / after:.2f}" if other else "-"
        lines.append(f"{head} {before:8.3f} {after:8.3f} | {before / after:.3f} | {ratio}")
    return "\n".join(lines)


def main() -> None:
    """Warm up, race, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("roots", nargs="*", type=Path, help="the checkouts: before, after")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.serve:
        Racer(arguments.serve).serve()
        return
    if len(arguments.roots) != 2:
        parser.error("two checkouts are needed: before and after")
    roots = [root.resolve() for root in arguments.roots]
    begin = time.perf_counter()
    warm_up(roots, arguments.lengths)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    rows = race(roots, arguments.lengths, arguments.rounds)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
