"""`pipeline("translation")`, which transformers 5 no longer has."""

from typing import Any

from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, Pipeline, pipelines
from transformers.pipelines import PIPELINE_REGISTRY


class TranslationPipeline(Pipeline):  # type: ignore[misc]  # transformers has no types
    """Translates text with a sequence-to-sequence model and its tokenizer.

    Examples:
        >>> translate = transformers.pipeline("translation", "exported/model")
        >>> translate("It costs three euros.")
        [{'translation_text': ...}]

    Keyword arguments of a call are those of `generate`.
    """

    _pipeline_calls_generate = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], ...]:
        return {}, options, {}

    def preprocess(self, text: str) -> Any:
        """Token ids of a text."""
        encoded = self.tokenizer(text, return_tensors="pt")
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}

    def _forward(self, inputs: Any, **options: Any) -> Any:
        return {"output": self.model.generate(**inputs, **options)}

    def postprocess(self, outputs: dict[str, Tensor]) -> list[dict[str, str]]:
        """Texts of the generated ids [candidates, T]."""
        texts = self.tokenizer.batch_decode(outputs["output"], skip_special_tokens=True)
        return [{"translation_text": text} for text in texts]


def register_translation() -> None:
    """Register the task `translation`, unless this version of transformers has it."""
    # Later versions list the tasks that they have removed, and refuse these names.
    getattr(pipelines, "REMOVED_TASKS", {}).pop("translation", None)
    if "translation" not in PIPELINE_REGISTRY.get_supported_tasks():
        PIPELINE_REGISTRY.register_pipeline(
            "translation",
            pipeline_class=TranslationPipeline,
            pt_model=AutoModelForSeq2SeqLM,
            type="text",
        )
