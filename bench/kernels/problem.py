"""Head problems with a chosen share of live rows, and what they should give in float64.

How a row dies after the forward: its hidden state points at its target's row of the weight, so p >
rho, and CMAE masks it. Only the forward can tell. Live rows are actions (advantage +1 or -1, on
policy) and observations with p near 1/V, in turn. Every row enters the forward, unless it is known
before which rows are dead: then only the live ones are gathered.
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
    cmae = torch.where(p.detach() <= RHO, 1 - p, 0.0)
    return batch.weight * torch.where(batch.observation, cmae, surrogate)


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
_ROWS = 8192
_COLUMNS = 16_384
"""Of one float64 tile of logits: 1 GiB."""


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
        """The errors of plain torch in the dtype of the inputs, on the checked rows: the yardstick
        of `passes`."""
        index = self.checked
        x = self.hidden[index].requires_grad_()
        w = self.weight.detach().requires_grad_()
        logp = (x @ w.t()).log_softmax(-1).gather(1, self.target[index, None]).squeeze(1)
        part = replace(
            self,
            hidden=self.hidden[index],
            target=self.target[index],
            log_sum=self.log_sum[index],
            logp=self.logp[index],
            rows=self.rows.take(index),
            known=False,
            checked=torch.arange(index.numel(), device=index.device),
        )
        a = 0.7 * slope_of_mean(part)  # powers of two would round to nothing in 16 bits
        gradients = list(torch.autograd.grad((a * logp).sum(), (x, w)))
        return errors(part, a, loss=None, logp=logp.detach(), gradients=gradients)


@dataclass(frozen=True)
class Errors:
    """Errors against float64; None if the implementation does not return that result.

    Of loss and logp the largest absolute one, nats; of gradients the norm of the difference over
    the norm.
    """

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
    """A problem in which round(live T) rows have a gradient.

    `known`: whether the others are known before the forward, so that only live rows are gathered.
    Raises ValueError if D is too small to make rows live or dead: then other rows of the weight
    point the same way as the target's.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    weight = randn(V, D).mul_(D**-0.5)
    hidden = randn(T, D)
    target = torch.randint(V, (T,), generator=generator, device=device)
    L = round(live * T)
    order = choose(T, T, generator)
    alive = order[:L].sort().values
    dead = order[L:]

    point_at_targets(hidden, weight, target, dead)
    log_sum = log_sums(hidden, weight)
    logp = target_logits(hidden, weight, target) - log_sum
    check_rows(logp, alive, dead, D=D, V=V)
    rows = make_tokens(alive, logp, generator)
    checked, words = checked_parts(alive, dead, target, V, generator)
    return Problem(
        hidden=hidden,
        weight=weight,
        target=target,
        rows=rows,
        known=known,
        live=alive,
        log_sum=log_sum,
        logp=logp,
        checked=checked,
        words=words,
    )


def choose(count: int, total: int, generator: torch.Generator) -> Tensor:
    """`count` distinct numbers below `total`."""
    return torch.randperm(total, generator=generator, device=generator.device)[:count]


