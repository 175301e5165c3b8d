"""The command line: output, files and exit statuses."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import reluformer
from reluformer import recipes
from reluformer.cli import app
from reluformer.config.recipe import recipe_from
from reluformer.data.corpora import CORPORA
from reluformer.data.synthetic import sample
from reluformer.data.tokenizer import Tokenizer
from reluformer.model import ReLUFormer
from reluformer.train import Diverged

ROOT = Path(__file__).parents[1]


def run(*arguments: object, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def test_a_repeated_option_of_files_is_a_mistake() -> None:
    for arguments in (
        ("translate", "--input", "a", "--input", "b"),
        ("prepare", "out", "--train", "a", "b", "--train", "c", "d"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and "must be given once" in result.output


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "reluformer", *map(str, arguments)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished model with random weights."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "slots": 16}
    data = {"source": "sample", "unit": "document", "max_length": 24}
    recipe = recipe_from({"data": data, "model": shape, "decode": {"beam": 2}})
    tokenizer = Tokenizer.train([text for pair in sample.sentences(0, 50) for text in pair], 300)
    ReLUFormer(recipe.model_with(tokenizer.vocab_size)).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    recipe.save(folder / "recipe.yaml")
    return folder


def test_version_and_help() -> None:
    assert run("--version").stdout == f"reluformer {reluformer.__version__}\n"
    for name in ("prepare", "recipes", "train", "translate", "evaluate", "bench", "info"):
        assert name in run("--help").stdout
        assert run(name, "--help").exit_code == 0
    for corpus in CORPORA:
        assert corpus in run("prepare", "--help").stdout
    assert run("--show-completion").exit_code in (0, 1)


def test_the_list_of_commands_shows_whole_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = run("--help").stdout.partition("Commands:")[2]
    assert "translate" in listed and "..." not in listed


def test_the_command_line_runs_as_a_module_with_few_imports() -> None:
    code = "import sys, reluformer.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "typer" in loaded
    assert not loaded & {"rich", "sacrebleu", "tokenizers", "safetensors", "yaml", "transformers"}
    done = subprocess.run(command("--version"), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"reluformer {reluformer.__version__}\n"


def test_info_lists_versions_devices_and_implementations() -> None:
    text = run("info").stdout
    found = json.loads(run("info", "--json").stdout)
    assert found["packages"]["torch"] == torch.__version__
    assert "chosen" in json.dumps(found["implementations"]["relu"])
    for part in (reluformer.__version__, torch.__version__, "cpu", "softmax"):
        assert part in text


def write_sample(folder: Path) -> Path:
    return sample.write(folder, train=20, dev=3, test=3, seed=1)


def test_prepare_train_translate_evaluate(tmp_path: Path) -> None:
    text = write_sample(tmp_path / "text")
    pairs = {split: (text / f"{split}.en", text / f"{split}.de") for split in ("train", "dev")}
    options = [part for split, pair in pairs.items() for part in (f"--{split}", *pair)]
    data = tmp_path / "data"
    done = run("prepare", data, *options, "--vocab-size", 300)
    assert done.exit_code == 0, done.output
    assert "train:" in done.stdout and "20 documents" in done.stdout
    again = run("prepare", "--out", data, *options, "--vocab-size", 300, "--json")
    assert json.loads(again.stdout)["vocab_size"] == 300

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"data: {{source: {data}, unit: document, max_length: 64}}\n"
        "model: {width: 16, heads: 2, encoder_layers: 1, decoder_layers: 1, slots: 16}\n"
        "train: {steps: 50, batch_tokens: 512, dev_every: null, calibration_batches: 1}\n",
        encoding="utf-8",
    )
    out = tmp_path / "run"
    train = ("train", recipe, "--out", out, "--set", "train.steps=2", "--set", "train.warmup=1")
    done = run(*train)
    assert done.exit_code == 0, done.output
    weights = (out / "model" / "model.safetensors").stat().st_mtime_ns
    assert run(*train).exit_code == 0
    assert (out / "model" / "model.safetensors").stat().st_mtime_ns == weights

    hypothesis = tmp_path / "dev.out"
    done = run(
        *("translate", "--model", out, "--document", "--input", pairs["dev"][0]),
        *("--output", hypothesis, "--beam", 1),
    )
    assert done.exit_code == 0 and done.stdout == ""
    source = pairs["dev"][0].read_text(encoding="utf-8").splitlines()
    translated = hypothesis.read_text(encoding="utf-8").splitlines()
    assert len(translated) == len(source)
    assert [line == "<d>" for line in translated] == [line == "<d>" for line in source]

    done = run("evaluate", "--reference", pairs["dev"][1], "--hypothesis", hypothesis)
    assert done.exit_code == 0 and "BLEU" in done.stdout and "tok:13a" in done.stdout


def test_translate_reads_stdin_and_writes_stdout(model: Path) -> None:
    text = "It costs three euros.\n\nIt leaves at noon.\n"
    for precision in ("float32", "bfloat16"):
        done = run("translate", "--model", model, "--precision", precision, stdin=text)
        lines = done.stdout.split("\n")
        assert done.exit_code == 0
        assert len(lines) == 4 and lines[0] and lines[2] and lines[1] == lines[3] == ""
    assert run("translate", "--model", model, stdin="").stdout == ""


def test_progress_counts_all_lines(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines arrive in blocks, so the total of one block is not that of the input."""
    # Every look at the clock finds that a minute has passed.
    clock = count(0.0, 60.0)
    monkeypatch.setattr("reluformer.console.time.monotonic", lambda: next(clock))
    (tmp_path / "in").write_text("a cat\na dog\n", encoding="utf-8")
    result = run(
        *("translate", "--model", model, "--input", tmp_path / "in"),
        *("--output", tmp_path / "out", "--beam", 1),
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("translating")]
    assert lines and lines[-1] == "translating: 2 texts"


