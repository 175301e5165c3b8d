"""The commands that are interrupted, each with a check of the files that it leaves."""

import hashlib
import importlib
import json
import os
import shutil
import sys
import time
import traceback
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from reluformer.__main__ import main
from reluformer.checkpoint import load_run, steps
from reluformer.data.synthetic import sample
from reluformer.files import PARTIAL

UNCHANGED, COMPLETE = "unchanged", "complete"
# Imported here, because forked commands would otherwise spend their time on these imports.
for _module in ("reluformer.train.loop", "reluformer.translation.translator"):
    importlib.import_module(_module)

MODEL = ["width=32", "heads=2", "encoder_layers=1", "decoder_layers=1", "slots=32"]


class Broken(Exception):
    """A command left a file or folder that is neither the old nor the new one."""


class Command:
    """A command in a forked process, which has imported the package already.

    Kills therefore hit the work, not the imports before it.
    """

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.log, self.status = log, -1
        self.pid = os.fork()
        if self.pid == 0:
            _run_and_exit(arguments, log)

    def wait(self, seconds: float = 600.0) -> bool:
        """Wait for the end of the process; False if it still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                return True
            time.sleep(0.0005)
        return False

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)

    def message(self) -> str:
        """Last line on standard error."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return lines[-1] if lines else ""


def _run_and_exit(arguments: list[str], log: Path) -> None:
    status = 0
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(output, 2)
        sys.argv = ["reluformer", *arguments]
        main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 70
    os._exit(status)


class Job(ABC):
    """A command with its input in one folder and its output in another."""

    name: str

    def __init__(self, inputs: Path, folder: Path) -> None:
        self.inputs, self.folder, self.log = inputs, folder, inputs / f"{self.name}.log"
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    @abstractmethod
    def arguments(self) -> list[str]:
        """Arguments of the command line."""

    @abstractmethod
    def reset(self, number: int) -> None:
        """Restore the state before attempt `number`."""

    @abstractmethod
    def state(self) -> str:
        """UNCHANGED or COMPLETE.

        Raises:
            Broken: The output is anything else.
        """

    def start(self) -> Command:
        """Start the command."""
        return Command(self.arguments, self.log)

    def finish(self) -> float:
        """Run the command to its end; return its seconds."""
        began = time.monotonic()
        command = self.start()
        if not command.wait() or command.status != 0:
            raise Broken(f"{self.name} failed without a fault: {command.message()}")
        return time.monotonic() - began

    def leftovers(self) -> int:
        """Number of unfinished files and folders."""
        return len(list(self.folder.rglob(f"*{PARTIAL}")))


class Prepare(Job):
    """`prepare` into a new folder, and with --overwrite into one of other data, in turn."""

    name = "prepare"

    def __init__(self, inputs: Path, folder: Path, sentences: int = 400) -> None:
        super().__init__(inputs, folder)
        self.out, self.old, self.overwrites = folder / "data", inputs / "old-data", False
        if not (inputs / "text").exists():
            sample.write(inputs / "text", train=sentences, dev=20, test=20, seed=0)
        self.new_digest: dict[str, str] = {}
        self.old_digest: dict[str, str] = {}

    @property
    def arguments(self) -> list[str]:
        text = self.inputs / "text"
        pairs = [f"--{s} {text}/{s}.en {text}/{s}.de".split() for s in ("train", "dev")]
        size = ["--vocab-size", "400", *(["--overwrite"] if self.overwrites else [])]
        return ["prepare", str(self.out), *pairs[0], *pairs[1], *size]

    def reset(self, number: int) -> None:
        """Every second attempt replaces other data."""
        if not self.new_digest:
            self.finish()
            self.new_digest = digest(self.out)
            shutil.copytree(self.out, self.old)
            manifest = json.loads((self.old / "manifest.json").read_text())
            manifest["request"]["vocab_size"] = 401
            (self.old / "manifest.json").write_text(json.dumps(manifest))
            self.old_digest = digest(self.old)
        shutil.rmtree(self.out, ignore_errors=True)
        self.overwrites = number % 2 == 1
        if self.overwrites:
            shutil.copytree(self.old, self.out)

    def state(self) -> str:
        found = digest(self.out)
        if found == self.new_digest:
            return COMPLETE
        if found == (self.old_digest if self.overwrites else {}):
            return UNCHANGED
        raise Broken(f"{self.out} is neither old nor new")


