"""Attention maps of a softmax model on the demo document, stored beside a ReLU model.

    python -m reluformer.serve.twin FOLDER TWIN [NAME]

FOLDER is the model's, with the document in `demo.txt`; TWIN is the folder of the softmax model.
"""

import sys
from pathlib import Path

import torch

from reluformer.checkpoint import load_run
from reluformer.documents.translation import Document
from reluformer.errors import UserError
from reluformer.files import write_json
from reluformer.inspection.maps import MOST_TOKENS, pack_maps
from reluformer.reading import read_text
from reluformer.shipped import DEMO_DOCUMENT, TWIN_MAPS
from reluformer.translation.attention_maps import compute_maps
from reluformer.translation.translator import Translator


def write_twin_maps(folder: Path, twin: Path, name: str = "softmax twin") -> Path:
    """Write the twin's maps of every sentence of the demo document.

    Both models read the translations of the first, so that rows and columns are comparable.

    Args:
        folder: Folder of the model, in which the maps are written.
        twin: Folder of the run of the softmax model.
        name: Heading of its maps.

    Returns:
        The file with the maps.
    """
    document = Document(read_text(folder / DEMO_DOCUMENT, 2**16))
    other = load_run(twin)
    texts = []
    for sentence in document.translate(Translator.load(folder)):
        pair = (sentence.source, sentence.target)
        ids = [other.tokenizer.encode(text)[:MOST_TOKENS] for text in pair]
        with torch.inference_mode():
            packed = pack_maps(sentence.source, compute_maps(other.model, other.tokenizer, *ids))
        packed["predicted"] = [*packed["target"][1:], "<eos>"]
        texts.append({"sentence": sentence.source, "maps": packed})
    write_json(folder / TWIN_MAPS, {"name": name, "texts": texts})
    return folder / TWIN_MAPS


if __name__ == "__main__":
    try:
        print(write_twin_maps(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4]))
    except (IndexError, UserError) as error:
        sys.exit(str(error) if isinstance(error, UserError) else __doc__)
