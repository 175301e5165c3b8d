"""ReLU attention in a Llama of transformers: one line changes, then train, generate and reload.

Trains a small Llama on generated English sentences, continues a prompt with and without a KV cache,
saves the model and loads it again.

    python examples/llama_generate.py
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import reluformer.hf  # noqa: F401  # registers the attentions
from reluformer.data.synthetic.sample import sentences
from reluformer.data.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--attention", default="normalised_relu")
    options = parser.parse_args()
    lines = [english for english, _ in sentences(0, 5000)]
    tokenizer = Tokenizer.train(lines, 600)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **{f"{name}_token_id": getattr(tokenizer, name) for name in ("pad", "bos", "eos")},
    )
    torch.manual_seed(0)
    # The one line that changes; before: AutoModelForCausalLM.from_config(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=options.attention)

    text = [i for line in lines for i in (tokenizer.bos, *tokenizer.encode(line), tokenizer.eos)]
    ids = torch.tensor(text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        starts = torch.randint(len(ids) - 64, (16, 1))
        batch = ids[starts + torch.arange(64)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:4} loss {loss.item():.3f}")

    model.eval()
    prompt = torch.tensor([[tokenizer.bos, *tokenizer.encode("The train")]])
    cached = model.generate(prompt, max_new_tokens=16, do_sample=False)
    uncached = model.generate(prompt, max_new_tokens=16, do_sample=False, use_cache=False)
    print("generated:", tokenizer.decode(cached[0].tolist()))
    print("the same without a cache:", torch.equal(cached, uncached))

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    print("loaded with", loaded.config._attn_implementation, "attention, the same logits:", end=" ")
    print(torch.equal(loaded(prompt).logits, model(prompt).logits))


if __name__ == "__main__":
    main()
