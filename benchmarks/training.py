"""Training throughput against Hugging Face and a large matrix product, in one run on one GPU.

    python benchmarks/training.py --data data/europarl-sent --documents data/europarl-doc
    python benchmarks/training.py --quick     # tiny models on a CPU: does it still run?

`--data` and `--documents` are prepared folders; without them, text of invented words with the
lengths and vocabularies of Europarl is made. Parts, each in a process of its own:

- sentence: the recipe `sentence` through `reluformer.train`, with ReLU and with softmax.
- Marian: a MarianMTModel of that shape (SDPA) through Seq2SeqTrainer on the same examples: bf16,
  TF32, fused AdamW, grouped by length, padded to multiples of 8, loader processes, no logging,
  saving or evaluation, not compiled. Its batches have so many rows that their mean number of target
  tokens is that of the recipe.
- document: the recipe `document` at length 1024 across documents, with ReLU, compiled as the
  recipe asks and not, and with softmax.
- matmul: products of two 8192 x 8192 matrices in bfloat16, before and after all others.

Target tokens are real ones, end marks included, padding not. Every part logs them each 25 or 50
steps, after waiting for the device; an interval is the time between two lines, by the clock of
the process that reads them. The first interval, and those at less than half the speed of the
fastest (something was compiled), count as start-up; the rate is the median of the others. Start-up
seconds are a part's wall time beyond what its tokens take at that rate: imports, data, compilation.

TFLOP/s count the matrix products that a model needs for its real tokens, backward as twice the
forward. For an example of s source and t target tokens, width w, f slots, vocabulary V, keys and
values of width k, the forward takes

    encoder layer   2 s (2 w^2 + 2 w k + 2 w f) + 4 s^2 w
    decoder layer   2 t (4 w^2 + 2 w k + 2 w f) + 4 s w k + 2 t^2 w + 4 t s w
    output          2 t w V

where causal attention counts half. Shares are of the faster matmul.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reluformer.config.recipe import Recipe, load_recipe
from reluformer.data.prepare import prepare
from reluformer.data.text import TextPair, write_documents
from reluformer.data.tokenizer import BOS, EOS, PAD
from reluformer.files import write_json
from reluformer.model.config import ModelConfig
from reluformer.train import train
from reluformer.train.data import Split, TrainingData, load_data
from reluformer.train.run_dir import METRICS

ROOT = Path(__file__).resolve().parents[1]
# A part has measured enough after so many seconds in its wanted number of intervals.
ENOUGH_SECONDS = 8.0
MATMUL_SECONDS = 12.0
IGNORED = -100
# Nothing but steps happens between two lines of the log.
BARE = (
    "train.checkpoint_every=1000000000",
    "train.dev_every=null",
    "train.rescale_scores=false",
    "train.bleu_every=null",
    "train.final=last",
)
QUICK = (
    "train.device=cpu", "train.steps=12", "train.log_every=2", "train.batch_tokens=256",
    "data.max_length=64", "model.width=32", "model.heads=2", "model.slots=64",
    "model.encoder_layers=1", "model.decoder_layers=1",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    name: str
    recipe: str
    library: str
    intervals: int
    """How many are wanted. Enough that not all of them can hold a compilation."""
    reserved: float
    """Seconds that parts before it leave to it; 0 where it may be dropped."""
    overrides: tuple[str, ...] = ()


DOCUMENT = ("data.max_length=1024", "data.cross_documents=true", "train.log_every=25")
SENTENCE = ("train.log_every=50",)
SOFTMAX = ("model.attention.kind=softmax",)
EAGER = ("train.compile=false",)
PARTS = (
    Part("sentence relu", "sentence", "reluformer", 8, 60.0, SENTENCE),
    # The sampler sorts 50 batches by length: one interval holds all lengths.
    Part("sentence marian", "sentence", "transformers", 3, 40.0, SENTENCE),
    Part("document relu uncompiled", "document", "reluformer", 4, 30.0, DOCUMENT + EAGER),
    Part("document relu", "document", "reluformer", 4, 60.0, DOCUMENT),
    Part("sentence softmax", "sentence", "reluformer", 8, 0.0, SENTENCE + SOFTMAX),
    Part("document softmax", "document", "reluformer", 4, 0.0, DOCUMENT + SOFTMAX),
)


class Line(NamedTuple):
    """A line of a part's log: when it was there, and the target tokens until then."""

    seconds: float
    tokens: int


