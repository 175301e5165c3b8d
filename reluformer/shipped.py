"""The model that is part of the package: English to German, documents."""

from pathlib import Path

from reluformer.errors import UserError

SHIPPED = "shipped"
"""Stands for the folder of the shipped model in settings; a folder of this name is `./shipped`."""
SOURCE, TARGET = "en", "de"
"""ISO 639 codes of its languages."""
DEMO_DOCUMENT = "demo.txt"
"""File of its folder with an English document of running text."""
TEST_SOURCE, TEST_REFERENCE = "test.en.txt", "test.de.txt"
"""Files of its folder with a second document and its translation by hand, one sentence a line."""
TWIN_MAPS = "softmax-maps.json.xz"
"""File of its folder with attention maps of a softmax model on the demo document."""
SHIPPED_FOLDER = Path(__file__).parent / "shipped_models" / f"{SOURCE}-{TARGET}"


def shipped_model() -> Path:
    """Folder of the shipped model.

    Raises:
        UserError: This copy of the package has none.
    """
    if not (SHIPPED_FOLDER / "config.json").is_file():
        raise UserError(
            "this copy of reluformer has no shipped model, so the folder of a run or a model is "
            "needed (--model FOLDER, Translator.load(FOLDER))"
        )
    return SHIPPED_FOLDER


def model_folder(name: Path | str) -> Path:
    """The folder `name`, or the folder of the shipped model if `name` is "shipped"."""
    return shipped_model() if str(name) == SHIPPED else Path(name)
