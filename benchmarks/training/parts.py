"""The parts of the benchmark and their settings."""

from dataclasses import dataclass

# A part has measured enough after this many seconds in its wanted number of intervals.
ENOUGH_SECONDS = 8.0
MATMUL_SECONDS = 12.0
# Only steps happen between two lines of the log.
BARE = (
    "train.checkpoint_every=1000000000",
    "train.dev_every=null",
    "train.rescale_scores=false",
    "train.bleu_every=null",
    "train.final=last",
)
QUICK = (
    "train.device=cpu", "train.steps=12", "train.log_every=2", "train.batch_tokens=256",
    "data.max_length=64", "model.width=32", "model.heads=2", "model.slots=64",
    "model.encoder_layers=1", "model.decoder_layers=1",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    name: str
    recipe: str
    library: str
    """`reluformer` or `transformers`."""
    intervals: int
    """Wanted number of intervals, large enough that not all of them contain a compilation."""
    reserved: float
    """Seconds that earlier parts leave for it; 0 if it may be dropped."""
    overrides: tuple[str, ...] = ()


DOCUMENT = ("data.max_length=1024", "data.cross_documents=true", "train.log_every=25")
SENTENCE = ("train.log_every=50",)
SOFTMAX = ("model.attention.kind=softmax",)
EAGER = ("train.compile=false",)
PARTS = (
    Part("sentence relu", "sentence", "reluformer", 8, 60.0, SENTENCE),
    # The sampler sorts 50 batches by length, so one interval contains all lengths.
    Part("sentence marian", "sentence", "transformers", 3, 40.0, SENTENCE),
    Part("document relu uncompiled", "document", "reluformer", 4, 30.0, DOCUMENT + EAGER),
    Part("document relu", "document", "reluformer", 4, 60.0, DOCUMENT),
    Part("sentence softmax", "sentence", "reluformer", 8, 0.0, SENTENCE + SOFTMAX),
    Part("document softmax", "document", "reluformer", 4, 0.0, DOCUMENT + SOFTMAX),
)