class Rate(NamedTuple):
    """What the lines of a part say."""

    tokens_per_second: float
    """Median over the intervals that count."""
    kept: int
    """How many count."""
    seconds: float
    """Their sum."""
    speeds: list[float]
    """Target tokens per second of every interval but the first."""


def rate_of(lines: list[Line]) -> Rate | None:
    """The steady rate; None before the second interval has ended."""
    pairs = list(zip(lines, lines[1:], strict=False))[1:]
    if not pairs:
        return None
    seconds = [after.seconds - before.seconds for before, after in pairs]
    tokens = [after.tokens - before.tokens for before, after in pairs]
    speeds = [count / taken for count, taken in zip(tokens, seconds, strict=True)]
    kept = [index for index, speed in enumerate(speeds) if speed >= max(speeds) / 2]
    median = statistics.median(speeds[index] for index in kept)
    return Rate(median, len(kept), sum(seconds[index] for index in kept), speeds)


def forward_flops(config: ModelConfig, source: Any, target: Any) -> Any:
    """Operations of the forward for examples of lengths `source` and `target` [n]."""
    w, f = config.width, config.slots
    k = config.key_value_heads * config.head_width
    encoder = 2 * source * (2 * w * w + 2 * w * k + 2 * w * f) + 4 * source**2 * w
    decoder = 2 * target * (4 * w * w + 2 * w * k + 2 * w * f) + 4 * source * w * k
    decoder = decoder + 2 * target**2 * w + 4 * target * source * w
    layers = config.encoder_layers * encoder + config.decoder_layers * decoder
    return layers + 2 * target * w * config.vocabulary


def describe(recipe: Recipe, data: TrainingData) -> dict[str, Any]:
    """What a step of the recipe holds."""
    batches = data.train.batches(recipe)
    config = recipe.model_with(data.tokenizer.vocab_size)
    source, target = batches.source_lengths, batches.target_lengths
    per_step = recipe.train.accumulate * float(target.sum()) / len(batches.plan(0))
    flops = 3 * forward_flops(config, source.astype(float), target.astype(float)).sum()
    return {
        "vocabulary": config.vocabulary,
        "examples": len(target),
        "target_tokens_per_step": round(per_step, 1),
        "rows_of_equal_tokens": max(1, round(per_step / float(target.mean()))),
        "flops_per_target_token": float(flops / target.sum()),
    }


