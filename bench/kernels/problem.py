"""Head problems with a chosen share of live rows, and their float64 results.

A row dies in the forward because its hidden state points at its target's row of the weight: then
p > rho, and CMAE masks the row. Only the forward can tell. Live rows alternate between actions
(advantage +1 or -1, on policy) and observations with p near 1/V. Every row enters the forward,
unless the dead rows are known beforehand; then only the live ones are gathered.
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
    """CMAE, and the surrogate without its clip, which on-policy rows do not reach."""
    probability = logp.exp()
    surrogate = -batch.advantage * (logp - batch.old_logp).exp()
    cmae = torch.where(probability.detach() <= RHO, 1 - probability, 0.0)
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
"""How many rows of hidden, and of the weight, have their gradients compared with float64."""
_ROWS = 8192
_COLUMNS = 16_384
"""Rows and columns of one float64 tile of logits, which takes 1 GiB."""


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
    """Whether the live rows are known before the forward."""
    live: Tensor
    """[f T] int64, ascending: rows with a gradient."""
    log_sum: Tensor
    """[T] float64."""
    logp: Tensor
    """[T] float64."""
    checked: Tensor
    """[n] int64: rows whose d_hidden is compared."""
    words: Tensor
    """[m] int64: tokens whose rows of d_weight are compared; half are targets of live rows."""

    @cached_property
    def plain(self) -> "Errors":
        """The errors of plain torch on the checked rows, in the dtype of the inputs.

        `passes` compares with them.
        """
        row_index = self.checked
        hidden = self.hidden[row_index].requires_grad_()
        weight = self.weight.detach().requires_grad_()
        target = self.target[row_index]
        logp = (hidden @ weight.t()).log_softmax(-1).gather(1, target[:, None]).squeeze(1)
        checked_problem = replace(
            self,
            hidden=self.hidden[row_index],
            target=target,
            log_sum=self.log_sum[row_index],
            logp=self.logp[row_index],
            rows=self.rows.take(row_index),
            known=False,
            checked=torch.arange(row_index.numel(), device=row_index.device),
        )
        # Powers of two would not be rounded in 16 bits.
        logp_slope = 0.7 * slope_of_mean(checked_problem)
        gradients = list(torch.autograd.grad((logp_slope * logp).sum(), (hidden, weight)))
        return errors(
            checked_problem, logp_slope, loss=None, logp=logp.detach(), gradients=gradients
        )


@dataclass(frozen=True)
class Errors:
    """Errors against float64; None if the implementation does not return that result.

    loss and logp: the largest absolute error, in nats. Gradients: the norm of the difference
    divided by the norm of the true gradient.
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

    `known`: whether the other rows are known before the forward, so that only live rows are
    gathered. Raises ValueError if D is too small to make rows live or dead, because other rows of
    the weight then point in the same direction as the target's.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    weight = randn(V, D).mul_(D**-0.5)
    hidden = randn(T, D)
    target = torch.randint(V, (T,), generator=generator, device=device)
    live_count = round(live * T)
    shuffled = choose(T, T, generator)
    alive = shuffled[:live_count].sort().values
    dead = shuffled[live_count:]

    point_at_targets(hidden, weight, target, dead)
    log_sum = log_sums(hidden, weight)
    logp = target_logits(hidden, weight, target) - log_sum
    check_rows(logp, alive, dead, D=D, V=V)
    row_tokens = make_tokens(alive, logp, generator)
    checked, checked_words = checked_parts(alive, dead, target, V, generator)
    return Problem(
        hidden=hidden,
        weight=weight,
        target=target,
        rows=row_tokens,
        known=known,
        live=alive,
        log_sum=log_sum,
        logp=logp,
        checked=checked,
        words=checked_words,
    )


def choose(count: int, total: int, generator: torch.Generator) -> Tensor:
    """`count` distinct numbers below `total`."""
    return torch.randperm(total, generator=generator, device=generator.device)[:count]


