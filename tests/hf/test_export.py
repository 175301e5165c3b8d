"""A run as a folder of transformers, and `pipeline("translation")`."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors import SafetensorError  # noqa: E402  # after the check for the package
from typer.testing import CliRunner  # noqa: E402

from reluformer import ReLUFormer, Translator  # noqa: E402
from reluformer.cli import app  # noqa: E402
from reluformer.data.tokenizer import Tokenizer  # noqa: E402
from reluformer.errors import UserError  # noqa: E402
from reluformer.hf import export_run  # noqa: E402
from reluformer.model.pretrained import distinct_tensors  # noqa: E402
from reluformer.train.finalise import write_model  # noqa: E402
from tests.train.tiny import tiny  # noqa: E402

TEXT = "It costs three euros."


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with random weights."""
    torch.manual_seed(3)
    recipe = tiny()
    tokenizer = Tokenizer.train([TEXT, "It leaves at noon."] * 3, 280)
    model = ReLUFormer(recipe.model_with(tokenizer.vocab_size))
    write_model(tmp_path / "run", recipe, tokenizer, distinct_tensors(model))
    return tmp_path / "run"


def test_the_pipeline_translates_as_our_translator(run: Path, tmp_path: Path) -> None:
    folder = export_run(run, tmp_path / "exported")
    pipeline = transformers.pipeline("translation", str(folder), device="cpu")
    assert pipeline.model.generation_config.num_beams == 5
    found = pipeline(TEXT, num_beams=1, max_new_tokens=8)
    ours = Translator.load(run, beam=1, max_ratio=0.0, max_extra=8)
    expected = ours(TEXT)
    assert [*found[0]] == ["translation_text"]
    # The search of ours bans the separator within a sentence, and strips spaces.
    assert found[0]["translation_text"].split()[:1] == expected.split()[:1]
    both = pipeline([TEXT, "It leaves."], num_beams=2, max_new_tokens=4)
    assert len(both) == 2


def test_an_exported_model_has_the_logits_of_the_run(run: Path, tmp_path: Path) -> None:
    folder = export_run(run, tmp_path / "exported")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Translator.load(run).model
    source = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    target = torch.tensor([[1, 20, 30]])
    found = model(input_ids=source, decoder_input_ids=target).logits
    torch.testing.assert_close(found, ours(source, target).logits)


def test_an_existing_folder_is_not_replaced(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must not exist"):
        export_run(run, tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        export_run(tmp_path / "nothing", tmp_path / "exported")


def test_the_command(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    done = CliRunner().invoke(app, ["export-hf", str(run), str(out)])
    assert done.exit_code == 0 and (out / "tokenizer.json").is_file()
    again = CliRunner().invoke(app, ["export-hf", str(run), str(out)])
    assert again.exit_code == 2


def test_a_full_disk_is_an_error_of_the_system(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*arguments: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", save)
    with pytest.raises(OSError, match="No space left on device"):
        export_run(run, tmp_path / "exported")
    assert not list(tmp_path.glob("exported*"))
