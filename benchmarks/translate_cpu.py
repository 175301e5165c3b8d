"""Document translation on a CPU: beam search of this package against Hugging Face `generate`.

Two models of one shape, a ReLUFormer and a MarianMT model, both with random weights, translate
sources of the same lengths with a beam of 5 to outputs of the same, forced lengths, in the same
batches. Random weights take the same time as trained ones. The default lengths are quantiles of the
test documents of Europarl-7 English-German in subwords.

    python -m benchmarks.translate_cpu             # a few minutes
    python -m benchmarks.translate_cpu --quick     # a tiny model, to test the benchmark

Needs transformers. Nothing is timed unless the scores of our search agree with a forward pass.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from reluformer.data.batches import pad_sources
from reluformer.model import AttentionConfig, ModelConfig, ReLUFormer
from reluformer.translation.search import Hypothesis, SearchConfig, Task, beam_search

Batch = list[list[int]]

BEAM = 5
# Every 1/16 of Europarl-7's 360 test documents up to a trained length of 512.
LENGTHS = (512, 508, 482, 460, 437, 420, 390, 357, 330, 310, 283, 243, 230, 215, 200, 181)


@dataclass(frozen=True)
class Shape:
    """The shape of both models."""

    vocabulary: int = 32_000
    width: int = 512
    heads: int = 8
    layers: int = 6
    slots: int = 2048


def our_model(shape: Shape, kind: str) -> ReLUFormer:
    """A ReLUFormer with random weights."""
    config = ModelConfig(
        vocabulary=shape.vocabulary,
        width=shape.width,
        heads=shape.heads,
        encoder_layers=shape.layers,
        decoder_layers=shape.layers,
        slots=shape.slots,
        attention=AttentionConfig(kind=kind, row_sum_init=None),
    )
    return ReLUFormer(config).eval()


def marian(shape: Shape):  # type: ignore[no-untyped-def]  # transformers is imported on demand
    """A MarianMT model with random weights."""
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=shape.vocabulary,
        d_model=shape.width,
        encoder_layers=shape.layers,
        decoder_layers=shape.layers,
        encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads,
        encoder_ffn_dim=shape.slots,
        decoder_ffn_dim=shape.slots,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    return MarianMTModel(config).eval()


def sources_of(lengths: Iterable[int], vocabulary: int) -> Batch:
    """Random token ids without special tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def our_run(model: ReLUFormer, sources: Batch) -> list[Hypothesis]:
    """Translate one batch; output lengths equal source lengths."""
    lengths = [len(source) for source in sources]
    task = Task(sources, lengths, lengths, keys=range(len(sources)))
    return [beam[0] for beam in beam_search(model, task, SearchConfig(beam=BEAM))]


@torch.inference_mode()
def marian_run(model, sources: Batch) -> None:  # type: ignore[no-untyped-def]
    """Translate one batch; it ends with its longest output."""
    padded, lengths = pad_sources(sources)
    longest = max(len(source) for source in sources)
    model.generate(
        input_ids=padded,
        attention_mask=(torch.arange(padded.shape[1]) < lengths.unsqueeze(1)).long(),
        num_beams=BEAM,
        do_sample=False,
        min_new_tokens=longest + 1,
        max_new_tokens=longest + 1,
    )


@torch.inference_mode()
def check(model: ReLUFormer, sources: Batch) -> None:
    """Assert that the scores of the search equal those of a forward pass."""
    for source, best in zip(sources, our_run(model, sources), strict=True):
        target = torch.tensor([[model.config.bos_id, *best.tokens]])
        logits = model(torch.tensor([[*source, model.config.eos_id]]), target).logits[0]
        labels = torch.tensor([*best.tokens, model.config.eos_id])
        exact = logits.float().log_softmax(-1).gather(1, labels.unsqueeze(1)).sum()
        error = abs(float(exact) - best.log_probability) / abs(float(exact))
        assert error < 1e-3, f"the search's score is off by {error:.1e}"


class Taken(NamedTuple):
    """Wall seconds, and CPU seconds of all cores, which a busy machine affects less."""

    wall: float
    cpu: float


def clock(run: Callable[[Batch], object], batches: list[Batch], repeat: int) -> Taken:
    """Shortest time of `repeat` runs over all batches."""
    runs = []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        for batch in batches:
            run(batch)
        runs.append(Taken(time.perf_counter() - wall, time.process_time() - cpu))
    return Taken(*map(min, zip(*runs, strict=True)))


def compare(
    shape: Shape, lengths: Sequence[int], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each model and precision: seconds and target tokens per second."""
    sources = sources_of(sorted(lengths, reverse=True), shape.vocabulary)
    size = arguments.batch
    batches = [sources[i : i + size] for i in range(0, len(sources), size)]
    tokens = sum(len(source) + 1 for source in sources)
    rows = []
    for precision in arguments.precision:
        dtype = getattr(torch, precision)
        theirs = marian(shape).to(dtype)
        marian_run(theirs, [source[:4] for source in batches[0]])
        base = clock(partial(marian_run, theirs), batches, arguments.repeat)
        rows.append(row("Marian (transformers)", precision, base, tokens, base))
        for kind in arguments.attention:
            ours = our_model(shape, kind)
            check(ours, [source[:24] for source in batches[0]])
            ours = ours.to(dtype)
            taken = clock(partial(our_run, ours), batches, arguments.repeat)
            rows.append(row(f"reluformer, {kind}", precision, taken, tokens, base))
    return rows


def row(model: str, precision: str, taken: Taken, tokens: int, base: Taken) -> dict[str, Any]:
    """One line of the table."""
    return {
        "model": model,
        "precision": precision,
        "seconds": round(taken.wall, 2),
        "CPU seconds": round(taken.cpu, 2),
        "target tokens/s": round(tokens / taken.wall, 1),
        "times as fast": round(base.wall / taken.wall, 2),
        "by CPU seconds": round(base.cpu / taken.cpu, 2),
    }


def main() -> None:
    """Measure and print a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(description="Beam search on a CPU against transformers.")
    parser.add_argument("--quick", action="store_true", help="tiny model and lengths")
    parser.add_argument("--batch", type=int, default=8, help="documents in a batch")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--precision", nargs="+", default=["float32"])
    parser.add_argument("--attention", nargs="+", default=["relu", "softmax"])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shape, lengths = Shape(), arguments.lengths
    if arguments.quick:
        shape, lengths = Shape(500, 32, 4, 2, 64), (24, 17, 9)
    rows = compare(shape, lengths, arguments)
    setting = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "documents": len(lengths),
        "batch": arguments.batch,
        "beam": BEAM,
        **shape.__dict__,
    }
    if arguments.json:
        print(json.dumps({"setting": setting, "rows": rows}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    print()
    for line in (list(rows[0]), ["---"] * len(rows[0]), *(r.values() for r in rows)):
        print("| " + " | ".join(str(value) for value in line) + " |")


if __name__ == "__main__":
    main()
