"""Head problems with a chosen share of live rows, and what they should give in float64.

How a row dies after the forward: its hidden state points at its target's row of the weight, so p >
rho, and CMAE masks it. Nothing but the forward can tell. Live rows are actions (advantage +1 or -1,
on policy) and observations with p near 1/V, in turn. Every row enters the forward; where death is
known before, the live rows alone are gathered.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """What `paw_loss` reads; all [T]."""

    weight: Tensor
    observation: Tensor
    """bool"""
    advantage: Tensor
    old_logp: Tensor

    def take(self, index: Tensor) -> "Tokens":
        return Tokens(*(getattr(self, field.name)[index] for field in fields(self)))


def paw_loss(logp: Tensor, entropy: Tensor, batch: Tokens) -> Tensor:
    """The surrogate without a clip, which rows on policy do not reach, and CMAE."""
    p = logp.exp()
    surrogate = -batch.advantage * (logp - batch.old_logp).exp()
    return batch.weight * torch.where(
        batch.observation, torch.where(p.detach() <= RHO, 1 - p, 0.0), surrogate
    )


HEADS = {  # name: (D, V)
    "Qwen2.5-1.5B": (1536, 151_936),
    "Qwen2.5-7B": (3584, 152_064),
    "Llama-3.2-3B": (3072, 128_256),
    "Llama-3.1-8B": (4096, 128_256),
    "Qwen2.5-14B": (5120, 152_064),
}
RHO = 0.2
CHECKED = 64
"""Rows of hidden and rows of the weight whose gradients are compared with float64."""
_ROWS, _COLUMNS = 8192, 16_384
"""Of one float64 tile: 1 GiB."""


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    """[T, D]."""
    weight: Tensor
    """[V, D], rows of about unit length."""
    target: Tensor
    """[T] int64."""
    rows: Tokens
    known: bool
    """Whether it is known before the forward which rows live."""
    live: Tensor
    """[f T] int64, ascending: rows with a gradient."""
    log_sum: Tensor
    """[T] float64."""
    logp: Tensor
    """[T] float64."""
    checked: Tensor
    """[n] int64: rows whose d_hidden is compared."""
    words: Tensor
    """[m] int64: tokens whose rows of d_weight are compared; half of them targets of live rows."""

    @cached_property
    def plain(self) -> "Errors":
        """Of plain torch in the dtype of the inputs, on the checked rows alone: the yardstick of `passes`."""
        at = self.checked
        x, w = self.hidden[at].requires_grad_(), self.weight.detach().requires_grad_()
        logp = (x @ w.t()).log_softmax(-1).gather(1, self.target[at, None]).squeeze(1)
        rows = {name: getattr(self, name)[at] for name in ("hidden", "target", "log_sum", "logp")}
        part = replace(
            self,
            **rows,
            rows=self.rows.take(at),
            known=False,
            checked=torch.arange(at.numel(), device=at.device),
        )
        a = 0.7 * slope_of_mean(part)  # powers of two would round to nothing in 16 bits
        gradients = list(torch.autograd.grad((a * logp).sum(), (x, w)))
        return errors(part, a, loss=None, logp=logp.detach(), gradients=gradients)


@dataclass(frozen=True)
class Errors:
    """Against float64; None where an implementation does not tell. Absolute (nats) for the first
    two, largest of all rows; for gradients the norm of the difference over the norm."""

    loss: float | None = None
    logp: float | None = None
    d_hidden: float | None = None
    d_weight: float | None = None


def make_problem(
    T: int,
    D: int,
    V: int,
    *,
    live: float,
    known: bool,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Problem:
    """round(live T) rows have a gradient; with `known` the others are of kind 0, else only the forward can tell.

    Raises ValueError where D is too small for that: other rows of the weight then point the same
    way.
    """
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=dtype)

    def some(n: int, of: int) -> Tensor:
        return torch.randperm(of, generator=g, device=device)[:n]

    weight, hidden = randn(V, D).mul_(D**-0.5), randn(T, D)
    target = torch.randint(V, (T,), generator=g, device=device)
    L = round(live * T)
    order = some(T, T)
    alive, dead = order[:L].sort().values, order[L:]
    at_target = weight[target[dead]].float()
    # log V + 8 above zero, so p of about 0.99 against the noise of the V - 1 others.
    hidden[dead] += ((math.log(V) + 8) * at_target / at_target.square().sum(1, keepdim=True)).to(
        dtype
    )
    log_sum = log_sums(hidden, weight)
    logp = target_logits(hidden, weight, target) - log_sum
    if (logp[dead].exp() < 2 * RHO).any() or (logp[alive].exp() > RHO / 2).any():
        raise ValueError(f"D={D} is too small to tell live rows from dead ones at V={V}")

    observation = torch.ones(T, dtype=torch.bool, device=device)
    observation[alive[::2]] = False
    sign = torch.randint(2, (T,), generator=g, device=device) * 2.0 - 1
    rows = Tokens(torch.full_like(sign, 0.7 / T), observation, sign, logp.float())
    half = CHECKED // 2
    checked = torch.cat((alive[some(min(half, L), max(L, 1))], dead[:half])) if L else dead[:half]
    words = torch.cat((target[alive[:half]], some(half, V))).unique()
    return Problem(hidden, weight, target, rows, known, alive, log_sum, logp, checked, words)


def log_sums(hidden: Tensor, weight: Tensor) -> Tensor:
    """log sum_j exp(z_j), [T] float64, tile by tile."""
    found = []
    for x in hidden.split(_ROWS):
        x, total = (
            x.double(),
            torch.full((x.shape[0],), -torch.inf, dtype=torch.float64, device=x.device),
        )
        for w in weight.split(_COLUMNS):
            total = torch.logaddexp(total, torch.logsumexp(x @ w.double().t(), 1))
        found.append(total)
    return torch.cat(found) if found else hidden.new_empty(0, dtype=torch.float64)


def target_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    pairs = zip(hidden.split(_ROWS), target.split(_ROWS), strict=True)
    return torch.cat([(x.double() * weight[y].double()).sum(1) for x, y in pairs])


def slope_of_rows(problem: Problem) -> Tensor:
    """a = dL/dlogp of each row of the paw loss, [T] float64, written out for the rows made here."""
    rows, p = problem.rows, problem.logp.exp()
    action = -rows.advantage * (problem.logp - rows.old_logp).exp()
    return rows.weight * torch.where(rows.observation, torch.where(p <= RHO, -p, 0.0), action)


def loss_of_rows(problem: Problem) -> Tensor:
    """Scalar float64."""
    rows, p = problem.rows, problem.logp.exp()
    action = -rows.advantage * (problem.logp - rows.old_logp).exp()
    loss = rows.weight * torch.where(rows.observation, torch.where(p <= RHO, 1 - p, 0.0), action)
    return (loss[problem.live] if problem.known else loss).sum()


def slope_of_mean(problem: Problem, index: Tensor | None = None) -> Tensor:
    """a of the mean cross-entropy of the rows `index` (all if None), [T] float64."""
    n = problem.target.numel() if index is None else index.numel()
    a = torch.zeros_like(problem.logp)
    a[slice(None) if index is None else index] = -1 / n
    return a


def d_hidden(problem: Problem, a: Tensor) -> Tensor:
    """a_t (W_y - sum_j p_j W_j) of the checked rows, [n, D] float64."""
    at = problem.checked
    x, log_sum = problem.hidden[at].double(), problem.log_sum[at, None]
    mean = torch.zeros_like(x)
    for w in problem.weight.split(_COLUMNS):
        w = w.double()
        mean += (x @ w.t() - log_sum).exp() @ w
    return a[at, None] * (problem.weight[problem.target[at]].double() - mean)


def d_weight(problem: Problem, a: Tensor) -> Tensor:
    """sum_t a_t (1[y_t = j] - p_tj) h_t of the checked words j, [m, D] float64."""
    words = problem.weight[problem.words].double()
    total = torch.zeros_like(words)
    for start in range(0, a.numel(), _ROWS):
        part = slice(start, start + _ROWS)
        x = problem.hidden[part].double()
        p = (x @ words.t() - problem.log_sum[part, None]).exp()
        hit = problem.target[part, None] == problem.words
        total += ((hit.double() - p) * a[part, None]).t() @ x
    return total


def errors(
    problem: Problem,
    a: Tensor,
    *,
    loss: tuple[Tensor, Tensor] | None,
    logp: Tensor | None,
    gradients: list[Tensor],
) -> Errors:
    """`loss` is (got, wanted); `logp` of all rows, or the live ones if known; `gradients` are of hidden and weight."""
    at = problem.live if problem.known else slice(None)
    h, w = (
        (None, None)
        if not gradients
        else (gradients[0][problem.checked], gradients[1][problem.words])
    )
    return Errors(
        loss=None if loss is None else (loss[0].double() - loss[1]).abs().item(),
        logp=None
        if logp is None or not logp.numel()
        else (logp.double() - problem.logp[at]).abs().amax().item(),
        d_hidden=None if h is None else relative(h, d_hidden(problem, a)),
        d_weight=None if w is None else relative(w, d_weight(problem, a)),
    )


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def passes(found: Errors, plain: Errors) -> bool:
    """Every error at most twice that of plain torch, plus 1e-4: the bar of QuACK's own tests."""
    pairs = [
        (getattr(found, name), getattr(plain, name)) for name in ("logp", "d_hidden", "d_weight")
    ]
    return all(error is None or error <= 2 * bar + 1e-4 for error, bar in pairs)
