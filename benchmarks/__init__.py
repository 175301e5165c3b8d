"""Measurements beyond `reluformer bench`. Run each from the repository root, as a module.

backward, tiles, hopper_forward   kernels: variants and tile shapes
decode                            decoding from contiguous and paged KV caches
feedforward                       epilogues of a ReLU feed-forward memory
end_to_end, training              training steps, and training against Hugging Face
translate_cpu                     beam search on a CPU against Hugging Face
ctranslate2, ctranslate2_trained  decoding on a CPU against CTranslate2: random and trained weights
native_agreement                  native decoding against torch, token by token
model_card, length_penalty        scores of the shipped model on test, and on dev by length penalty
race                              two checkouts against each other
sparsity, dropout_gap             trained models: empty blocks of weights, effects of dropout
curves                            curves of the runs of a study
kill_and_resume                   robustness: killed commands, full disks
repeat, sanitize                  kernels: equal bits in thousands of calls, compute-sanitizer
"""