def invent(folder: Path, *, pairs: int, vocabulary: int, per_document: int) -> Path:
    """Prepare text of invented words, sentence lengths and frequencies as in Europarl."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwygpbvkxqjz"))
    drawn = random.choice(letters, (2 * vocabulary, 9))
    sizes = random.integers(2, 10, len(drawn))
    lexicon = ["".join(row[:size]) for row, size in zip(drawn, sizes, strict=True)]
    frequencies = 1 / (np.arange(len(lexicon)) + 3)
    lengths = random.lognormal(3.05, 0.54, pairs).clip(1, 140)

    def side() -> list[str]:
        counts = (lengths * random.uniform(0.85, 1.15, pairs)).round().clip(1).astype(int)
        chosen = random.choice(len(lexicon), counts.sum(), p=frequencies / frequencies.sum())
        words = iter([lexicon[index] for index in chosen])
        return [" ".join(next(words) for _ in range(count)) for count in counts]

    lines = list(zip(side(), side(), strict=True))
    documents = [lines[i : i + per_document] for i in range(0, pairs, per_document)]
    text = TextPair(folder / "text.source", folder / "text.target", per_document > 1)
    folder.mkdir(parents=True)
    write_documents(text.source, text.target, documents, marked=per_document > 1)
    prepare(folder / "prepared", {"train": [text]}, vocab_size=vocabulary)
    return folder / "prepared"


class Examples:
    """The examples of a split for Hugging Face: `input_ids` and `labels`, each ending with eos."""

    def __init__(self, split: Split) -> None:
        self._corpus, self._spans = split.corpus, split.packing.spans

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """One example."""
        first, end = self._spans[index]
        example = {}
        for name, side in (("input_ids", self._corpus.source), ("labels", self._corpus.target)):
            example[name] = side.tokens[side.offsets[first] : side.offsets[end]].astype(np.int64)
            # In place of the last sentence's separator.
            example[name][-1] = EOS
        return example


def collate(examples: list[dict[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
    """A batch of `Examples`, padded to multiples of 8; the decoder reads the labels one later."""

    def pad(name: str, filler: int) -> Tensor:
        rows = [example[name] for example in examples]
        width = -(-max(map(len, rows)) // 8) * 8
        padded = np.full((len(rows), width), filler, dtype=np.int64)
        for row, ids in zip(padded, rows, strict=True):
            row[: len(ids)] = ids
        return torch.from_numpy(padded)

    sources, labels = pad("input_ids", PAD), pad("labels", IGNORED)
    shifted = labels.roll(1, dims=1)
    shifted[:, 0] = BOS
    return {
        "input_ids": sources,
        "attention_mask": (sources != PAD).long(),
        "labels": labels,
        "decoder_input_ids": shifted.masked_fill(shifted == IGNORED, PAD),
    }


def marian(config: ModelConfig, max_length: int) -> Any:
    """A MarianMTModel of the same shape, with random weights."""
    from transformers import AutoModelForSeq2SeqLM, MarianConfig

    shape = MarianConfig(
        vocab_size=config.vocabulary, d_model=config.width,
        encoder_layers=config.encoder_layers, decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.heads, decoder_attention_heads=config.heads,
        encoder_ffn_dim=config.slots, decoder_ffn_dim=config.slots, activation_function="relu",
        dropout=config.dropout, scale_embedding=True, use_cache=False,
        share_encoder_decoder_embeddings=True, tie_word_embeddings=True,
        max_position_embeddings=-(-max_length // 8) * 8, pad_token_id=PAD, bos_token_id=BOS,
        eos_token_id=EOS, decoder_start_token_id=BOS, forced_eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(shape, attn_implementation="sdpa")
    assert model.config._attn_implementation == "sdpa"
    return model


def trainer_arguments(recipe: Recipe, out: Path, rows: int) -> Any:
    """The recipe in the Trainer's words, with the settings that make the Trainer fastest."""
    from transformers import Seq2SeqTrainingArguments

    config, quick = recipe.train, recipe.train.device == "cpu"
    workers = 0 if quick else min(4, os.cpu_count() or 1)
    return Seq2SeqTrainingArguments(
        output_dir=str(out / "trainer"), max_steps=config.steps, seed=config.seed,
        per_device_train_batch_size=rows, train_sampling_strategy="group_by_length",
        learning_rate=config.lr, lr_scheduler_type="inverse_sqrt", warmup_steps=config.warmup,
        weight_decay=config.weight_decay, adam_beta1=config.betas[0], adam_beta2=config.betas[1],
        optim="adamw_torch_fused", max_grad_norm=config.clip or 0.0,
        label_smoothing_factor=config.smoothing, torch_compile=False,
        bf16=not quick, use_cpu=quick,
        dataloader_num_workers=workers, dataloader_persistent_workers=workers > 0,
        dataloader_pin_memory=not quick, dataloader_drop_last=True, remove_unused_columns=False,
        # Looking for NaN would wait for the device in each step.
        logging_strategy="no", logging_nan_inf_filter=False,
        save_strategy="no", eval_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip


def train_marian(recipe: Recipe, out: Path, rows: int) -> None:
    """Train a Marian model as the recipe asks, as far as the Trainer can; log lines like ours."""
    from transformers import Seq2SeqTrainer, TrainerCallback

    data = load_data(recipe)
    # TF32, by the switch that our own training uses.
    torch.set_float32_matmul_precision("high")
    arguments = trainer_arguments(recipe, out, rows)
    # Counted on the device: nothing waits for it between two lines.
    tokens = torch.zeros((), dtype=torch.int64, device=arguments.device)

    class Counting(Seq2SeqTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            tokens.add_((inputs["labels"] != IGNORED).sum())
            return super().training_step(model, inputs, *rest, **more)

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            self.on_step_end(args, state, control)

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step % recipe.train.log_every == 0:
                if arguments.device.type == "cuda":
                    torch.cuda.synchronize()
                with (out / METRICS).open("a", encoding="utf-8") as file:
                    line = {"step": state.global_step, "tokens": int(tokens)}
                    file.write(json.dumps(line) + "\n")

    Counting(
        model=marian(recipe.model_with(data.tokenizer.vocab_size), recipe.data.max_length),
        args=arguments,
        train_dataset=Examples(data.train),
        data_collator=collate,
        callbacks=[Log()],
    ).train()


def matmul(quick: bool) -> dict[str, Any]:
    """TFLOP/s of a large matrix product, and where it ran."""
    size, device = (64, "cpu") if quick else (8192, "cuda")
    dtype = torch.float32 if quick else torch.bfloat16
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    rounds = []
    for _ in range(8):
        started = time.perf_counter()
        for _ in range(20):
            a @ b
        if not quick:
            torch.cuda.synchronize()
        rounds.append(20 * 2 * size**3 / (time.perf_counter() - started) / 1e12)
    # The first rounds warm up.
    result = {"tflops": statistics.median(rounds[3:]), "size": size}
    if quick:
        return result
    properties = torch.cuda.get_device_properties(0)
    memory = round(properties.total_memory / 2**30, 1)
    return {**result, "device": properties.name, "gib": memory, "cuda": torch.version.cuda}


def child(job: dict[str, Any]) -> None:
    """What a part's own process does."""
    out = Path(job["out"])
    if job["library"] == "matmul":
        write_json(out, matmul(job["quick"]))
        return
    recipe = load_recipe(job["recipe"], job["overrides"])
    if job["library"] == "reluformer":
        train(recipe, out, quiet=True)
    else:
        train_marian(recipe, out, job["rows"])


@contextmanager
def process(job: dict[str, Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A part's process, which ends with the block together with all it has started."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(job)]
    # One GPU: the Trainer would take all that it sees.
    environment = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            yield started
        finally:
            # Its group may outlive it.
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def follow(
    running: subprocess.Popen[bytes], log: Path, until: float, done: Callable[[list[Line]], bool]
) -> list[Line]:
    """Read a log as it is written, until the process ends, `done` says so or time is up."""
    lines: list[Line] = []
    position = 0
    while True:
        ended = running.poll() is not None
        now = time.perf_counter()
        if log.is_file() and log.stat().st_size > position:
            with log.open("rb") as file:
                file.seek(position)
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                position += len(whole) + 1
                # Of lines that come together the last counts: their intervals cannot be told apart.
                lines.append(Line(now, json.loads(whole.splitlines()[-1]).get("tokens", 0)))
        if ended or now > until or done(lines):
            return lines
        time.sleep(0.003)


class Benchmark:
    """Runs the parts within a time limit and keeps the report on disk up to date."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.quick, self.work, self.out = arguments.quick, work, arguments.out
        self.until = time.perf_counter() + arguments.seconds
        self.folders = {"sentence": arguments.data, "document": arguments.documents}
        self.parts = [part for part in PARTS if part.name in arguments.parts]
        self.report: dict[str, Any] = {
            "versions": _versions(),
            "commit": _commit(),
            "cores": os.cpu_count(),
            "settings": {"quick": arguments.quick, "seconds": arguments.seconds},
            "matmul": {},
            "parts": {},
        }

    def run(self) -> None:
        """All parts, whatever becomes of each; then the table."""
        self._guard("matmul", "start", self.matmul)
        for number, part in enumerate(self.parts):
            later = sum(other.reserved for other in self.parts[number + 1 :])
            self._guard("parts", part.name, partial(self.measure, part, later))
        self._guard("matmul", "end", self.matmul)
        self._compare()
        self._save()
        print(table(self.report), flush=True)

    def matmul(self) -> dict[str, Any]:
        """One measurement of the matmul rate."""
        out, log = self.work / "matmul.json", self.work / "matmul.log"
        job = {"library": "matmul", "quick": self.quick, "out": str(out)}
        with process(job, log) as running:
            running.wait(timeout=120)
            _check(running, log)
        return dict(json.loads(out.read_text()))

    def measure(self, part: Part, later: float) -> dict[str, Any]:
        """Train until the rate is known, leaving `later` seconds to other parts."""
        overrides = [*part.overrides, *BARE, *(QUICK if self.quick else ())]
        folder = self._folder(part.recipe)
        overrides.append(f"data.source={json.dumps(str(folder))}")
        recipe = load_recipe(part.recipe, overrides)
        step = describe(recipe, load_data(recipe))
        started = time.perf_counter()
        until = self.until - later - MATMUL_SECONDS
        if until - started < 15 and not self.quick:
            raise TimeoutError("no time left")
        out, log = self.work / part.name, self.work / f"{part.name}.log"
        out.mkdir()
        job = {
            "library": part.library,
            "recipe": part.recipe,
            "overrides": overrides,
            "out": str(out),
        }
        job["rows"] = step["rows_of_equal_tokens"]

        def done(lines: list[Line]) -> bool:
            found = rate_of(lines)
            if found is None or found.kept < part.intervals:
                return False
            return found.seconds >= ENOUGH_SECONDS

        with process(job, log) as running:
            lines = follow(running, out / METRICS, until, done)
            _check(running, log)
        rate = rate_of(lines)
        if rate is None:
            raise TimeoutError(f"{time.perf_counter() - started:.0f} s are too few to measure it")
        last = lines[-1]
        return {
            "tokens_per_second": rate.tokens_per_second,
            "tflops": rate.tokens_per_second * step["flops_per_target_token"] / 1e12,
            "start_up_seconds": last.seconds - started - last.tokens / rate.tokens_per_second,
            "complete": done(lines) or self.quick,
            "torch_compile": part.library == "reluformer" and not self.quick,
            "intervals_kept": rate.kept,
            "interval_speeds": [round(speed) for speed in rate.speeds],
            **step,
            "data": "invented words" if self.work in folder.parents else folder.name,
            "overrides": [each for each in overrides if not each.startswith("data.source")],
        }

    def _folder(self, recipe: str) -> Path:
        """The prepared data of a recipe, made where none was given."""
        if self.folders[recipe] is None:
            sizes = {"sentence": (40_000, 10_000, 1), "document": (60_000, 30_000, 20)}
            pairs, vocabulary, per_document = (400, 400, 5) if self.quick else sizes[recipe]
            self.folders[recipe] = invent(
                self.work / f"text-{recipe}",
                pairs=pairs,
                vocabulary=vocabulary,
                per_document=1 if recipe == "sentence" else per_document,
            )
        return Path(self.folders[recipe])

    def _guard(self, kind: str, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Keep what one part gives, or how it failed; the rest goes on."""
        try:
            result = work()
        except Exception as problem:
            result = {"failed": f"{type(problem).__name__}: {problem}"}
        self.report[kind][name] = result
        print(f"{kind} {name}: {json.dumps(result)}", flush=True)
        self._save()

    def _compare(self) -> None:
        """Set every part beside Marian and the matmul."""
        rates = [each["tflops"] for each in self.report["matmul"].values() if "tflops" in each]
        parts = self.report["parts"]
        marian = parts.get("sentence marian", {}).get("tokens_per_second")
        for name, part in parts.items():
            if "failed" in part:
                continue
            part["of_matmul"] = part["tflops"] / max(rates) if rates else None
            comparable = marian is not None and name.startswith("sentence")
            part["times_marian"] = part["tokens_per_second"] / marian if comparable else None

    def _save(self) -> None:
        if self.out is not None:
            write_json(self.out, self.report)


def table(report: dict[str, Any]) -> str:
    """The result in Markdown."""
    rows = [["part", "target tokens/s", "x Marian", "TFLOP/s", "of matmul", "start-up s"]]
    rows.append(["---"] + ["---:"] * 5)
    for name, part in report["parts"].items():
        if "failed" in part:
            rows.append([name, "failed", part["failed"].splitlines()[-1][:80], "", "", ""])
            continue
        mark = "" if part["complete"] else " (time was up)"
        times, share = part["times_marian"], part["of_matmul"]
        rows.append(
            [
                name,
                f"{part['tokens_per_second']:,.0f}{mark}",
                "" if times is None else f"{times:.2f}",
                f"{part['tflops']:.3g}",
                "" if share is None else f"{share:.1%}",
                f"{part['start_up_seconds']:.0f}",
            ]
        )
    for name, found in report["matmul"].items():
        rate = f"{found['tflops']:.3g}" if "tflops" in found else "failed"
        rows.append([f"matmul, {name}", "", "", rate, "", ""])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _check(running: subprocess.Popen[bytes], log: Path) -> None:
    """Raise what the process said last if it has failed."""
    if running.poll():
        said = log.read_text(errors="replace").strip().splitlines()[-15:]
        raise RuntimeError("\n".join([f"exit status {running.returncode}", *said]))


def _versions() -> dict[str, str]:
    names = ("torch", "triton", "transformers", "accelerate", "numpy", "tokenizers")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main(arguments: list[str] | None = None) -> None:
    """Measure, write JSON, print the table."""
    parser = argparse.ArgumentParser(description="Training throughput against Hugging Face.")
    parser.add_argument("--data", type=Path, help="prepared sentences; default: invented text")
    parser.add_argument("--documents", type=Path, help="prepared documents; default: invented")
    parser.add_argument("--seconds", type=float, default=240.0, help="at most, for everything")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--quick", action="store_true", help="tiny models on a CPU")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child is not None:
        child(json.loads(chosen.child))
        return
    if not chosen.quick and not torch.cuda.is_available():
        parser.error("there is no GPU; --quick runs tiny models on a CPU")
    with tempfile.TemporaryDirectory() as work:
        Benchmark(chosen, Path(work)).run()


if __name__ == "__main__":
    main()
