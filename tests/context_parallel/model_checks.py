"""Checks that all ranks of a group run: decoding, models, and the code of the documentation."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reluformer import ReLUFormerLM, attention
from reluformer.context_parallel import ShardedCache, ShardedSequence
from tests.context_parallel.attention_checks import CHECKS, check, close
from tests.context_parallel.processes import WORLD, Check
from tests.model.factory import small
from tests.model.factory import tokens as random_tokens
from tests.ops.inputs import make, tensor_options


def decode(group: dist.ProcessGroup, name: str, prompt: int, step: int, **numbers: float) -> None:
    """Decoding from a sharded cache equals attention over the whole sequence, token by token."""
    length = 23
    q, k, v = make(rows=length, keys=length)
    options: dict[str, Any] = {**tensor_options(name, q[:, :, :1], v), **numbers}
    expected = attention(name, q, k, v, causal=True, **options)
    cache = ShardedCache(group)
    if prompt:
        sequence = ShardedSequence(prompt, group)
        cache.fill(*(sequence.shard(each[:, :, :prompt], 2) for each in (k, v)), sequence)
        assert cache.length == prompt
    for start in range(prompt, length, step):
        new = slice(start, start + step)
        cache.append(k[:, :, new], v[:, :, new])
        output = cache.attend(name, q[:, :, new], **options)
        close(output, expected[:, :, new])
    assert cache.length == length
    if not prompt:
        assert max(cache.loads) - min(cache.loads) <= 1


for _name in ("relu", "rela", "cosine_relu", "squared_relu"):
    CHECKS[f"decode {_name}"] = Check(partial(decode, name=_name, prompt=0, step=1))
CHECKS["decode after a prompt"] = Check(partial(decode, name="relu", prompt=9, step=1))
CHECKS["decode several tokens at once"] = Check(partial(decode, name="relu", prompt=3, step=5))
for _power in (2, 4):
    CHECKS[f"decode row-normalised, power {_power}"] = Check(
        partial(decode, name="relu", prompt=9, step=_power, power=_power, row_normalise=0.01)
    )


def model_agrees(group: dist.ProcessGroup, **settings: Any) -> None:
    """Logits and every weight's gradient of a language model equal those of one process."""
    length = 11
    sequence = ShardedSequence(length, group)
    model = ReLUFormerLM(small(**settings)).double()
    text = random_tokens(2, length)
    expected = model(text).logits
    weights = torch.randn_like(expected)
    parameters = [each for each in model.parameters() if each.requires_grad]
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    found = model(sequence.shard(text, 1), sequence=sequence).logits
    close(sequence.unshard(found, 1), expected)
    loss = (found * sequence.shard(weights, 1)).sum()
    for grad, want in zip(torch.autograd.grad(loss, parameters), wanted, strict=True):
        dist.all_reduce(grad, group=group)
        close(grad, want)


for _positions in ("sinusoidal", "rotary"):
    CHECKS[f"model with {_positions} positions"] = Check(
        partial(
            model_agrees,
            positions=_positions,
            kv_heads=2,
            attention_gamma="head",
            attention_threshold="head",
            attention_threshold_init=-0.1,
            attention_output_norm=True,
        )
    )
CHECKS["row-normalised model"] = Check(
    partial(
        model_agrees,
        attention_gamma="head",
        attention_threshold="head",
        attention_threshold_init=-0.1,
        attention_options={"power": 4, "row_normalise": 1e-2},
    )
)


@check(sizes=(WORLD,))
def documented_code_runs(group: dist.ProcessGroup) -> None:
    path = Path(__file__).parents[2] / "docs" / "context-parallel.md"
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL):
        exec(compile(code, str(path), "exec"), names)
    assert names["whole"].shape == (1, 4, 1001, 16)
    assert names["cache"].length == 1011