class Translate(Job):
    """`translate --output` onto a file with other content."""

    name = "translate"

    def __init__(self, inputs: Path, folder: Path, model: Path, lines: int = 600) -> None:
        super().__init__(inputs, folder)
        self.out, self.model = folder / "out.txt", model
        self.source = inputs / "source.txt"
        words = (" ".join("abcdefgh"[i % 8 : i % 8 + 1 + i % 5]) for i in range(lines))
        self.source.write_text("".join(f"{line}\n" for line in words))
        self.translation = b""

    @property
    def arguments(self) -> list[str]:
        files = ["--input", str(self.source), "--output", str(self.out)]
        return ["translate", "--model", str(self.model), "--device", "cpu", *files]

    def reset(self, number: int) -> None:
        if not self.translation:
            self.finish()
            self.translation = self.out.read_bytes()
        self.out.write_bytes(b"precious\n")

    def state(self) -> str:
        content = self.out.read_bytes()
        if content == self.translation:
            return COMPLETE
        if content == b"precious\n":
            return UNCHANGED
        raise Broken(f"{self.out} has {len(content)} of {len(self.translation)} bytes")


class Train(Job):
    """`train`, which resumes where the attempt before was killed.

    COMPLETE means that there is a newer complete checkpoint, or the finished model.
    """

    name = "train"

    def __init__(self, inputs: Path, folder: Path, count: int, every: int = 5) -> None:
        super().__init__(inputs, folder)
        self.out, self.latest, self.count, self.every = folder / "run", 0, count, every

    @property
    def arguments(self) -> list[str]:
        data = ["generated.train=400", "generated.dev=10"]
        train = [f"steps={self.count}", f"checkpoint_every={self.every}", "log_every=1"]
        train += [f"dev_every={4 * self.every}", "bleu_every=null", "device=cpu", "threads=1"]
        sections = {"data": data, "model": MODEL, "train": train}
        pairs = [f"--set={name}.{pair}" for name, pairs in sections.items() for pair in pairs]
        return ["train", "toy-reverse", "--quiet", "--out", str(self.out), *pairs]

    def reset(self, number: int) -> None:
        """Nothing: the next attempt resumes."""

    def state(self) -> str:
        if not (self.out / "checkpoints").exists():
            return UNCHANGED
        newest = self.newest()
        if newest < self.latest:
            raise Broken(f"the newest checkpoint is {newest}, but {self.latest} was written")
        if newest or (self.out / "model").exists():
            load_run(self.out)
        before, self.latest = self.latest, newest
        return COMPLETE if newest > before else UNCHANGED

    @property
    def share(self) -> int:
        """Steps that one attempt may make before it is killed."""
        return 2 * self.every

    def newest(self) -> int:
        """Step of the newest complete checkpoint; 0 without one."""
        return max(steps(self.out), default=0)

    def records(self) -> list[dict[str, Any]]:
        """Metrics that do not depend on the clock."""
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        for record in records:
            record.pop("tokens_per_second", None)
        return records

    def differences(self, whole: "Train") -> list[str]:
        """Files that differ from those of an undisturbed run."""
        different = [] if self.records() == whole.records() else ["metrics.jsonl"]
        models = digest(self.out / "model"), digest(whole.out / "model")
        different += [name for name in models[1] if models[0].get(name) != models[1][name]]
        return different + ["unfinished files"] * (self.leftovers() > 0)


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`, by relative path; empty if there is no folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
