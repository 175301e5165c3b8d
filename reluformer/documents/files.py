"""Translation of files in the formats of `formats.py`."""

import sys
from pathlib import Path

from reluformer.documents.translation import Document
from reluformer.errors import UserError
from reluformer.reading import read_text
from reluformer.translation.stream import open_target
from reluformer.translation.translator import Translator

# Documents are held in memory, in several forms.
_MOST_BYTES = 2**26


def translate_document_file(
    translator: Translator, source: Path | None, target: Path | None, name: str
) -> None:
    """Translate a document with its structure.

    Args:
        translator: The model.
        source: UTF-8 file; None reads standard input.
        target: File that appears when the translation is finished; None is standard output.
        name: Format of the document.
    """
    document = Document(_read(source), name)
    with open_target(target) as out:
        for _ in document.translate(translator):
            pass
        out.write(document.result().encode())


def _read(source: Path | None) -> str:
    if source is not None:
        return read_text(source, _MOST_BYTES, allow_pipe=True)
    content = sys.stdin.buffer.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise UserError(f"standard input must have at most {_MOST_BYTES:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UserError("standard input is not UTF-8 text") from None
