"""Trained models of this package as folders that transformers loads."""

from pathlib import Path

import tokenizers
from transformers import PreTrainedTokenizerFast

from reluformer.checkpoint import load_run
from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError
from reluformer.files import atomic_folder
from reluformer.hf.models import ReLUFormerForConditionalGeneration
from reluformer.model.tensor_files import write_errors


def export_run(run: Path | str, folder: Path | str) -> Path:
    """Write the model and the tokenizer of a run as a folder for transformers.

    With `reluformer.hf` imported, `AutoModelForSeq2SeqLM`, `AutoTokenizer` and
    `pipeline("translation")` load the folder.

    Args:
        run: Folder of a run, of a finished model or of one checkpoint.
        folder: Folder to write; it must not exist.

    Returns:
        The folder.

    Raises:
        UserError: The run holds no model, or `folder` exists.
    """
    target = Path(folder)
    if target.exists():
        raise UserError(f"the folder to write must not exist, got {target}")
    loaded = load_run(run)
    model = ReLUFormerForConditionalGeneration.from_model(loaded.model)
    length = loaded.recipe.data.max_length
    generation = model.generation_config
    generation.max_length, generation.num_beams = None, loaded.recipe.decode.beam
    generation.length_penalty = loaded.recipe.decode.length_penalty
    generation.max_new_tokens = length
    generation.suppress_tokens = [loaded.model.config.pad_id, loaded.model.config.bos_id]
    with atomic_folder(target) as partial:
        with write_errors(target):
            model.save_pretrained(partial)
        to_transformers(loaded.tokenizer, length).save_pretrained(partial)
    return target


def to_transformers(tokenizer: Tokenizer, length: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with the same ids; it appends eos to every text.

    Sentences of a document are separated by its `sep_token`.

    Args:
        tokenizer: The tokenizer.
        length: Longest text in ids that the model was trained on.
    """
    bpe = tokenizers.Tokenizer.from_str(tokenizer.specification)
    names = {
        name: bpe.id_to_token(getattr(tokenizer, name)) for name in ("pad", "bos", "eos", "sep")
    }
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {names['eos']}", special_tokens=[(names["eos"], tokenizer.eos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        clean_up_tokenization_spaces=False,
        **({} if length is None else {"model_max_length": length}),
        **{f"{name}_token": token for name, token in names.items()},
    )
