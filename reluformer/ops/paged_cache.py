"""A paged KV cache, and attention from the newest tokens to it.

Sequences of different lengths share one pool of pages, and take more pages as they grow.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from reluformer.errors import UserError, quote
from reluformer.ops.api import relu_attention
from reluformer.ops.backends.fused import per_head_rule
from reluformer.ops.backends.torch_state import is_untraced, needs_grad
from reluformer.ops.backends.triton.op import paged_attention, supports
from reluformer.ops.cache_inputs import (
    LARGEST_SIZE,
    check_tokens,
    checked_device,
    checked_size,
    in_dtype_of,
    token_counts,
    whole_number,
)
from reluformer.ops.checks import FLOATS, check_scale, is_number
from reluformer.ops.gate import check_storage, resolve
from reluformer.ops.rule import Rectified

PAGE_SIZES = (16, 32, 64, 128, 256)


class PagedCache:
    """KV cache of several sequences, whose tokens lie in pages of one pool.

    Examples:
        >>> cache = PagedCache(batch=2, kv_heads=8, width=64, pages=16)
        >>> cache.append(keys, values)  # [2, 8, T, 64] each
        >>> out = decode_attention(q, cache)  # q of the newest tokens

    Attributes:
        keys: [pages + 1, Hkv, page_size, D]; the last page holds tokens that are not stored.
        values: [pages + 1, Hkv, page_size, Dv].
        table: [batch, largest number of pages] int32, the pages of each sequence in order.
        lengths: [batch] int32, tokens stored so far.

    No method synchronises with the GPU: the host allocates pages by its own token counts.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        width: int,
        *,
        pages: int,
        page_size: int = 64,
        value_width: int | None = None,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate the pool.

        Args:
            batch: Number of sequences.
            kv_heads: Number Hkv of key heads.
            width: Width D of a key.
            pages: Number of pages in the pool, shared by all sequences.
            page_size: Number of tokens in a page.
            value_width: Width Dv of a value; None for `width`.
            max_length: Largest number of tokens of one sequence; None limits only the sum over all
                sequences, by the size of the pool.
            dtype: Dtype of keys and values.
            device: Device of the pool.

        Raises:
            UserError: If a size or the dtype is not allowed.
        """
        tokens = whole_number(page_size)
        if tokens is None or tokens not in PAGE_SIZES:
            raise UserError(f"page_size must be one of {PAGE_SIZES}, got {quote(page_size)}")
        if dtype not in FLOATS:
            raise UserError(f"dtype must be a floating-point type, got {quote(dtype)}")
        device = checked_device(device)
        batch, pages = checked_size("batch", batch), checked_size("pages", pages)
        kv_heads, width = checked_size("kv_heads", kv_heads), checked_size("width", width)
        value_width = width if value_width is None else checked_size("value_width", value_width)
        if max_length is None:
            max_length = min(pages * tokens, LARGEST_SIZE)
        self.page_size, self.max_length = tokens, checked_size("max_length", max_length)
        pool = (pages + 1, kv_heads, tokens)
        self.keys = torch.empty(*pool, width, dtype=dtype, device=device)
        self.values = torch.empty(*pool, value_width, dtype=dtype, device=device)
        columns = math.ceil(self.max_length / tokens)
        self.table = torch.full((batch, columns), pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._free = list(range(pages - 1, -1, -1))
        self._pages: list[list[int]] = [[] for _ in range(batch)]
        self._filled = [0] * batch

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.table.shape[0]

    def reserve(self, tokens: int | Sequence[int]) -> None:
        """Allocate pages, so that sequences can grow to a total number of tokens.

        `append` does it by itself, except while a CUDA graph is recorded: reserve before.

        Args:
            tokens: Number of tokens that every sequence shall hold, or one number per sequence.

        Raises:
            UserError: If a number is above `max_length`, or the pool has too few free pages.
        """
        self._reserve(token_counts("tokens", tokens, self.batch))

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        counts: Sequence[int] | None = None,
        *,
        impl: str = "auto",
    ) -> None:
        """Store the next tokens of every sequence.

        Every replay of a CUDA graph appends again; pass the number of tokens to `advance`. While
        autocast is enabled, keys and values are cast to the dtype of the cache.

        Args:
            keys: Keys of the new tokens [B, Hkv, T, D].
            values: Values of the new tokens [B, Hkv, T, Dv].
            counts: Sequence b stores only its first counts[b] tokens; None stores all.
            impl: Backend, as in `decode_attention`.

        Raises:
            UserError: If shapes do not fit the cache, or the pool has too few free pages.
        """
        keys, values = in_dtype_of(self.keys, keys), in_dtype_of(self.keys, values)
        check_tokens({"keys": keys, "values": values}, (self.keys, self.values), self.batch)
        keys, values = resolve(keys), resolve(values)
        steps = keys.shape[2]
        new = [steps] * self.batch
        if counts is not None:
            new = token_counts("counts", counts, self.batch)
        if max(new) > steps:
            raise UserError(f"counts must be at most T = {steps}, got {new}")
        fused = _use_triton(impl, "append", keys.is_cuda, self._why_not_triton)
        total = [old + more for old, more in zip(self._filled, new, strict=True)]
        self._reserve(total)
        self._filled = total
        if steps == 0:
            return
        more = None
        if counts is not None:
            more = torch.tensor(new, dtype=torch.int32, device="cpu")
            more = more.to(keys.device, non_blocking=True)
        if fused:
            from reluformer.ops.backends.triton.run_append import PagePool, append

            append(keys, values, PagePool(self.keys, self.values, self.table, self.lengths), more)
        else:
            self._write(keys, values, more)
        self.lengths.copy_(self._after(steps, more))

    def advance(self, tokens: int | Sequence[int]) -> None:
        """Update the host's counts by tokens that replays of a CUDA graph have appended."""
        more = token_counts("tokens", tokens, self.batch)
        total = [old + new for old, new in zip(self._filled, more, strict=True)]
        room = [len(pages) * self.page_size for pages in self._pages]
        if any(filled > most for filled, most in zip(total, room, strict=True)):
            raise UserError(
                f"tokens must fit the reserved pages, which hold {quote(room)} tokens, "
                f"got {quote(total)} with the earlier ones"
            )
        self._filled = total

    def release(self, sequence: int) -> None:
        """Empty the sequence with the index `sequence` and free its pages."""
        index = whole_number(sequence)
        if index is None or not 0 <= index < self.batch:
            raise UserError(
                f"sequence must be a whole number from 0 to {self.batch - 1}, got {quote(sequence)}"
            )
        sequence = index
        self._free += reversed(self._pages[sequence])
        self._pages[sequence] = []
        self._filled[sequence] = 0
        self.table[sequence] = self.keys.shape[0] - 1
        self.lengths[sequence] = 0

    def dense(self) -> tuple[Tensor, Tensor]:
        """Copies of keys and values, [B, Hkv, capacity, D] and [.., Dv], zero past the lengths."""
        position = torch.arange(self.table.shape[1] * self.page_size, device=self.keys.device)
        stored = (position < self.lengths[:, None])[:, None, :, None]
        keys, values = self._copies(self.table)
        return keys.where(stored, 0), values.where(stored, 0)

    def _used_pages(self) -> tuple[Tensor, Tensor]:
        """Copies of the pages in use, [B, Hkv, T, D] and [.., Dv]; undefined past the lengths."""
        return self._copies(self.table[:, : math.ceil(max(self._filled) / self.page_size)])

    def _copies(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of pages [B, N], [B, Hkv, N * page_size, D] and [.., Dv]."""
        keys, values = (
            # Faster than an index of two dimensions.
            pool.index_select(0, pages.flatten()).view(*pages.shape, *pool.shape[1:])
            for pool in (self.keys, self.values)
        )
        return keys.transpose(1, 2).flatten(2, 3), values.transpose(1, 2).flatten(2, 3)

    def _reserve(self, wanted: list[int]) -> None:
        """Allocate pages for a total number of tokens of each sequence."""
        if max(wanted) > self.max_length:
            raise UserError(f"tokens must be at most max_length {self.max_length}, got {wanted}")
        missing = [
            max(0, math.ceil(count / self.page_size) - len(pages))
            for count, pages in zip(wanted, self._pages, strict=True)
        ]
        if sum(missing) > len(self._free):
            raise UserError(
                f"pages must suffice for all tokens: {sum(missing)} more are needed and "
                f"{len(self._free)} are free"
            )
        for row, (count, pages) in enumerate(zip(missing, self._pages, strict=True)):
            if count:
                new = [self._free.pop() for _ in range(count)]
                place = slice(len(pages), len(pages) + count)
                self.table[row, place] = torch.tensor(new, dtype=torch.int32, device="cpu")
                pages += new

    def _why_not_triton(self) -> str | None:
        if torch.compiler.is_compiling():
            return "a compiler cannot trace its launch"
        return supports(self.keys, self.keys, self.values, scale=1.0, power=1)

    def _write(self, keys: Tensor, values: Tensor, counts: Tensor | None) -> None:
        """Put tokens where the table says; those past `counts` or the table on the last page."""
        step = torch.arange(keys.shape[2], device=keys.device)
        position = self.lengths[:, None].long() + step
        column = position // self.page_size
        columns = self.table.shape[1]
        page = self.table.gather(1, column.clamp(max=columns - 1)).long()
        placed = column < columns
        if counts is not None:
            placed = placed & (step < counts[:, None])
        page = page.where(placed, self.keys.shape[0] - 1)
        slot = position % self.page_size
        for pool, new in ((self.keys, keys), (self.values, values)):
            pool[page, :, slot] = new.transpose(1, 2).detach()

    def _after(self, steps: int, counts: Tensor | None) -> Tensor:
        """The lengths [B] after `steps` new tokens, at most the capacity of the table."""
        room = self.table.shape[1] * self.page_size
        return (self.lengths + (steps if counts is None else counts)).clamp_(max=room)


def decode_attention(
    q: Tensor,
    cache: PagedCache,
    *,
    causal: bool = True,
    gamma: float | Tensor = 1.0,
    length_exponent: float = 0.5,
    power: int = 1,
    threshold: float | Tensor = 0.0,
    row_normalise: float | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """`relu_attention` from the newest tokens q [B, H, Tq, D] to a cache: [B, H, Tq, Dv].

    The cache already holds the new tokens: row i is at position length - Tq + i of its sequence. A
    sequence without keys gives zeros.

    Args:
        q: Queries of the newest tokens [B, H, Tq, D], in the dtype of the cache unless autocast is
            enabled, which casts them to it.
        cache: Keys and values of all tokens.
        causal: A row sees the keys up to its position; otherwise all keys of its sequence.
        gamma, length_exponent, power, threshold, row_normalise, scale: As in `relu_attention`.
        impl: "triton" (for few rows, without gradients), "reference" (on copies of all pages), or
            "auto": Triton on a GPU if it supports the call, on a CPU the fastest backend on copies
            of the pages in use, otherwise the reference.

    Returns:
        The output [B, H, Tq, Dv] in the dtype of the cache.

    Raises:
        UserError: If an argument is not allowed, or `impl` does not support the call.
    """
    if not isinstance(cache, PagedCache):
        raise UserError(f"cache must be a PagedCache, got {type(cache).__name__}")
    q = in_dtype_of(cache.keys, q)
    _check_queries(q, cache)
    if not isinstance(causal, bool):
        raise UserError(f"causal must be True or False, got {quote(causal)}")
    learned = {"gamma": gamma, "threshold": threshold}
    check_storage([("q", q), *learned.items()], learned)
    for name, value in learned.items():
        _check_learned(name, value, q.shape[1])
    q, gamma, threshold = resolve(q), resolve(gamma), resolve(threshold)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    check_scale(scale)
    rule = Rectified(gamma, length_exponent, power, threshold, row_normalise=row_normalise)
    if _use_triton(
        impl, "decode_attention", q.is_cuda, lambda: _why_not_triton(q, cache, scale, rule)
    ):
        return paged_attention(q, cache, per_head_rule(rule, q), scale=scale, causal=causal)
    is_fast = impl == "auto" and q.device.type == "cpu" and is_untraced(q)
    keys, values = cache._used_pages() if is_fast else cache.dense()
    # A single row sees all keys of its sequence.
    mask = _causal_mask(q, cache, keys.shape[2]) if causal and q.shape[2] > 1 else None
    output: Tensor = relu_attention(
        q, keys, values, mask=mask, key_lengths=cache.lengths, gamma=gamma,
        length_exponent=length_exponent, power=power, threshold=threshold,
        row_normalise=row_normalise, scale=scale, impl="auto" if is_fast else "reference",
    )  # fmt: skip
    return output.to(q.dtype)


def _check_queries(q: Tensor, cache: PagedCache) -> None:
    if not isinstance(q, Tensor):
        raise UserError(f"q must be a tensor, got {type(q).__name__}")
    check_storage([("q", q)])
    _, kv_heads, _, width = cache.keys.shape
    if q.dim() != 4 or q.shape[0] != cache.batch or q.shape[3] != width:
        raise UserError(
            f"q must have shape [{cache.batch}, H, Tq, {width}] to fit the cache, "
            f"got {list(q.shape)}"
        )
    if q.shape[1] == 0 or q.shape[1] % kv_heads:
        raise UserError(f"q's heads must be a multiple of the cache's {kv_heads}, got {q.shape[1]}")
    if q.dtype != cache.keys.dtype or q.device != cache.keys.device:
        raise UserError(
            f"q must be {cache.keys.dtype} on {cache.keys.device} as the cache is, "
            f"got {q.dtype} on {q.device}"
        )


def _check_learned(name: str, value: Any, heads: int) -> None:
    """Refuse an option that is neither a number nor a tensor of one number or one per head."""
    is_tensor = isinstance(value, Tensor)
    if is_tensor and value.dtype not in FLOATS:
        raise UserError(f"{name} must be a floating-point tensor, got {value.dtype}")
    if not (value.shape in ((), (heads,)) if is_tensor else is_number(value)):
        got = f"shape {list(value.shape)}" if is_tensor else quote(value)
        raise UserError(
            f"{name} must be a number or a tensor of shape [{heads}] (one value per head), "
            f"got {got}"
        )


def _use_triton(impl: str, name: str, automatic: bool, why_not: Callable[[], str | None]) -> bool:
    """Whether Triton runs the call: on request, or, with `automatic`, if it supports it."""
    if impl not in ("auto", "triton", "reference"):
        raise UserError(f"impl must be one of auto, triton, reference, got {impl!r}")
    if impl == "reference" or (impl == "auto" and not automatic):
        return False
    reason = why_not()
    if impl == "triton" and reason is not None:
        raise UserError(f"impl='triton' cannot run this {name}: {reason}")
    return reason is None


def _why_not_triton(q: Tensor, cache: PagedCache, scale: float, rule: Rectified) -> str | None:
    learned = (q, rule.gamma, rule.threshold)
    if needs_grad(*learned):
        return "it has no gradients, and one is required"
    return supports(q, cache.keys, cache.values, scale=scale, power=rule.power)


def _causal_mask(q: Tensor, cache: PagedCache, room: int) -> Tensor:
    """Bool [B, 1, Tq, room]: keys up to the position of each row, one of the newest tokens."""
    rows = q.shape[2]
    key, row = (torch.arange(size, device=q.device) for size in (room, rows))
    return key <= cache.lengths[:, None, None, None] - rows + row[:, None]