def test_translate_can_sample_and_write_maps(model: Path, tmp_path: Path) -> None:
    sampled = ("translate", "--model", model, "--sample", "--top-k", 50, "--temperature", 2)
    first, second, third = (
        run(*sampled, "--seed", seed, stdin="It costs three euros.\n").stdout for seed in (1, 1, 2)
    )
    assert first == second != third
    maps = tmp_path / "maps.json"
    run("translate", "--model", model, "--maps", maps, stdin="a b\nc\n")
    found = json.loads(maps.read_text(encoding="utf-8"))
    assert len(found) == 2
    assert len(found[0]["cross"][0][0][0]) == len(found[0]["source"])


def test_translate_writes_into_a_fifo_and_through_a_link(model: Path, tmp_path: Path) -> None:
    fifo, link, target = tmp_path / "fifo", tmp_path / "link", tmp_path / "target"
    os.mkfifo(fifo)
    link.symlink_to(target)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_text(encoding="utf-8")))
    reader.start()
    options = ("translate", "--model", model, "--beam", 1)
    assert run(*options, "--output", fifo, "--maps", link, stdin="a b\n\n").exit_code == 0
    reader.join(timeout=10)
    assert received and received[0].count("\n") == 2
    assert fifo.is_fifo() and link.is_symlink()
    assert len(json.loads(target.read_text(encoding="utf-8"))) == 1
    assert run(*options, "--output", "/dev/null", stdin="a b\n").exit_code == 0
    assert Path("/dev/null").is_char_device()


def test_recipes_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a terminal each recipe is one line.
    monkeypatch.delenv("COLUMNS", raising=False)
    listed = dict(line.split(None, 1) for line in run("recipes").stdout.splitlines())
    assert listed == json.loads(run("recipes", "--json").stdout)
    assert listed.keys() == set(recipes.names())