def checked_parts(
    alive: Tensor, dead: Tensor, target: Tensor, V: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(rows whose results are checked, tokens whose weight gradients are checked)."""
    half = CHECKED // 2
    checked = dead[:half]
    if len(alive):
        drawn_live = choose(min(half, len(alive)), len(alive), generator)
        checked = torch.cat((alive[drawn_live], checked))
    checked_words = torch.cat((target[alive[:half]], choose(half, V, generator))).unique()
    return checked, checked_words


def check_rows(logp: Tensor, alive: Tensor, dead: Tensor, *, D: int, V: int) -> None:
    """Raises ValueError if the targets' p does not separate live rows from dead ones."""
    if (logp[dead].exp() < 2 * RHO).any() or (logp[alive].exp() > RHO / 2).any():
        raise ValueError(f"D={D} is too small to tell live rows from dead ones at V={V}")


def make_tokens(alive: Tensor, logp: Tensor, generator: torch.Generator) -> Tokens:
    """What the loss reads. Every second live row is an action with an advantage of 1 or -1."""
    T = len(logp)
    observation = torch.ones(T, dtype=torch.bool, device=logp.device)
    observation[alive[::2]] = False
    advantage_sign = torch.randint(2, (T,), generator=generator, device=logp.device) * 2.0 - 1
    return Tokens(
        weight=torch.full_like(advantage_sign, 0.7 / T),
        observation=observation,
        advantage=advantage_sign,
        old_logp=logp.float(),
    )


def point_at_targets(hidden: Tensor, weight: Tensor, target: Tensor, dead: Tensor) -> None:
    """Raises the targets' logits of the rows `dead` to log V + 8, by changing their hidden states.

    If the V - 1 other logits are near 0, the target's p is about 0.99.
    """
    direction = weight[target[dead]].float()
    norm_squared = direction.square().sum(1, keepdim=True)
    logit = math.log(weight.shape[0]) + 8
    hidden[dead] += (logit * direction / norm_squared).to(hidden.dtype)


def log_sums(hidden: Tensor, weight: Tensor) -> Tensor:
    """log sum_j exp(z_j), [T] float64, tile by tile."""
    totals = []
    for hidden_tile in hidden.split(_ROWS):
        hidden_double = hidden_tile.double()
        log_sum = hidden_double.new_full((len(hidden_double),), -torch.inf)
        for weight_tile in weight.split(_COLUMNS):
            logits = hidden_double @ weight_tile.double().t()
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
        totals.append(log_sum)
    return torch.cat(totals) if totals else hidden.new_empty(0, dtype=torch.float64)


def target_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The logit of each row's target, [T] float64, tile by tile."""
    logits = []
    for hidden_tile, target_tile in zip(hidden.split(_ROWS), target.split(_ROWS), strict=True):
        products = hidden_tile.double() * weight[target_tile].double()
        logits.append(products.sum(1))
    return torch.cat(logits)


def slope_of_rows(problem: Problem) -> Tensor:
    """dL/dlogp of `paw_loss` for each row, [T] float64, written out for the rows made here."""
    row_tokens = problem.rows
    probability = problem.logp.exp()
    action = -row_tokens.advantage * (problem.logp - row_tokens.old_logp).exp()
    cmae = torch.where(probability <= RHO, -probability, 0.0)
    return row_tokens.weight * torch.where(row_tokens.observation, cmae, action)


def loss_of_rows(problem: Problem) -> Tensor:
    """The sum of `paw_loss` over the rows that enter the forward, scalar float64."""
    row_tokens = problem.rows
    probability = problem.logp.exp()
    action = -row_tokens.advantage * (problem.logp - row_tokens.old_logp).exp()
    cmae = torch.where(probability <= RHO, 1 - probability, 0.0)
    row_losses = row_tokens.weight * torch.where(row_tokens.observation, cmae, action)
    if problem.known:
        row_losses = row_losses[problem.live]
    return row_losses.sum()


def slope_of_mean(problem: Problem, row_index: Tensor | None = None) -> Tensor:
    """dL/dlogp of the mean cross-entropy of the rows `row_index` (all if None), [T] float64."""
    if row_index is None:
        return torch.full_like(problem.logp, -1 / problem.target.numel())
    slope = torch.zeros_like(problem.logp)
    slope[row_index] = -1 / row_index.numel()
    return slope


def d_hidden(problem: Problem, slope: Tensor) -> Tensor:
    """slope_t (W_y - sum_j p_j W_j) of the checked rows t, [n, D] float64."""
    row_index = problem.checked
    hidden = problem.hidden[row_index].double()
    log_sum = problem.log_sum[row_index, None]
    mean_weight = torch.zeros_like(hidden)
    for weight_tile in problem.weight.split(_COLUMNS):
        weight_tile = weight_tile.double()
        mean_weight += (hidden @ weight_tile.t() - log_sum).exp() @ weight_tile
    target_weight = problem.weight[problem.target[row_index]].double()
    return slope[row_index, None] * (target_weight - mean_weight)


def d_weight(problem: Problem, slope: Tensor) -> Tensor:
    """sum_t slope_t (1[y_t = j] - p_tj) h_t of the checked tokens j, [m, D] float64."""
    checked_weight = problem.weight[problem.words].double()
    gradient = torch.zeros_like(checked_weight)
    for tile_start in range(0, slope.numel(), _ROWS):
        tile = slice(tile_start, tile_start + _ROWS)
        hidden_tile = problem.hidden[tile].double()
        probabilities = (hidden_tile @ checked_weight.t() - problem.log_sum[tile, None]).exp()
        is_target = problem.target[tile, None] == problem.words
        gradient += ((is_target.double() - probabilities) * slope[tile, None]).t() @ hidden_tile
    return gradient


def errors(
    problem: Problem,
    slope: Tensor,
    *,
    loss: tuple[Tensor, Tensor] | None,
    logp: Tensor | None,
    gradients: list[Tensor],
) -> Errors:
    """The errors of an implementation's results.

    `loss` is (measured, true). `logp` has all rows, or only the live ones if they are known.
    `gradients` are those of hidden [T, D] and weight [V, D], or empty. `slope` is dL/dlogp, [T].
    """
    result = Errors()
    if loss is not None:
        measured_loss, true_loss = loss
        result = replace(result, loss=(measured_loss.double() - true_loss).abs().item())
    if logp is not None and logp.numel():
        true_logp = problem.logp[problem.live] if problem.known else problem.logp
        result = replace(result, logp=(logp.double() - true_logp).abs().amax().item())
    if gradients:
        for_hidden, for_weight = gradients
        result = replace(
            result,
            d_hidden=relative(for_hidden[problem.checked], d_hidden(problem, slope)),
            d_weight=relative(for_weight[problem.words], d_weight(problem, slope)),
        )
    return result


def relative(measured: Tensor, expected: Tensor) -> float:
    return ((measured.double() - expected).norm() / expected.norm()).item()


def passes(measured: Errors, plain: Errors) -> bool:
    """Whether every error is at most twice that of plain torch, plus 1e-4, as in QuACK's own
    tests."""
    for result_name in ("logp", "d_hidden", "d_weight"):
        error = getattr(measured, result_name)
        if error is not None and not error <= 2 * getattr(plain, result_name) + 1e-4:
            return False
    return True
