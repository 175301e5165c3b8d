"""The model that is part of the package: English to German, documents."""

from pathlib import Path

from reluformer.errors import UserError

SOURCE, TARGET = "en", "de"
"""ISO 639 codes of its languages."""
DEMO_DOCUMENT = "demo.txt"
"""File of its folder with an English document of running text."""
TWIN_MAPS = "softmax-maps.json"
"""File of its folder with attention maps of a softmax model on the demo document."""

_FOLDER = Path(__file__).parent / "shipped_models" / f"{SOURCE}-{TARGET}"


def shipped_model() -> Path:
    """Folder of the shipped model.

    Raises:
        UserError: This copy of the package has none.
    """
    if not (_FOLDER / "config.json").is_file():
        raise UserError(
            "this copy of reluformer has no shipped model, so the folder of a run or a model is "
            "needed (--model FOLDER, Translator.load(FOLDER))"
        )
    return _FOLDER
