"""Speed of `benchmarks.language_model`: training steps and prefill in interleaved rounds."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.language_model_build import Size, build, compile_layers
from benchmarks.whole_steps import ceilings, interleaved
from reluformer import relu_attention
from reluformer.bench.timing import Clock, in_short, ratio
from reluformer.hf.masks import attention_mask

DIRECT = "kernel called directly"
"""Attention that bypasses the integration."""
SOFTMAX = "sdpa"
FOURTH = "normalised_relu, power 4"
ATTENTIONS = (SOFTMAX, "normalised_relu", FOURTH, DIRECT, "relu")
UNTIMED = 3
Row = dict[str, Any]


def attend_directly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """The kernel of the recommended attention, with constant options and no row loss."""
    output = relu_attention(
        query,
        key,
        value,
        causal=True,
        power=8,
        threshold=module.direct_threshold.float(),
        gamma=2.0 * 8**8,
        length_exponent=1.0,
        row_normalise=1e-4,
        scale=kwargs["scaling"],
    )
    return output.transpose(1, 2).contiguous(), None


def build_for_speed(size: Size, attention: str, length: int) -> nn.Module:
    """A model of the speed table."""
    if attention == DIRECT:
        AttentionInterface.register(DIRECT, attend_directly)
        AttentionMaskInterface.register(DIRECT, attention_mask)
    if attention == FOURTH:
        return build(size, "normalised_relu", length, options={"power": 4})
    model = build(size, attention, length)
    if attention == DIRECT:
        for layer in model.model.layers:  # type: ignore[union-attr]
            threshold = nn.Parameter(torch.full((size.heads,), -8.0))
            layer.self_attn.direct_threshold = threshold
    return model


@contextmanager
def forced_cudnn(attention: str) -> Iterator[None]:
    """Context in which SDPA runs on cuDNN or fails."""
    is_cudnn = attention == SOFTMAX and torch.cuda.is_available()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if is_cudnn else nullcontext():
        yield


class Contestant:
    """A model of the table, its training step, its prefill and its attention alone."""

    def __init__(self, size: Size, attention: str, shape: tuple[int, int], compiled: bool) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.size, self.attention, self.shape, self.device = size, attention, shape, device
        self.model = build_for_speed(size, attention, shape[1]).to(device)
        if compiled:
            compile_layers(self.model)
        self.ids = torch.randint(3, size.vocabulary, shape, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")

    def step(self) -> None:
        """One training step in bfloat16 autocast."""
        self.model.train()
        with forced_cudnn(self.attention):
            with torch.autocast(self.device, torch.bfloat16):
                loss = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def halve(self) -> None:
        """Store weights in half precision, as in serving."""
        self.model = self.model.eval().to(torch.bfloat16)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Process the prompts up to the first new token."""
        with forced_cudnn(self.attention):
            self.model(input_ids=self.ids, logits_to_keep=1)

    def attention_call(self) -> Callable[[], None]:
        """Forward and backward of the attention of one layer alone, called as by transformers."""
        module = self.model.model.layers[0].self_attn  # type: ignore[union-attr,index]
        attend = ALL_ATTENTION_FUNCTIONS[self.model.config._attn_implementation]
        batch, length = self.shape
        heads, width = self.size.heads, self.size.width // self.size.heads
        q, k, v, grad = (
            torch.randn(batch, length, heads, width, device=self.device, dtype=torch.bfloat16)
            for _ in range(4)
        )
        leaves = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]

        def call() -> None:
            with forced_cudnn(self.attention):
                output, _ = attend(module, *leaves, None, dropout=0.0, scaling=width**-0.5)
                torch.autograd.grad(output, leaves, grad)

        return call


def milliseconds(function: Callable[[], None]) -> float:
    """Wall time of a call that starts and ends with an idle device."""
    _synchronise()
    start = time.perf_counter()
    function()
    _synchronise()
    return (time.perf_counter() - start) * 1e3


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speed_rows(size: Size, length: int, options: argparse.Namespace) -> list[Row]:
    """One row for each attention at one length; one that fails has its error in place of times."""
    shape = (max(options.tokens // length, 1), length)
    head = {"length": length, "batch": shape[0], "compiled": options.compile}
    ready: dict[str, Contestant] = {}
    rows: list[Row] = []
    for attention in options.attentions:
        try:
            contestant = Contestant(size, attention, shape, options.compile)
            for _ in range(UNTIMED):
                contestant.step()
            ready[attention] = contestant
        except RuntimeError as error:
            rows.append({"attention": attention, **head, "error": in_short(error)})
    clocks = {name: partial(milliseconds, each.step) for name, each in ready.items()}
    steps = interleaved(clocks, options.repetitions)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls = {name: each.attention_call() for name, each in ready.items()}
    alone = Clock(device).all_rounds(calls, options.repetitions)
    for contestant in ready.values():
        contestant.halve()
        for _ in range(UNTIMED):
            contestant.prefill()
    clocks = {name: partial(milliseconds, each.prefill) for name, each in ready.items()}
    prefills = interleaved(clocks, options.repetitions)
    for name in ready:
        step, prefill = statistics.median(steps[name]), statistics.median(prefills[name])
        tokens, calls_ms = shape[0] * length * 1e3, size.layers * statistics.median(alone[name])
        row = {"attention": name, **head, "step_tokens_per_second": tokens / step}
        row |= {"prefill_tokens_per_second": tokens / prefill, "step_ms": step}
        rows.append({**row, "attention_ms": calls_ms, "attention_share": calls_ms / step})
    return [compare(row, rows, (steps, prefills)) for row in rows]


def compare(row: Row, rows: list[Row], times: tuple[dict[str, list[float]], ...]) -> Row:
    """The row with its speed relative to softmax in the same rounds, and the ceilings of a step.

    `step_ceiling_as_alone` is the gain if only the attention calls changed, as much as alone;
    `step_ceiling_no_attention` the gain if they took no time.
    """
    softmax = next((r for r in rows if r["attention"] == SOFTMAX and "step_ms" in r), None)
    if softmax is None or row is softmax or "step_ms" not in row:
        return row
    step, prefill = (ratio(each[row["attention"]], each[SOFTMAX]) for each in times)
    as_alone, no_attention = ceilings(
        softmax["step_ms"], softmax["attention_ms"], row["attention_ms"]
    )
    return {
        **row,
        "step_speed_up": step,
        "prefill_speed_up": prefill,
        "attention_speed_up": softmax["attention_ms"] / row["attention_ms"],
        "step_ceiling_as_alone": as_alone,
        "step_ceiling_no_attention": no_attention,
    }


def measure_speed(size: Size, options: argparse.Namespace) -> list[Row]:
    """The rows of the speed table."""
    rows = []
    for length in options.lengths:
        for row in speed_rows(size, length, options):
            print(json.dumps(row), flush=True)
            rows.append(row)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows
