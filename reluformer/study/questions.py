"""The questions of the studies by name. Nothing else is imported to list them."""

QUESTIONS = {
    "theory": (
        "Do variance, row sum and entropy follow the closed forms, n = 8 to 8192? (CPU, a minute)"
    ),
    "ffn": "ReLU, softmax and softmax + LayerNorm memories: BLEU and variance ratio per layer",
    "slots": "Where does softmax + LayerNorm stop keeping up as memories grow?",
    "temperature": "Does a flatter softmax memory close the gap to ReLU?",
    "centralisation": "Top-p % share and anisotropy of trained memories and attentions",
    "attention": (
        "Plain ReLU, scale, losses, the default, ReLU^2, ReLA, sparsemax, entmax, sigmoid "
        "against softmax"
    ),
    "lengths": "Documents of 256 to 2048 tokens: is ReLU attention ahead from 512 on?",
    "extrapolation": "Models trained on documents of 512 tokens, tested on 512 to 4096",
    "context": "Document against sentence by sentence, shuffled context, distance of what is read",
    "large-data": "Ten times the sentences, then documents of 512 tokens: is ReLU level?",
    "sensitivity": "How much do gamma, loss weights, length exponent and margin matter?",
    "family": (
        "Every attention on copy, reverse, recall, sink trigger, regression, single location (CPU)"
    ),
}
"""One line for each study, in the order of `reluformer study --list`."""
