"""Sound folders that the tests damage, and the limits under which damaged ones must be refused."""

import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from reluformer import checkpoint
from reluformer.checkpoint import RunState
from reluformer.config.recipe import load_recipe
from reluformer.data.prepare import prepare
from reluformer.data.synthetic import sample
from reluformer.data.text import TextPair
from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.model.pretrained import distinct_tensors

SECONDS, WAIT, KIBIBYTES = 10, 60, 2**20


@pytest.fixture(scope="session")
def sound_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `build_sound_folder`."""
    return build_sound_folder(tmp_path_factory.mktemp("sound"))


def build_sound_folder(folder: Path) -> Path:
    """Write a finished model `model`, a run with a checkpoint `run`, and prepared data `data`."""
    tokenizer = Tokenizer.train(["the cat sat on the mat", "the dog ate the cat"] * 3, 290)
    sizes = ("width=8", "heads=2", "encoder_layers=1", "decoder_layers=1", "slots=8")
    recipe = load_recipe("tiny", [f"model.{size}" for size in sizes])
    model = ReLUFormer(recipe.model_with(tokenizer.vocab_size))
    model.save_pretrained(folder / "model")
    checkpoint.save(folder / "run", RunState(step=5), {"model": distinct_tensors(model)})
    for part in ("model", "run"):
        tokenizer.save(folder / part / "tokenizer.json")
        recipe.save(folder / part / "recipe.yaml")
    text = sample.write(folder / "text", train=20, dev=3, test=3, seed=0)
    splits = {s: [TextPair(text / f"{s}.en", text / f"{s}.de")] for s in ("train", "dev")}
    prepare(folder / "data", splits, vocab_size=300)
    return folder


@pytest.fixture
def folder(sound_folder: Path, tmp_path: Path) -> Path:
    """A copy of the sound folders."""
    return Path(shutil.copytree(sound_folder, tmp_path / "copy"))


@contextmanager
def limits() -> Iterator[None]:
    """Fail if the block takes more than 10 seconds of the processor, or 1 GiB of memory.

    A block that waits, for a FIFO for example, fails after a minute, because other processes may
    slow it down.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still running after {SECONDS} seconds of work or {WAIT} in all")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timers = {
        signal.SIGALRM: (signal.ITIMER_REAL, WAIT),
        signal.SIGPROF: (signal.ITIMER_PROF, SECONDS),
    }
    previous = {number: signal.signal(number, stop) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, previous[number])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < KIBIBYTES, f"{grown} KiB of memory"


def refusal(action: Callable[[], object]) -> str | None:
    """Message of the UserError of an action within the limits, None if it succeeds."""
    with limits():
        try:
            action()
        except UserError as error:
            message = str(error)
            assert message and len(message) < 2000 and "\n" not in message.strip(), message
            return message
    return None


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    """Apply `change` to the object in a JSON file."""
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