def checked_parts(
    alive: Tensor, dead: Tensor, target: Tensor, V: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(rows whose results are checked, words whose weights' gradients are checked)."""
    half = CHECKED // 2
    checked = dead[:half]
    if len(alive):
        drawn = choose(min(half, len(alive)), len(alive), generator)
        checked = torch.cat((alive[drawn], checked))
    words = torch.cat((target[alive[:half]], choose(half, V, generator))).unique()
    return checked, words


def check_rows(logp: Tensor, alive: Tensor, dead: Tensor, *, D: int, V: int) -> None:
    """Raises ValueError if live rows cannot be told from dead ones by their targets' p."""
    if (logp[dead].exp() < 2 * RHO).any() or (logp[alive].exp() > RHO / 2).any():
        raise ValueError(f"D={D} is too small to tell live rows from dead ones at V={V}")


def make_tokens(alive: Tensor, logp: Tensor, generator: torch.Generator) -> Tokens:
    """What the loss reads: every second live row is of a response, with an advantage of 1 or -1."""
    T = len(logp)
    observation = torch.ones(T, dtype=torch.bool, device=logp.device)
    observation[alive[::2]] = False
    sign = torch.randint(2, (T,), generator=generator, device=logp.device) * 2.0 - 1
    return Tokens(
        weight=torch.full_like(sign, 0.7 / T),
        observation=observation,
        advantage=sign,
        old_logp=logp.float(),
    )


def point_at_targets(hidden: Tensor, weight: Tensor, target: Tensor, dead: Tensor) -> None:
    """Adds to the hidden states of `dead` what makes their targets' logits log V + 8.

    That is a p of about 0.99 against V - 1 others near 0.
    """
    direction = weight[target[dead]].float()
    norm_squared = direction.square().sum(1, keepdim=True)
    logit = math.log(weight.shape[0]) + 8
    hidden[dead] += (logit * direction / norm_squared).to(hidden.dtype)


def log_sums(hidden: Tensor, weight: Tensor) -> Tensor:
    """log sum_j exp(z_j), [T] float64, tile by tile."""
    totals = []
    for rows in hidden.split(_ROWS):
        x = rows.double()
        total = torch.full((x.shape[0],), -torch.inf, dtype=torch.float64, device=x.device)
        for w in weight.split(_COLUMNS):
            total = torch.logaddexp(total, torch.logsumexp(x @ w.double().t(), 1))
        totals.append(total)
    return torch.cat(totals) if totals else hidden.new_empty(0, dtype=torch.float64)


def target_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    pairs = zip(hidden.split(_ROWS), target.split(_ROWS), strict=True)
    return torch.cat([(x.double() * weight[y].double()).sum(1) for x, y in pairs])


def slope_of_rows(problem: Problem) -> Tensor:
    """a = dL/dlogp of `paw_loss` of each row, [T] float64, written out for the rows made here."""
    rows = problem.rows
    p = problem.logp.exp()
    action = -rows.advantage * (problem.logp - rows.old_logp).exp()
    cmae = torch.where(p <= RHO, -p, 0.0)
    return rows.weight * torch.where(rows.observation, cmae, action)


def loss_of_rows(problem: Problem) -> Tensor:
    """The sum of `paw_loss` over the rows that are run, scalar float64."""
    rows = problem.rows
    p = problem.logp.exp()
    action = -rows.advantage * (problem.logp - rows.old_logp).exp()
    cmae = torch.where(p <= RHO, 1 - p, 0.0)
    loss = rows.weight * torch.where(rows.observation, cmae, action)
    if problem.known:
        loss = loss[problem.live]
    return loss.sum()


def slope_of_mean(problem: Problem, index: Tensor | None = None) -> Tensor:
    """a of the mean cross-entropy of the rows `index` (all if None), [T] float64."""
    if index is None:
        return torch.full_like(problem.logp, -1 / problem.target.numel())
    a = torch.zeros_like(problem.logp)
    a[index] = -1 / index.numel()
    return a


def d_hidden(problem: Problem, a: Tensor) -> Tensor:
    """a_t (W_y - sum_j p_j W_j) of the checked rows, [n, D] float64."""
    index = problem.checked
    x = problem.hidden[index].double()
    log_sum = problem.log_sum[index, None]
    mean = torch.zeros_like(x)
    for w in problem.weight.split(_COLUMNS):
        w = w.double()
        mean += (x @ w.t() - log_sum).exp() @ w
    return a[index, None] * (problem.weight[problem.target[index]].double() - mean)


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
    """The errors of an implementation's results.

    `loss` is (its value, the true one); `logp` of all rows, or of the live ones if they are known;
    `gradients` are those of hidden [T, D] and weight [V, D], or none.
    """
    result = Errors()
    if loss is not None:
        value, true = loss
        result = replace(result, loss=(value.double() - true).abs().item())
    if logp is not None and logp.numel():
        true_logp = problem.logp[problem.live] if problem.known else problem.logp
        result = replace(result, logp=(logp.double() - true_logp).abs().amax().item())
    if gradients:
        for_hidden, for_weight = gradients
        result = replace(
            result,
            d_hidden=relative(for_hidden[problem.checked], d_hidden(problem, a)),
            d_weight=relative(for_weight[problem.words], d_weight(problem, a)),
        )
    return result


def relative(value: Tensor, true: Tensor) -> float:
    return ((value.double() - true).norm() / true.norm()).item()


def passes(measured: Errors, plain: Errors) -> bool:
    """Whether every error is at most twice that of plain torch, plus 1e-4: the bar of QuACK's own
    tests."""
    for name in ("logp", "d_hidden", "d_weight"):
        error = getattr(measured, name)
        if error is not None and not error <= 2 * getattr(plain, name) + 1e-4:
            return False
    return True
