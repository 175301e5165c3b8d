"""The benchmark of sparsity: what it counts against counting one by one, and a whole run."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import sparsity
from benchmarks.sparsity import Block, empty_blocks, measure, page_bound, shares, summary
from reluformer.config.recipe import recipe_from
from reluformer.data.batches import Batches
from reluformer.data.corpus import Corpus
from reluformer.data.packing import single_sentences
from reluformer.data.tokenizer import Tokenizer
from reluformer.diagnostics import attention_reports
from reluformer.model import AttentionConfig, ReLUFormer
from reluformer.model import attention as model_attention
from reluformer.train.objective import inputs
from tests.model.factory import small

LINES = [
    "the cat sat on the mat",
    "a dog",
    "the dog ate the cat and sat on a mat " * 8,
    "sat",
    "on a mat the dog sat and ate " * 3,
]
TOKENIZER = Tokenizer.train(LINES * 3, 290)


def one_by_one(read: Tensor, visible: Tensor, block: Block) -> list[list[int]]:
    """`empty_blocks` by looking at every block of every sequence."""
    batch, heads, rows, keys = read.shape
    high, wide, group = block.rows or rows, block.keys or keys, block.heads or heads
    empty, of = [0] * (heads // group), [0] * (heads // group)
    for b, unit in product(range(batch), range(heads // group)):
        seen = visible[b, 0]
        if seen.any(1).sum() < block.rows or seen.any(0).sum() < block.keys:
            continue
        for i, j in product(range(0, rows, high), range(0, keys, wide)):
            part = (slice(i, i + high), slice(j, j + wide))
            of[unit] += bool(seen[part].any())
            inside = read[b, unit * group : (unit + 1) * group]
            empty[unit] += bool(seen[part].any() and not inside[:, *part].any())
    return [empty, of]


def ragged(queries: list[int], lengths: list[int], causal: bool) -> Tensor:
    """Bool [B, 1, Tq, Tk]: what a padded batch of such sequences sees."""
    rows, keys = torch.arange(max(queries))[:, None], torch.arange(max(lengths))
    seen = [
        (rows < q) & (keys < k) & ((keys <= rows) | (not causal))
        for q, k in zip(queries, lengths, strict=True)
    ]
    return torch.stack(seen).unsqueeze(1)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from([0, 1, 2, 4]),
    st.sampled_from([0.02, 0.1, 0.6]),
    st.integers(0, 1 << 30),
)
def test_blocks_are_counted_as_one_by_one(
    lengths: list[tuple[int, int]],
    causal: bool,
    rows: int,
    keys: int,
    heads: int,
    density: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    visible = ragged(*map(list, zip(*lengths, strict=True)), causal)
    read = (torch.rand(len(lengths), 4, *visible.shape[2:]) < density) & visible
    block = Block(rows, keys, heads)
    assert empty_blocks(read, visible, block).tolist() == one_by_one(read, visible, block)


def test_counts_by_hand() -> None:
    """Two heads, causal, four tokens: one reads the first token alone, the other itself."""
    weights = torch.zeros(1, 2, 4, 4)
    weights[0, 0, :, 0] = 1
    weights[0, 1].fill_diagonal_(1)
    visible = ragged([4], [4], True)
    by_hand = {
        Block(1, 1): [[6, 6], [10, 10]],
        Block(1, 1, 2): [[3], [10]],
        Block(1, 0): [[0, 0], [4, 4]],
        Block(0, 1): [[3, 0], [4, 4]],
        Block(0, 0): [[0, 0], [1, 1]],
        # The upper right tile is not visible.
        Block(2, 2): [[1, 1], [3, 3]],
        Block(2, 2, 2): [[0], [3]],
        Block(1, 2): [[2, 2], [6, 6]],
        # The sequence is shorter.
        Block(8, 1): [[0, 0], [0, 0]],
    }
    for block, counts in by_hand.items():
        assert empty_blocks(weights != 0, visible, block).tolist() == counts
    # A page has two keys. The second page is hidden from both heads in the last row and from one
    # head in the row before. In the first row, where it is hidden too, none of its keys is visible.
    may_read = torch.ones(1, 2, 4, 2, dtype=torch.bool)
    may_read[0, :, [0, 3], 1] = may_read[0, 0, 2, 1] = False
    for heads, counts in ((1, [[2, 1], [6, 6]]), (2, [[1], [6]])):
        found = empty_blocks(weights != 0, visible, Block(1, 2, heads), may_read)
        assert found.tolist() == counts
    assert shares(torch.tensor([[1, 0], [3, 0]])) == [0.3333, None]


@pytest.mark.parametrize("size", [16, 32])
def test_no_product_exceeds_the_bound_of_its_page(size: int) -> None:
    q, k = torch.randn(1, 4, 40, 8), torch.randn(1, 2, 40, 8) + torch.randn(1, 2, 1, 8)
    n = torch.arange(1, 41)[None, None]
    top = page_bound(q, k, n, size)
    for row in range(40):
        for page in range(row // size + 1):
            here = q[0, :, row]
            keys = k[0, :, page * size : min((page + 1) * size, row + 1)]
            keys = keys.repeat_interleave(2, dim=0)
            low, high = keys.amin(1), keys.amax(1)
            wanted = torch.maximum(here * low, here * high).sum(-1)
            torch.testing.assert_close(top[0, :, row, page], wanted, rtol=1e-5, atol=1e-4)
            products = torch.einsum("hd,hkd->hk", here, keys)
            assert (products <= top[0, :, row, page, None]).all()


def batches(batch_tokens: int) -> Batches:
    pairs = list(zip(LINES, reversed(LINES), strict=True))
    corpus = Corpus.in_memory([[pair] for pair in pairs], TOKENIZER)
    return Batches(corpus, single_sentences(corpus, 200).spans, batch_tokens=batch_tokens, seed=0)


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("threshold", [-0.2, 0.3])
def test_batches_add_up_and_agree_with_the_diagnostics(
    kv_heads: int | None, threshold: float
) -> None:
    config = small(vocabulary=TOKENIZER.vocab_size, kv_heads=kv_heads)
    attention = AttentionConfig(threshold="head", threshold_init=threshold, row_sum_init=None)
    model = ReLUFormer(replace(config, attention=attention)).eval()
    attend = model_attention.attend
    apart = measure(model, batches(100).epoch(0))
    whole = batches(1000)
    # Buckets keep lengths apart; one batch of everything is padded most.
    together = Batches(whole.corpus, whole.spans, batch_tokens=1000, seed=0, buckets=[200])
    (batch,) = together.epoch(0)
    found = measure(model, [batch])
    assert model_attention.attend is attend
    assert {site: len(layers) for site, layers in found.items()} == dict.fromkeys(
        ("encoder", "decoder", "cross"), 2
    )
    for site, layers in found.items():
        for one, other in zip(layers, apart[site], strict=True):
            assert {name: both.tolist() for name, both in one.items()} == {
                name: both.tolist() for name, both in other.items()
            }
    for report in attention_reports(model, inputs(batch)):
        layer = found[report.site][report.layer]
        empty, of = layer["queries"].sum(1).tolist()
        assert empty / of == pytest.approx(report.dead_rows)
        # A page that a bound proves empty is empty, and each head skips what all four skip.
        for name in ("pages of 16", "pages of 16, all heads"):
            assert (layer[f"{name}, bound"][0] <= layer[name][0]).all()
        assert layer["values, 4 heads"][0] <= layer["weights"][0].min()
    for name in ("weights", "pages of 16, bound"):
        assert sum(int(layer[name][0].sum()) for layer in found["cross"]) > 0


def test_softmax_has_neither_zeros_nor_bounds_and_silent_heads_are_named() -> None:
    config = small("softmax", vocabulary=TOKENIZER.vocab_size)
    quiet = AttentionConfig(kind="relu", threshold="head", row_sum_init=None)
    model = ReLUFormer(replace(config, cross_attention=quiet)).eval()
    with torch.no_grad():
        model.decoder[1].cross_attention.attention.threshold[2] = 1e4
    found = measure(model, batches(1000).epoch(0))
    assert all(
        int(both[0].sum()) == 0
        for layer in (*found["encoder"], *found["decoder"])
        for both in layer.values()
    )
    assert "pages of 16, bound" not in found["encoder"][0]
    told = summary(found["cross"])
    assert told[sparsity.EMPTY] == told[sparsity.NEARLY_EMPTY] == [[1, 2]]
    assert told["maps"][2] == told["pages of 16, bound"][2] == 1
    shown = sparsity.table({site: summary(layers) for site, layers in found.items()})
    assert "0.0 (0.0 to 0.0)" in shown and "pages of 16, bound" in shown


def test_the_whole_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "slots": 16}
    shape["attention"] = {"threshold_init": 0.0}
    data = {"source": "sample", "unit": "document", "max_length": 120}
    recipe = recipe_from({"data": data, "model": shape})
    ReLUFormer(recipe.model_with(TOKENIZER.vocab_size)).save_pretrained(tmp_path)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    recipe.save(tmp_path / "recipe.yaml")
    text = "<d>\n" + "\n".join(LINES[:3]) + "\n<d>\n" + "\n".join(LINES[3:]) + "\n"
    (tmp_path / "text").write_text(text, encoding="utf-8")

    def command(*more: str) -> None:
        paths = [f"--{name}={tmp_path / 'text'}" for name in ("source", "target")]
        out = f"--out={tmp_path / 'out.json'}"
        arguments = [f"--model={tmp_path}", *paths, "--device=cpu", out, *more]
        monkeypatch.setattr("sys.argv", ["sparsity", *arguments])
        sparsity.main()

    command("--documents", "--sentences=4")
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["text"]["examples"] == 2
    assert report["model"]["attention"]["kind"] == "relu"
    assert len(report["layers"]["cross"][0]["weights"]) == 2
    mean, low, high = report["summary"]["decoder"]["weights"]
    assert 0 < low <= mean <= high < 1
    assert "pages of 16, bound" in capsys.readouterr().out
    command()
    assert json.loads((tmp_path / "out.json").read_text())["text"]["examples"] == 5
    with pytest.raises(SystemExit):
        command("--sentences=0")
    assert "--sentences must be at least 1" in capsys.readouterr().err
