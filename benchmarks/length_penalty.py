"""Scores on dev by length penalty, to choose the search of the shipped model.

    python -m benchmarks.length_penalty --data DATA --penalties 0.8 1 1.2 --every 3 --out FILE

The native decoder translates every n-th document of `dev` in DATA, the folder of
`reluformer prepare`, as `reluformer translate --document` does. Each penalty is compared with that
of the model's recipe by paired bootstrap. `--keep` keeps translations between calls.
"""

from collections.abc import Sequence

import torch

from benchmarks.model_card import (
    METRICS,
    SystemSpec,
    TestSet,
    add_sampling,
    parser_of,
    scores_of,
    translate_once,
)
from reluformer.checkpoint import read_run
from reluformer.console import guarded
from reluformer.evaluation.aligned_files import read_aligned
from reluformer.evaluation.scores import evaluate
from reluformer.files import sha256, write_json
from reluformer.info import commit, info
from reluformer.shipped import shipped_model


@guarded
def main(arguments: Sequence[str] | None = None) -> None:
    """Translate with each penalty, and score."""
    parser = parser_of(__doc__)
    parser.add_argument("--penalties", type=float, nargs="+", default=[0.6, 0.8, 1.2, 1.4, 1.6])
    add_sampling(parser, every=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    folder = options.model or shipped_model()
    files = [options.data / f"dev.{side}.txt" for side in ("source", "target")]
    test = TestSet(f"dev, every {options.every}", *files)
    sources, (references,) = read_aligned(test.source, [test.target], documents=True)
    sources, references = sources[:: options.every], references[:: options.every]
    default = read_run(folder).recipe.decode.length_penalty
    penalties = [default, *(value for value in options.penalties if value != default)]
    hypotheses, costs = {}, []
    for penalty in penalties:
        system = SystemSpec(f"length penalty {penalty}", folder, None, penalty)
        hypotheses[system.name], cost = translate_once(system, test, sources, options.keep)
        costs.append(cost)
    result = scores_of(evaluate(references, hypotheses, documents=True, metrics=METRICS))
    for system, cost in zip(result["systems"], costs, strict=True):
        system["length_penalty"], system["tokens"] = cost["length_penalty"], cost["tokens"]
        print(system, flush=True)
    if options.out:
        description = {
            "format": "reluformer length penalty 1",
            "commit": commit(),
            "info": info(),
            "every": options.every,
            "files": {file.name: sha256(file) for file in files},
        }
        write_json(options.out, {**description, **result, "costs": costs})


if __name__ == "__main__":
    main()
