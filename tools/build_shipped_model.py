"""Build the folder of the shipped model from the runs of the ReLU model and its softmax twin.

    python tools/build_shipped_model.py RUN TWIN              # weights, tokenizer, recipe, maps
    python tools/build_shipped_model.py RUN TWIN --data DATA  # and the scores of the model card

DATA is the prepared corpus; its scores take minutes, see `benchmarks/model_card.py`. Documents and
the model card in the folder stay as they are. Exits with 1 if the folder is too large.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.model_card import RESULTS  # noqa: E402
from reluformer.checkpoint import RECIPE, load_run  # noqa: E402
from reluformer.console import guarded  # noqa: E402
from reluformer.errors import UserError  # noqa: E402
from reluformer.quantise import quantise_run  # noqa: E402
from reluformer.serve.twin import write_twin_maps  # noqa: E402
from reluformer.shipped import SHIPPED_FOLDER, TWIN_MAPS  # noqa: E402

MOST_BYTES = 24 * 2**20
MOST_BYTES_OF_A_FILE = 16_000_000
# Paths of the machine that trained the model do not belong in its recipe.
DATA, FIRST_RUN = "data/europarl-doc", "runs/translator-sentences"


def build(run: Path, twin: Path, folder: Path, penalty: float | None) -> int:
    """Replace the model in `folder`, write the twin's maps, and return the size of the folder."""
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary) / "model"
        quantise_run(run, new)
        for file in (*folder.glob("*.safetensors"), folder / TWIN_MAPS):
            file.unlink(missing_ok=True)
        for file in new.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    recipe = load_run(folder).recipe
    start = None if recipe.train.start_from is None else FIRST_RUN
    dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, source=DATA),
        train=dataclasses.replace(recipe.train, start_from=start),
        decode=dataclasses.replace(
            recipe.decode,
            length_penalty=recipe.decode.length_penalty if penalty is None else penalty,
        ),
    ).save(folder / RECIPE)
    write_twin_maps(folder, twin)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size:>12,}  {name}")
        if size >= MOST_BYTES_OF_A_FILE:
            raise UserError(f"{name} must have less than {MOST_BYTES_OF_A_FILE:,} bytes")
    total = sum(sizes.values())
    if total > MOST_BYTES:
        raise UserError(f"the folder must have at most {MOST_BYTES:,} bytes, got {total:,}")
    return total


@guarded
def main() -> None:
    """Build the folder, then measure the model."""
    parser = argparse.ArgumentParser(description="Build the shipped model.")
    parser.add_argument("run", type=Path, help="run of the ReLU model")
    parser.add_argument("twin", type=Path, help="run of the softmax model")
    parser.add_argument("--length-penalty", type=float, help="as tuned on dev")
    parser.add_argument("--data", type=Path, help="prepared corpus")
    parser.add_argument("--folder", type=Path, default=SHIPPED_FOLDER, help="folder to fill")
    arguments = parser.parse_args()
    size = build(arguments.run, arguments.twin, arguments.folder, arguments.length_penalty)
    print(f"{size:,} bytes")
    if arguments.data:
        options = ["--model", arguments.folder, "--data", arguments.data, "--out", RESULTS]
        options += ["--float32", arguments.run, "--softmax", arguments.twin]
        command = [sys.executable, "-m", "benchmarks.model_card", *map(str, options)]
        subprocess.run(command, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
