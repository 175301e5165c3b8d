"""Build a wheel, install it in an empty environment, and run the commands of README.md there.

    python tools/check_wheel.py
    python tools/check_wheel.py --environment FOLDER   # keep or use this environment

The commands run as they are printed, in an empty folder with a generated sample as text, except
that options make training and benchmark small enough for a CPU. The Python blocks follow. Exits
with 1 at the first failure.
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL_MODEL = ("width=32", "heads=2", "encoder_layers=1", "decoder_layers=1", "slots=32")
SMALL_RUN = ("steps=20", "checkpoint_every=10", "dev_every=10", "device=cpu", "batch_tokens=512")
SMALL = [f"--set model.{pair}" for pair in SMALL_MODEL] + [f"--set train.{p}" for p in SMALL_RUN]
EXTRA = {"train": " ".join(SMALL), "bench": "--quick", "serve": "--port 0"}
"""Options that are added to a command, by its name."""
TEXT = """
from reluformer.data.synthetic import sample
from pathlib import Path
folder = sample.write(Path("text"), train=200, dev=10, test=10, seed=0)
for name, split in (("train", "train"), ("dev", "dev"), ("talk", "test")):
    for side in ("en", "de"):
        text = (folder / f"{split}.{side}").read_text(encoding="utf-8")
        Path(f"{'talk.ref' if (name, side) == ('talk', 'de') else name}.{side}").write_text(text)
Path("talk.md").write_text("# A title\\n\\nIt costs *three* euros.\\n")
"""


def blocks(language: str) -> list[str]:
    """Code blocks of the README in a language."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Lines of the README that call `reluformer`, with the options of `EXTRA`."""
    lines = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    calls = [line for line in lines if re.match(r"(echo .* \| )?reluformer ", line)]
    more = [f"reluformer train {name} --out runs/{name}" for name in ("small", "toy-reverse")]
    return [_with_options(call) for call in [*calls, *more, "reluformer info"]]


def _with_options(call: str) -> str:
    """The call with the options of `EXTRA`, before any redirection."""
    name = call.rpartition("reluformer ")[2].split()[0]
    arguments, *redirections = re.split(r" (?=[<>])", call, maxsplit=1)
    return " ".join([arguments, EXTRA.get(name, ""), *redirections])


def install(folder: Path, wheels: Path) -> Path:
    """Create an environment with the wheel; return its folder of programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    pip = [programs / "pip", "install", "--quiet", "--disable-pip-version-check"]
    pinned = [*pip, "-c", ROOT / "constraints.txt"]
    build = [programs / "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = wheels.glob("reluformer-*.whl")
    subprocess.run([*pinned, "torch"], check=True)
    subprocess.run([*pinned, f"{wheel}[plots,serve]"], check=True)
    return programs


def run(command: list[str] | str, folder: Path, programs: Path) -> None:
    """Run a command in the folder; exit if it fails."""
    began = time.monotonic()
    # Without PYTHONPATH and outside the repository only the wheel is imported.
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8"}
    started = subprocess.Popen(
        command if not isinstance(command, str) else ["sh", "-c", f"exec {command}"],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    if "reluformer serve" in command and started.stdout is not None:
        # A server is interrupted when it is ready, and must then stop with status 0.
        started.stdout.readline()
        started.send_signal(signal.SIGINT)
    errors = started.communicate()[1]
    shown = command if isinstance(command, str) else "Python block"
    print(f"{time.monotonic() - began:6.1f} s  {shown[:110]}", flush=True)
    if started.returncode:
        sys.exit(f"failed with status {started.returncode}: {errors.strip()[-2000:]}")


def main() -> None:
    """Install the wheel and run everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--environment", type=Path, help="environment to create or to use")
    options = parser.parse_args()
    # Background jobs ignore interruptions, and child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "empty")
        folder.mkdir()
        environment = options.environment or Path(name, "environment")
        programs = (environment / "bin").absolute()
        if not (programs / "reluformer").exists():
            programs = install(environment, Path(name, "wheels")).absolute()
        python = str(programs / "python")
        run([python, "-c", TEXT], folder, programs)
        for command in commands():
            run(command, folder, programs)
        run([python, "-c", "\n".join(blocks("python"))], folder, programs)


if __name__ == "__main__":
    main()
