"""Which kernel computes the gradients of a problem: none is used before it was held against plain differentiation.

The comparison takes a real batch of the training data and two clients with different models, the second of which has a
sample less, so that padding is tried, too. A hand-written kernel that differs is an error of the problem. `torch.func`
is tried with padded batches first, then, where the loss is no mean over samples or samples see each other (batch norm),
with whole batches; where neither gives the plain gradients, clients are trained one after the other.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from safa.errors import SafaError
from safa.tasks.problem import Problem
from safa.training.kernels import General, Kernel, OneByOne, SquaredError, SquaredHinge, Step
from safa.training.layout import Layout

__all__ = ["Choice", "choose_kernel"]

_SAMPLES = 32  # in the batch on which kernels are compared
_POINTS = 3  # at which gradients must differ to be wrong
_LOSSES = 64  # samples with different targets on which the loss is looked at
_TARGETS = 1_000_000  # numbers among which different targets are looked for
_CLOSE = {torch.float64: 1e-8}  # relative distance of gradients that are the same
_CLOSE_ENOUGH = 1e-4  # the same in single precision and below
_WRITTEN_OUT: dict[str, type[Kernel]] = {"linear_mse": SquaredError, "linear_squared_hinge": SquaredHinge}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """A kernel, and what was found out about the problem on the way."""

    kernel: Kernel
    without_gradient: set[str] = field(default_factory=set)
    """Parameters on which the loss does not depend, or that are not to be trained."""
    note: str | None = None
    """Why clients are trained one after the other, where they are."""


def choose_kernel(
    problem: Problem,
    module: nn.Module,
    layout: Layout,
    shard: NDArray[np.int64],
    batch_size: int,
    *,
    alone: bool = False,
) -> Choice:
    """The fastest kernel that computes the gradients of a problem; `shard` says which samples a client has.

    For a client that is trained `alone`, that is plain differentiation where nothing is written out.
    """
    if problem.kernel is not None and problem.kernel not in _WRITTEN_OUT:
        raise SafaError(f"there is no kernel {problem.kernel!r}; there is {', '.join(_WRITTEN_OUT)}")
    with _aside(next(module.parameters()).device):
        trial = _Trial(problem, module, layout, shard[: min(batch_size, _SAMPLES)])
        is_written_out = problem.kernel is not None
        choice = trial.written_out() if is_written_out else trial.plain() if alone else trial.general()
    if choice.note is not None:
        _tell(choice.note)
    return choice


@cache
def _tell(note: str) -> None:
    """Say something once: a sweep makes many trainers."""
    _log.warning("%s", note)


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Try something out in full precision, leaving random numbers, settings and the user's terminal as they were."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


class _Trial:
    """A batch of the problem's data on which kernels are compared."""

    def __init__(self, problem: Problem, module: nn.Module, layout: Layout, samples: NDArray[np.int64]) -> None:
        self._problem, self._module, self._layout = problem, module, layout
        self._device = next(module.parameters()).device
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        self._start = layout.row(state).repeat(2, 1)
        self._inputs, self._targets = (part[torch.from_numpy(samples)] for part in problem.train)

    # -- what is compared --------------------------------------------------------------------------------------------

    def _rows(self, *spread: float) -> Tensor:
        """The models of two clients: the start model, and random numbers of this spread added to each parameter."""
        rows = self._start.clone()
        for row, scale in zip(rows, spread, strict=True):
            row[: self._layout.trained] += scale * torch.randn(self._layout.trained).to(row)
        return rows

    def _step(self, inputs: Tensor, *, padded: bool) -> Step:
        """One batch for each of two clients, which for the second one has a sample less where it is `padded`."""
        count = len(inputs)
        sizes = torch.tensor([[count], [max(1, count - 1) if padded else count]])
        weight = (torch.arange(count) < sizes).double() / sizes
        x, y = (torch.stack([part, part]).to(self._device) for part in (inputs, self._targets))
        return x, y, weight.to(self._start)

    def _plain(self, module: nn.Module, rows: Tensor, step: Step) -> tuple[Tensor, OneByOne]:
        kernel = OneByOne(self._problem, module, self._layout)
        return kernel.gradients(rows, step), kernel

    # -- kernels that are written out --------------------------------------------------------------------------------

    def written_out(self) -> Choice:
        """The kernel that the problem names; one that does not belong to its model and loss is an error."""
        assert self._problem.kernel is not None
        kernel = _WRITTEN_OUT[self._problem.kernel]()
        if len(self._inputs) and not self._is_computed_by(kernel):
            raise SafaError(
                f"the kernel {self._problem.kernel!r} does not compute this model and loss; leave it out of the problem"
            )
        return Choice(kernel)

    def _is_computed_by(self, kernel: Kernel) -> bool:
        rows = self._rows(0.05, 1.0)  # near the start and far away: some losses agree near 0
        try:
            x, y, weight = self._step(kernel.prepare(self._inputs), padded=True)
            found = kernel.gradients(rows, kernel.pack((x, y, weight)))
            step = self._step(self._inputs, padded=True)
        except (RuntimeError, IndexError, KeyError, TypeError, ValueError):
            return False
        expected, _ = self._expected(rows.clone(), step)
        return found.shape == expected.shape and _agree(found, expected)

    def _expected(self, rows: Tensor, step: Step) -> tuple[Tensor, OneByOne]:
        """The plain gradients; a model that cannot be trained at all is an error of the problem."""
        try:
            return self._plain(self._module, rows, step)
        except Exception as wrong:
            raise SafaError(
                f"the model and its loss fail on a batch of the training data: {_sentence(wrong)}"
            ) from wrong

    # -- any other model ---------------------------------------------------------------------------------------------

    def plain(self) -> Choice:
        """Plain differentiation, of which there is nothing to find out but which parameters have a gradient."""
        kernel = OneByOne(self._problem, self._module, self._layout)
        if len(self._inputs):
            _, kernel = self._expected(self._rows(0.01, 0.01), self._step(self._inputs, padded=False))
        return Choice(kernel, kernel.without_gradient)

    def general(self) -> Choice:
        """`torch.func` where it gives the plain gradients, else one client after the other."""
        if not len(self._inputs):
            return Choice(OneByOne(self._problem, self._module, self._layout))
        rows, step = self._rows(0.01, 0.01), self._step(self._inputs, padded=False)
        after = rows.clone()
        with _saved_bytes(self._module) as saved:
            expected, plain = self._expected(after, step)
        again, _ = self._plain(self._module, rows.clone(), step)
        is_random = not _agree(again, expected)  # dropout
        is_constant = torch.equal(after, rows)  # no buffer was changed
        sample_bytes = saved[0] // (2 * len(self._inputs))
        module = self._problem.start_model(0).to(self._device).eval() if is_random else self._module
        why = ""
        for whole in (False, True):
            if not whole and not (is_constant and self._loss_is_mean()):
                continue
            why = self._differences(module, whole=whole)
            if not why:
                kernel = General(
                    self._problem, self._module, self._layout, whole_batches=whole, sample_bytes=sample_bytes
                )
                why = self._failure(kernel, rows, step) if is_random else ""
            if not why:
                return Choice(kernel, plain.without_gradient)
        note = f"torch cannot batch this model over clients ({why}): each client is trained by itself"
        fresh = self._problem.start_model(0).to(self._device)  # whatever the failure has left in the other
        return Choice(OneByOne(self._problem, fresh, self._layout), plain.without_gradient, note)

    def _differences(self, module: nn.Module, *, whole: bool) -> str:
        """What `_difference` finds, where it finds it at several points: at a kink of the loss, rounding is enough."""
        why = ""
        for _ in range(_POINTS):
            why = self._difference(module, self._rows(0.01, 0.01), whole=whole)
            if not why:
                break
        return why

    def _difference(self, module: nn.Module, rows: Tensor, *, whole: bool) -> str:
        """Where `torch.func` fails or gives other gradients than plain differentiation; empty where it does not."""
        kernel = General(self._problem, module, self._layout, whole_batches=whole, sample_bytes=0)
        step = self._step(self._inputs, padded=not whole)
        mine, plain = rows.clone(), rows.clone()
        try:
            expected, _ = self._plain(module, plain, step)
        except Exception as wrong:
            return _sentence(wrong)
        with _part_at_work(module) as part:
            try:
                found = kernel.gradients(mine, step)
            except Exception as wrong:
                return f"{part[-1] if part else 'loss'}: {_sentence(wrong)}"
        buffers = (rows[:, self._layout.trained :] for rows in (mine, plain))
        return "" if _agree(found, expected) and _agree(*buffers) else "its gradients come out differently"

    def _failure(self, kernel: Kernel, rows: Tensor, step: Step) -> str:
        try:
            kernel.gradients(rows.clone(), step)
        except Exception as wrong:
            return _sentence(wrong)
        return ""

    @torch.enable_grad()
    def _loss_is_mean(self) -> bool:
        """Whether the loss of a batch is the mean of the losses of its samples, to judge by the slope of both."""
        inputs, targets = (part[_varied(self._problem.train[1])].to(self._device) for part in self._problem.train)
        try:
            with torch.no_grad():
                output = self._module(inputs)
            output.requires_grad_()
            together = self._problem.loss(output, targets)
            pairs = zip(output.split(1), targets.split(1), strict=True)
            apart = torch.stack([self._problem.loss(*pair) for pair in pairs]).mean()
            slopes = [torch.autograd.grad(loss, output)[0].flatten().unsqueeze(0) for loss in (together, apart)]
        except Exception:
            return False
        return bool(torch.isfinite(slopes[1]).all()) and _agree(slopes[1], slopes[0])


