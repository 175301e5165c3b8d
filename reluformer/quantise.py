"""Finished models with weights in int8."""

from pathlib import Path

from reluformer.checkpoint import RECIPE, TOKENIZER, load_run
from reluformer.errors import UserError
from reluformer.files import atomic_folder
from reluformer.model.pretrained import save_int8


def quantise_run(run: Path | str, out: Path | str) -> int:
    """Write the model of a run with tables of weights in int8, its tokenizer and its recipe.

    `Translator.load` and `load_run` read the folder. Each row of a table is stored with one scale;
    norms, biases, gammas and thresholds stay float32.

    Args:
        run: Folder of a run, of a finished model or of one checkpoint.
        out: Folder to create.

    Returns:
        Size of the new folder in bytes.

    Raises:
        UserError: `run` holds no model, its weights are not finite, or `out` exists.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"out must be a new or empty folder, got {folder}")
    loaded = load_run(run)
    with atomic_folder(folder) as partial:
        save_int8(loaded.model, partial)
        loaded.tokenizer.save(partial / TOKENIZER)
        loaded.recipe.save(partial / RECIPE)
    return sum(file.stat().st_size for file in folder.iterdir())
