"""Repeated calls: the first call of a signature prepares everything but the tensors.

`reluformer.ops.signature` remembers a `PreparedForward` with the choice of the backend, and that
remembers a `PreparedBackward` for each kind of gradient. A repeated call allocates its results and
launches. It uses no other memory, and returns to the general way (`run_forward`, `run_backward`)
where addresses or forced choices differ from those of the first call.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from reluformer.ops.backends.gamma_gradient import RowGradients
from reluformer.ops.backends.torch_state import (
    allows_tf32,
    is_untraced,
    needs_plain_backward,
)
from reluformer.ops.backends.triton import operators, run_backward, run_forward, tuning
from reluformer.ops.backends.triton.backward_choice import Choice, new_store
from reluformer.ops.backends.triton.backward_launches import BackwardLaunches, Gradients, Results
from reluformer.ops.backends.triton.launch import LAUNCHES, Launch, on_other_device, signature
from reluformer.ops.backends.triton.layout import empty_heads
from reluformer.ops.backends.triton.portable.arguments import OptionalInputs
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem
from reluformer.ops.backends.triton.run_backward import (
    BACKWARD_LAUNCHES,
    CHOICES,
    BackwardResult,
    Scratch,
    run_dkv,
    run_dq,
    run_one_pass,
    terms_size,
)
from reluformer.ops.call import Call, KernelResult

# Kinds of gradients that a prepared call remembers.
_BACKWARD_LIMIT = 16

SizeAndStrides = tuple[tuple[int, ...], tuple[int, ...]]
"""Size and strides of a tensor."""
ForwardOutputs = tuple[Tensor, Tensor | None, Tensor | None]
"""Output, row sums and sums of w log w."""


class State:
    """Global settings that launches depend on."""

    def __init__(self, q: Tensor) -> None:
        self.override = tuning.current()
        self.is_float32 = q.dtype == torch.float32
        self.has_tf32 = self.is_float32 and allows_tf32()

    def is_current(self, q: Tensor) -> bool:
        """Whether a launch that was prepared in this state may run on q."""
        return (
            tuning.current() is self.override
            and (not self.is_float32 or self.has_tf32 == allows_tf32())
            and not on_other_device(q)
        )


class PreparedForward:
    """The forward pass of calls with one signature.

    Only for dense calls without mask and dropout that need no copy of a tensor.
    """

    def __init__(self, problem: Problem, statistics: int, launch: Launch) -> None:
        """Prepare a call.

        Args:
            problem: A call that has run.
            statistics: See `run_forward.forward`.
            launch: Its launch.
        """
        self.launch, self.statistics, self.settings = launch, statistics, problem.settings
        self.state = State(problem.q)
        self.out = _heads(problem.q, problem.v.shape[-1])
        self.rows = _contiguous(*problem.q.shape[:3])
        self.has_gamma = problem.optional.gamma is not None
        self.has_threshold = problem.optional.threshold is not None
        self.has_inputs = problem.optional is not NO_INPUTS
        self.backwards: dict[Hashable, PreparedBackward] = {}
        """Backward passes by needed gradients and strides."""

    def __call__(self, call: Call, options: Mapping[str, Any]) -> KernelResult | None:
        """Run a call of the signature; None if it has to go the general way."""
        q, k, v = call.q, call.k, call.v
        if on_other_device(q):
            # As in models whose layers are spread over GPUs.
            with torch.cuda.device(q.device):
                return self(call, options)
        gamma = options["gamma"] if self.has_gamma else None
        threshold = options["threshold"] if self.has_threshold else None
        optional = NO_INPUTS
        if self.has_inputs:
            lengths = call.visibility.key_lengths
            optional = OptionalInputs(gamma, threshold, lengths, None, None, None, None)
        problem = Problem(q, k, v, optional, self.settings)
        if not _are_aligned(q, k, v, *optional) or not self.state.is_current(q):
            return None
        if torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (gamma is not None and gamma.requires_grad)
            or (threshold is not None and threshold.requires_grad)
        ):
            outputs = _apply(q, k, v, gamma, threshold, problem, self)
        else:
            outputs = self.run(problem)
        out, row_sum, log_sum = outputs
        requested = call.statistics
        return KernelResult(
            out, row_sum if requested >= 1 else None, log_sum if requested >= 2 else None
        )

    def run(self, problem: Problem) -> ForwardOutputs:
        """Allocate the outputs and launch."""
        q, k, v, optional, _ = problem
        new = q.new_empty_strided
        out = new(*self.out)
        row_sum = new(*self.rows, dtype=torch.float32) if self.statistics >= 1 else None
        log_sum = new(*self.rows, dtype=torch.float32) if self.statistics >= 2 else None
        self.launch(q, k, v, out, row_sum, log_sum, None, optional)
        return out, row_sum, log_sum

    def prepare_backward(
        self, key: Hashable, problem: Problem, grads: Gradients, needs_shift: bool
    ) -> None:
        """Remember a backward pass that has run, unless it runs in parts or is not aligned."""
        if not _are_aligned(*problem.tensors, *grads):
            return
        full_key = signature(*run_backward.key_parts(problem, grads, needs_shift))
        choice, launches = CHOICES.get(full_key), BACKWARD_LAUNCHES.get(full_key)
        if choice is None or launches is None:
            return
        if len(self.backwards) >= _BACKWARD_LIMIT:
            self.backwards.clear()
        self.backwards[key] = PreparedBackward(problem, grads, needs_shift, choice, launches)


class PreparedBackward:
    """The backward pass of calls with one signature and one kind of gradients."""

    def __init__(
        self,
        problem: Problem,
        grads: Gradients,
        needs_shift: bool,
        choice: Choice,
        launches: BackwardLaunches,
    ) -> None:
        """Prepare a pass like the given one, which has run with these launches."""
        q, k, v = problem.q, problem.k, problem.v
        self.launches, self.state = launches, State(q)
        self.dq, self.dk, self.dv = (_heads(t, t.shape[-1]) for t in (q, k, v))
        self.rows = _contiguous(*q.shape[:3])
        self.needs_dot, self.needs_shift = grads.out is not None, needs_shift
        self.scaled: SizeAndStrides | None = None
        if launches.scales_grad:
            self.scaled = _heads(grads.grad_out, v.shape[-1])
        self.terms: SizeAndStrides | None = None
        if launches.has_terms:
            self.terms = _contiguous(*terms_size(problem, grads.level))
        self.store = new_store(problem, choice)

    def run(self, problem: Problem, grads: Gradients) -> BackwardResult:
        """Allocate the results and launch."""
        new, launches = problem.q.new_empty_strided, self.launches
        rows, terms, store = self.rows, self.terms, self.store
        results = Results(
            new(*self.dq),
            new(*self.dk),
            new(*self.dv),
            new(*rows, dtype=torch.float32) if self.needs_dot else None,
            new(*rows, dtype=torch.float32) if self.needs_shift else None,
        )
        if launches.one_pass is not None:
            run_one_pass(launches.one_pass, problem, grads, results)
        else:
            scratch = Scratch(
                None if self.scaled is None else new(*self.scaled),
                None if terms is None else new(*terms, dtype=torch.float32),
                None if store is None else new((store[0],), (1,), dtype=store[1]),
            )
            run_dkv(launches, problem, grads, results, scratch)
            run_dq(launches, problem, grads, results, scratch)
        dq, dk, dv, row_dot, row_shift = results
        return BackwardResult(
            dq, dk, dv, row_dot, None if row_shift is None else row_shift.sum((0, 2))
        )


class PreparedAttention(torch.autograd.Function):
    """A prepared call with gradients.

    q, k, v, gamma and threshold are the tensors of the problem, for autograd.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gamma: Tensor | None,
        threshold: Tensor | None,
        problem: Problem,
        prepared: PreparedForward,
    ) -> ForwardOutputs:
        outputs = out, row_sum, log_sum = prepared.run(problem)
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        # Results are only read for the gradients of gamma and of row normalisation.
        needs_gamma = ctx.needs_input_grad[3]
        keeps_results = needs_gamma or prepared.settings.row_normalise > 0
        ctx.save_for_backward(
            q, k, v, gamma, threshold, problem.optional.key_lengths,
            out if keeps_results else None,
            row_sum if keeps_results else None,
            log_sum if needs_gamma else None,
        )  # fmt: skip
        return outputs

    @staticmethod
    def backward(
        ctx: Any,
        grad_out: Tensor | None,
        grad_sum: Tensor | None,
        grad_log: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        prepared: PreparedForward = ctx.prepared
        q, k, v, gamma, threshold, lengths, out, row_sum, log_sum = ctx.saved_tensors
        _, _, _, needs_gamma, needs_shift, _, _ = ctx.needs_input_grad
        optional = NO_INPUTS
        if prepared.has_inputs:
            optional = OptionalInputs(gamma, threshold, lengths, None, None, None, None)
        problem = Problem(q, k, v, optional, prepared.settings)
        grads = (grad_out, grad_sum, grad_log)
        if needs_plain_backward(*grads):
            return *operators.recomputed_gradients(problem, grads), None, None
        saved = (out, row_sum, log_sum, None)
        needs = (needs_gamma, needs_shift)
        if grad_out is None or grad_out.stride(-1) != 1 or not is_untraced(grad_out):
            return *operators.input_gradients(problem, saved, grads, needs), None, None
        if grad_sum is not None or grad_log is not None:
            grad_sum, grad_log = operators.row_gradients(grad_sum, grad_log)
        read_sum = row_sum if prepared.settings.row_normalise > 0 else None
        gradients = Gradients(grad_out, out, None, grad_sum, grad_log, read_sum)
        # Hooks of saved tensors may have changed their strides.
        key = (
            needs_gamma, needs_shift, q.stride(), k.stride(), v.stride(), grad_out.stride(),
            None if out is None else out.stride(), grad_sum is None, grad_log is None,
        )  # fmt: skip
        backward = prepared.backwards.get(key)
        if (
            backward is None
            or not _are_aligned(q, k, v, *optional, *gradients)
            or not backward.state.is_current(q)
        ):
            grads = (grad_out, grad_sum, grad_log)
            result = operators.input_gradients(problem, saved, grads, needs)
            prepared.prepare_backward(key, problem, gradients, needs_shift)
            return *result, None, None
        dq, dk, dv, row_dot, shift = backward.run(problem, gradients)
        d_gamma = d_threshold = None
        if needs_gamma:
            d_gamma = operators.gradient_of_gamma(
                problem, (row_dot, row_sum, log_sum), RowGradients(grad_sum, grad_log)
            )
        if shift is not None:
            d_threshold = -shift.to(threshold.dtype)
        return dq, dk, dv, d_gamma, d_threshold, None, None


# `Function.apply` without its Python part, which serves functorch transforms only.
_apply: Callable[..., ForwardOutputs] = super(torch.autograd.Function, PreparedAttention).apply


def prepare(problem: Problem, statistics: int) -> PreparedForward | None:
    """The prepared form of a dense call that has run; None if it was not a remembered launch.

    None for addresses that are not aligned, too: the prepared call is for those that are.
    """
    if not _are_aligned(*problem.tensors):
        return None
    launch = LAUNCHES.get(signature(*run_forward.key_parts(problem, statistics)))
    return None if launch is None else PreparedForward(problem, statistics, launch)


def _are_aligned(*tensors: Tensor | None) -> bool:
    """Whether all addresses are multiples of 16 bytes; launches are compiled for that."""
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return not addresses & 15


def _heads(like: Tensor, width: int) -> SizeAndStrides:
    """Size and strides of `empty_heads`."""
    example = torch.empty_strided(like.shape, like.stride(), device="meta")
    out = empty_heads(example, width)
    return tuple(out.shape), out.stride()


def _contiguous(*size: int) -> SizeAndStrides:
    """Size and strides of a contiguous tensor."""
    strides = [1]
    for length in size[:0:-1]:
        strides.insert(0, strides[0] * length)
    return size, tuple(strides)