@given(st.binary(max_size=60), st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_one_output_line_per_input_line(
    model: Path, data: bytes, document: bool
) -> None:
    options = ("--document",) if document else ()
    done = run("translate", "--model", model, "--beam", 1, *options, stdin=data)
    assert done.exit_code == 0
    expected = data.count(b"\n") + (bool(data) and not data.endswith(b"\n"))
    assert done.stdout_bytes.count(b"\n") == expected


def test_evaluate_compares_systems(tmp_path: Path) -> None:
    (tmp_path / "ref").write_text("<d>\nthe cat sat on the mat\n<d>\nthe dog\n", encoding="utf-8")
    (tmp_path / "a").write_text("<d>\nthe cat sat on the mat\n<d>\na dog\n", encoding="utf-8")
    (tmp_path / "b").write_text("<d>\nthe cat on the mat\n<d>\ndog the\n", encoding="utf-8")
    files = ("--reference", tmp_path / "ref", "--hypothesis", tmp_path / "a")
    both = (*files, "--hypothesis", tmp_path / "b", "--documents", "--samples", 20)
    tokenised = [part for name in "ab" for part in ("--tokenised-hypothesis", tmp_path / name)]
    table = run("evaluate", *both, "--tokenised-reference", tmp_path / "ref", *tokenised)
    assert table.exit_code == 0, table.output
    for part in ("d-BLEU", "tokenised BLEU", "lower-cased", "TER", "p = ", "tok:none"):
        assert part in table.stdout
    found = json.loads(run("evaluate", *both, "--json").stdout)
    assert [system["name"] for system in found["systems"]] == ["a", "b"]
    assert found["documents"] == 2 and found["comparisons"]


MISTAKES = [
    (("train", "none.yaml", "--out", "x"), "none.yaml"),
    (("translate", "--model", "none"), "none, the folder of a model or a run, does not exist"),
    (("translate", "--model", "MODEL", "--top-k", "3"), "top_k is 3, which needs --sample"),
    (("translate", "--model", "MODEL", "--seed", "0"), "seed is 0, which needs --sample"),
    (("translate", "--model", "MODEL", "--beam", "0"), "beam must be at least 1"),
    (("translate", "--model", "MODEL", "--input", "none.txt"), "none.txt cannot be read"),
    (("translate", "--model", "MODEL", "--max-length", "1"), "max_length"),
    (("translate", "--model", "MODEL", "--output", "/dev/null/x"), "/dev/null/x cannot be used"),
    # Outputs are checked before the model is looked for.
    (("translate", "--model", "none", "--output", "."), ". cannot be used: Is a directory"),
    (("translate", "--model", "none", "--maps", "/"), "/ cannot be used: Is a directory"),
    (("bench", "--quick", "--out", "."), ". cannot be used: Is a directory"),
    (("train", "sentense", "--out", "x"), "recipe must be one of document, "),
    (("evaluate", "--reference", "none", "--hypothesis", "x"), "none cannot be read"),
    (("inspect", "none", "--maps", "."), ". cannot be used: Is a directory"),
    (("inspect", "none", "--plots", "/dev/null"), "/dev/null cannot be used: Not a directory"),
    (("report", ".", "--out", "x", "--markdown", "."), ". cannot be used: Is a directory"),
    (("report", ".", "--out", "x", "--markdown", "x"), "x is used twice"),
    (("translate", "--input", "x", "--output", "x"), "x is used twice"),
    (("study", "ffn", "--out", "x", "--minutes", "nan"), "minutes must be a finite number"),
    (("study", "ffn", "--out", "/dev/null"), "/dev/null"),
    (("study", "ffn", "--out", "x", "--budget", "tiny", "--set", "a"), "--set a must have"),
    (("study", "ffn", "--out", "x", "--budget", "full"), "corpus europarl-sent is not prepared"),
    (("study", "ffn", "--out", "x", "--jobs", "99999999999"), "jobs must be from 1 to 256"),
    (("translate", "--beam", "x"), "invalid value for '--beam': 'x' is not a valid int; see"),
    (("translate", "--device", "tpu"), "'tpu' is not one of 'cpu', 'cuda'"),
    (("translate", "--beam"), "option '--beam' requires an argument"),
    (("train", "tiny"), "missing option '--out'; see "),
    (("info", "x", "\x1b[31m\n"), "got unexpected extra argument(s) (x \\x1b[31m\\n)"),
    (("nonsense",), "no such command 'nonsense'; see "),
    (("--nonsense",), "no such option: --nonsense"),
    (("prepare", "x"), "--train SOURCE TARGET"),
    (("prepare",), "one folder"),
    (("prepare", "x", "--corpus", "multi30k"), "--root"),
    (("prepare", "x", "--corpus", "nonsense", "--root", "y"), "multi30k"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda v: "-".join(v)[:40])
def test_a_user_mistake_prints_one_line_and_exits_with_2(
    arguments: tuple[str, ...],
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*(model if argument == "MODEL" else argument for argument in arguments))
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("reluformer: ")
    assert not list(tmp_path.iterdir())


def test_without_a_command_all_commands_are_listed() -> None:
    done = run()
    assert done.exit_code == 2 and "Commands:\n" in done.output


def test_a_misspelt_field_is_reported_before_any_file_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("train", "toy-reverse", "--out", out, "--set", "train.stepz=3")
    assert done.exit_code == 2 and "train.stepz" in done.stderr and "steps" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("error", "status"), [(Diverged(7, "loss is nan", {}), 3), (KeyboardInterrupt(), 130)]
)
def test_divergence_and_interruption_have_their_own_status(
    error: BaseException, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("reluformer.train.train", fail)
    done = run("train", "toy-reverse", "--out", tmp_path / "out")
    assert done.exit_code == status
    assert done.stderr.startswith("reluformer: ") and done.stderr.count("\n") == 1


def test_a_closed_pipe_and_an_interruption_give_no_traceback(model: Path) -> None:
    translate = command("translate", "--model", model, "--beam", 1)
    # Background jobs ignore SIGINT, and child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    closed = subprocess.Popen(translate, cwd=ROOT, **pipes)
    interrupted = subprocess.Popen(translate, cwd=ROOT, **pipes)
    closed.stdout.close()
    for process in (closed, interrupted):
        process.stdin.write(b"one\n")
        process.stdin.flush()
    assert interrupted.stdout.readline()
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(timeout=60) == 130
    printed = interrupted.stderr.read().decode().splitlines()
    assert printed[-1] == "reluformer: interrupted"
    assert all(line.startswith("reluformer: ") for line in printed)
    assert closed.wait(timeout=60) == 141
    assert "Error" not in closed.stderr.read().decode()


@pytest.mark.slow
def test_a_terminated_translation_leaves_nothing(model: Path, tmp_path: Path) -> None:
    arguments = command("translate", "--model", model, "--output", tmp_path / "out")
    process = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    while not list(tmp_path.glob("out.*.partial")):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == -signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_an_interruption_during_start_up_prints_one_line() -> None:
    # Typer's import is the slowest part of the start-up: interrupt it.
    code = """
import signal, sys
from reluformer.__main__ import main

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "reluformer: interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_prints_one_line(model: Path) -> None:
    with open("/dev/full", "wb") as full:
        translation = ("translate", "--model", model, "--beam", 1)
        for arguments in (("--help",), ("--version",), ("train", "--help"), ("info",), translation):
            call = command(*arguments)
            done = subprocess.run(
                call, cwd=ROOT, input=b"one\n", stdout=full, stderr=subprocess.PIPE
            )
            assert done.returncode == 2
            lines = done.stderr.decode().splitlines()
            assert lines[-1] == "reluformer: No space left on device"
            assert all(line.startswith("reluformer: ") for line in lines)


def test_closed_standard_streams(model: Path, tmp_path: Path) -> None:
    def shell(text: str) -> tuple[int, str, str]:
        line = text.replace("reluformer", shlex.join(command()), 1)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        call = {"cwd": tmp_path, "capture_output": True, "text": True, "env": environment}
        done = subprocess.run(["sh", "-c", line], **call)
        return done.returncode, done.stdout, done.stderr

    for text in ("reluformer recipes >&-", "reluformer --help >&-"):
        assert shell(text) == (2, "", "reluformer: standard output is closed\n")
    # No message may end up in standard output.
    assert shell("reluformer train none.yaml --out x 2>&-") == (2, "", "")
    # Nor in a file that got the descriptor.
    translate = f"reluformer translate --model {shlex.quote(str(model))} --beam 1"
    (tmp_path / "in").write_text("one\n")
    status, *_ = shell(f"{translate} --input in --output out >&- 2>&- <&-")
    assert status == 0 and (tmp_path / "out").read_text().count("\n") == 1
    assert shell(f"{translate} <&-")[:2] == (0, "")


def test_two_ranks_translate_like_one_process(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    # More lines than one block of two ranks, in documents of different sizes.
    texts = [f"{n} {'euros ' * (n % 5)}" if n % 7 else "<d>" for n in range(600)]
    source.write_text("\n".join(texts) + "\n", encoding="utf-8")
    options = ("--model", model, "--input", source, "--beam", 1, "--document")
    alone = run("translate", *options).stdout
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [
        subprocess.Popen(
            command("translate", *options),
            cwd=ROOT,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs == [alone, ""]
    assert alone.count("\n") == 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
