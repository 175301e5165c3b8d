"""Training throughput against Hugging Face and a large matrix product, in one run on one GPU.

    python -m benchmarks.training --data data/europarl-sent --documents data/europarl-doc
    python -m benchmarks.training --quick     # tiny models on a CPU, to test the benchmark

`--data` and `--documents` are prepared folders. Without them, the benchmark prepares invented words
with the lengths and vocabulary sizes of Europarl. Each part runs in its own process:

- sentence: the recipe `sentence` through `reluformer.train`, with ReLU and with softmax.
- Marian: a MarianMTModel of the same shape (SDPA) through Seq2SeqTrainer on the same examples:
  bf16, TF32, fused AdamW, grouped by length, padded to multiples of 8, loader processes, not
  compiled, without logging, saving or evaluation. The number of rows per batch gives the mean
  number of target tokens per step of the recipe.
- document: the recipe `document` at length 1024 across documents, with ReLU, compiled as by
  default and uncompiled, and with softmax.
- matmul: products of two 8192 x 8192 bfloat16 matrices, before and after all other parts.

Target tokens include end-of-sentence tokens and exclude padding. Each part logs their number every
25 or 50 steps after synchronising the device. An interval is the time between two lines, by the
clock of the process that reads the log. The first interval, and intervals at less than half the
speed of the fastest (something was compiled), count as start-up. The rate is the median of the
other intervals. Start-up seconds are the wall time of a part beyond its tokens at that rate:
imports, data and compilation.

TFLOP/s count the matrix products that a model needs for its real tokens; the backward counts as
twice the forward. For an example with s source and t target tokens, width w, f slots, vocabulary V,
and keys and values of width k, the forward takes

    encoder layer   2 s (2 w^2 + 2 w k + 2 w f) + 4 s^2 w
    decoder layer   2 t (4 w^2 + 2 w k + 2 w f) + 4 s w k + 2 t^2 w + 4 t s w
    output          2 t w V

where causal attention counts half. Shares are relative to the faster matmul.
"""
