"""Measurements beyond `reluformer bench`. Run each from the repository root, as a module.

Kernels
    agreement                         all backends against float64 over random configurations
    backward, tiles, hopper_forward   variants and tile shapes
    kernel_choices, speed_curves      choices among the Hopper kernels, and their figure
    race                              two checkouts against each other
    host_time                         host time of one call
    cpu_pairs                         impl="cpu" against SDPA in CPU seconds, on busy machines
    feedforward                       epilogues of a ReLU feed-forward memory
    decode                            decoding from contiguous and paged KV caches
    repeat                            equal bits in thousands of calls
    sanitize, sanitize_calls          compute-sanitizer, and the calls that it watches
Training
    end_to_end, step_profile          training steps, and the GPU time of one by kernel
    cpu_steps                         training steps on a CPU by precision and library
    training                          training against Hugging Face
    language_model, language_model_data, language_model_plot
                                      a language model of transformers with one line changed
    drop_in_twins                     models of torch.nn and timm with one line changed
    sparsity, dropout_gap             trained models: empty blocks of weights, effects of dropout
    curves                            curves of the runs of a study
Translation
    translate_cpu                     beam search on a CPU against Hugging Face
    ctranslate2, ctranslate2_trained  decoding on a CPU against CTranslate2: random, trained weights
    native_agreement                  native decoding against torch, token by token
    shipped_context, shipped_decoding the shipped model: use of context, zeros and speed
    model_card, length_penalty        its scores on test, and on dev by length penalty
Robustness
    kill_and_resume                   killed commands, full disks
    serve_load                        load and malformed requests against the server
"""
