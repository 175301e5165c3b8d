"""A MarianMTModel and its training by the Hugging Face Trainer."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reluformer.config.recipe import Recipe
from reluformer.data.tokenizer import BOS, EOS, PAD
from reluformer.model.config import ModelConfig
from reluformer.train.data import Split, load_data
from reluformer.train.run_dir import METRICS

# Label that the loss of Hugging Face ignores.
IGNORED = -100


class Examples:
    """The examples of a split for Hugging Face: `input_ids` and `labels`, each ending with eos."""

    def __init__(self, split: Split) -> None:
        self._corpus, self._spans = split.corpus, split.packing.spans

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """One example."""
        first, end = self._spans[index]
        example = {}
        for name, side in (("input_ids", self._corpus.source), ("labels", self._corpus.target)):
            example[name] = side.tokens[side.offsets[first] : side.offsets[end]].astype(np.int64)
            # Replaces the separator of the last sentence.
            example[name][-1] = EOS
        return example


def collate(examples: list[dict[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
    """A batch of `Examples`, padded to multiples of 8, with labels shifted for the decoder."""

    def pad(name: str, filler: int) -> Tensor:
        rows = [example[name] for example in examples]
        width = -(-max(map(len, rows)) // 8) * 8
        padded = np.full((len(rows), width), filler, dtype=np.int64)
        for row, ids in zip(padded, rows, strict=True):
            row[: len(ids)] = ids
        return torch.from_numpy(padded)

    sources, labels = pad("input_ids", PAD), pad("labels", IGNORED)
    shifted = labels.roll(1, dims=1)
    shifted[:, 0] = BOS
    return {
        "input_ids": sources,
        "attention_mask": (sources != PAD).long(),
        "labels": labels,
        "decoder_input_ids": shifted.masked_fill(shifted == IGNORED, PAD),
    }


def marian(config: ModelConfig, max_length: int) -> Any:
    """A MarianMTModel of the same shape, with random weights."""
    from transformers import AutoModelForSeq2SeqLM, MarianConfig

    shape = MarianConfig(
        vocab_size=config.vocabulary, d_model=config.width,
        encoder_layers=config.encoder_layers, decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.heads, decoder_attention_heads=config.heads,
        encoder_ffn_dim=config.slots, decoder_ffn_dim=config.slots, activation_function="relu",
        dropout=config.dropout, scale_embedding=True, use_cache=False,
        share_encoder_decoder_embeddings=True, tie_word_embeddings=True,
        max_position_embeddings=-(-max_length // 8) * 8, pad_token_id=PAD, bos_token_id=BOS,
        eos_token_id=EOS, decoder_start_token_id=BOS, forced_eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(shape, attn_implementation="sdpa")
    assert model.config._attn_implementation == "sdpa"
    return model


def trainer_arguments(recipe: Recipe, out: Path, rows: int) -> Any:
    """The recipe as arguments of the Trainer, with the settings that make the Trainer fastest."""
    from transformers import Seq2SeqTrainingArguments

    config, quick = recipe.train, recipe.train.device == "cpu"
    workers = 0 if quick else min(4, os.cpu_count() or 1)
    return Seq2SeqTrainingArguments(
        output_dir=str(out / "trainer"), max_steps=config.steps, seed=config.seed,
        per_device_train_batch_size=rows, train_sampling_strategy="group_by_length",
        learning_rate=config.lr, lr_scheduler_type="inverse_sqrt", warmup_steps=config.warmup,
        weight_decay=config.weight_decay, adam_beta1=config.betas[0], adam_beta2=config.betas[1],
        optim="adamw_torch_fused", max_grad_norm=config.clip or 0.0,
        label_smoothing_factor=config.smoothing, torch_compile=False,
        bf16=not quick, use_cpu=quick,
        dataloader_num_workers=workers, dataloader_persistent_workers=workers > 0,
        dataloader_pin_memory=not quick, dataloader_drop_last=True, remove_unused_columns=False,
        # Filtering NaN would synchronise the device in each step.
        logging_strategy="no", logging_nan_inf_filter=False,
        save_strategy="no", eval_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip


def train_marian(recipe: Recipe, out: Path, rows: int) -> None:
    """Train a Marian model by the recipe, and log lines in the format of `reluformer train`."""
    from transformers import Seq2SeqTrainer, TrainerCallback

    data = load_data(recipe)
    # TF32, as in `reluformer train`.
    torch.set_float32_matmul_precision("high")
    arguments = trainer_arguments(recipe, out, rows)
    # Counted on the device, to avoid a synchronisation between two lines.
    tokens = torch.zeros((), dtype=torch.int64, device=arguments.device)

    class Counting(Seq2SeqTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            tokens.add_((inputs["labels"] != IGNORED).sum())
            return super().training_step(model, inputs, *rest, **more)

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            self.on_step_end(args, state, control)

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step % recipe.train.log_every == 0:
                if arguments.device.type == "cuda":
                    torch.cuda.synchronize()
                with (out / METRICS).open("a", encoding="utf-8") as file:
                    line = {"step": state.global_step, "tokens": int(tokens)}
                    file.write(json.dumps(line) + "\n")

    Counting(
        model=marian(recipe.model_with(data.tokenizer.vocab_size), recipe.data.max_length),
        args=arguments,
        train_dataset=Examples(data.train),
        data_collator=collate,
        callbacks=[Log()],
    ).train()
