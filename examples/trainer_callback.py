"""transformers' `Trainer` with ReLU attention: losses of the attentions, and their statistics.

Trains a small BERT to tell English from German sentences. The callback adds the entropy loss to the
row-sum loss that the recommended attention has anyway, and logs row sums, entropies, zeros and dead
rows beside the loss.

    python examples/trainer_callback.py
"""

import argparse
import tempfile

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import reluformer.hf
from reluformer.data.synthetic.sample import sentences
from reluformer.data.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    pairs = list(sentences(0, 1000))
    tokenizer = Tokenizer.train([text for pair in pairs for text in pair], 600)
    collate = DataCollatorWithPadding(reluformer.hf.to_transformers(tokenizer))
    data = [
        {"input_ids": tokenizer.encode(text), "labels": language}
        for pair in pairs
        for language, text in enumerate(pair)
    ]
    config = BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=2,
        pad_token_id=tokenizer.pad,
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(
        config, attn_implementation="normalised_relu"
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            logging_steps=max(options.steps // 6, 1),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        callback = reluformer.hf.ReLUAttentionCallback(entropy_loss=0.01)
        trainer = Trainer(
            model, arguments, train_dataset=data, data_collator=collate, callbacks=[callback]
        )
        trainer.train()
    batch = collate([{"input_ids": row["input_ids"]} for row in data[:64]]).to(model.device)
    with torch.no_grad():
        found: Tensor = model.eval()(**batch).logits.argmax(dim=-1).cpu()
    right = found == torch.tensor([row["labels"] for row in data[:64]])
    print(f"{int(right.sum())} of 64 sentences are told apart")


if __name__ == "__main__":
    main()