def _varied(targets: Tensor) -> Tensor:
    """Some samples whose targets differ as much as may be: every class, what is to be ignored, long and short ones."""
    spread = np.linspace(0, len(targets) - 1, _LOSSES).astype(np.int64)
    if targets.is_floating_point() or targets.is_complex():
        return torch.from_numpy(np.unique(spread))
    flat = targets.flatten()
    _, first = np.unique(flat[:_TARGETS].numpy(), return_index=True)
    some = first[np.linspace(0, len(first) - 1, _LOSSES).astype(np.int64)]
    ends = [int(flat.to(torch.int64).argmin()), int(flat.to(torch.int64).argmax())]
    return torch.from_numpy(np.unique([*spread, *(np.array([*some, *ends]) // targets[0].numel())]))


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Whether rows are the same up to rounding, each by its norm; where they are not finite, in the same places."""
    if not torch.isfinite(expected).all():
        return torch.equal(torch.isfinite(found), torch.isfinite(expected))
    apart, size = ((found - expected).double().norm(dim=1), expected.double().norm(dim=1))
    return bool((apart <= _CLOSE.get(expected.dtype, _CLOSE_ENOUGH) * size).all())


def _sentence(wrong: Exception) -> str:
    """The first line of an error."""
    return f"{type(wrong).__name__}: {wrong}".splitlines()[0][:120]


@contextlib.contextmanager
def _saved_bytes(module: nn.Module) -> Iterator[list[int]]:
    """Counts what is kept for the backward pass, besides the parameters."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    total = [0]

    def count(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            total[0] += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        yield total


@contextlib.contextmanager
def _part_at_work(module: nn.Module) -> Iterator[list[str]]:
    """The parts of a model that are at work, innermost last: after an error, those in which it happened."""
    at_work: list[str] = []
    handles = []
    for name, part in module.named_modules():
        label = f"{type(part).__name__} {name}" if name else type(part).__name__

        def enter(*_: Any, label: str = label) -> None:
            at_work.append(label)

        def leave(*_: Any) -> None:
            at_work.pop()

        handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    try:
        yield at_work
    finally:
        for handle in handles:
            handle.remove()
