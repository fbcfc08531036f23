"""Every metric of a run, declared once: its meaning, how ranks are combined, where it is shown.

The names are the keys of metrics.jsonl. The line of progress (tools/train/callbacks.py), the report
(tools/report/report.py) and docs/metrics.md read this list and show the metrics in its order. The
means over tokens are also computed from it (algo/token_sums.py). A metric that was not measured is
absent, never 0.

To add one, declare it here. Then

- for a mean over tokens, add its sum to `algo/token_sums.py` and name that in `mean_of`;
- for any other, set it in `run.metrics`, or return it from the stage that measures it.

After a change:

    python -m paw.metric_list > docs/metrics.md
    python tests/goldens.py --write        # every run has the new key
"""

from dataclasses import dataclass
from typing import Literal

PAGE_HEADING = """# Metrics

<!-- written by `python -m paw.metric_list > docs/metrics.md` -->
On this page you can look up what each number in a run's `metrics.jsonl` means, and where it is
shown. The file has one JSON object per update, with `step` and these keys. A metric that was not
measured is absent, never 0.

- In names, `<kind>` stands for one of the environment's kinds of tasks, `<environment>` for a label
  of one of several `[[envs]]`, `<reward>` for that of one of several `[[rewards]]`, and `<k>` for a
  number of attempts.
- Shown: "line" is the line of progress, which also shows an evaluation as `eval 41.0% of 100
  games`; "report" is the report's table.
- Ranks: if there are several, "same" metrics are computed on every rank from the data of all;
  "sum" adds up the ranks' parts (for a share or a mean, before dividing); with "first", rank 0
  reports its own.
"""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, or with `<kind>` in its name one for each kind of task.

    `<environment>` stands for the labels of several [[envs]], `<reward>` for those of [[rewards]].
    """

    name: str
    label: str
    """A heading of a few words."""
    meaning: str
    """One or two sentences, shown under its chart and in docs/metrics.md."""
    unit: str = ""
    """`%` is a share from 0 to 1, shown in per cent. `count` is events in an update. `running
    count` is events so far. Anything else is a unit."""
    ranks: Literal["same", "sum", "first"] = "same"
    """How the values of several ranks are combined, see PAGE_HEADING."""
    mean_of: tuple[str, str] | None = None
    """(numerator, denominator) of a mean over tokens, both keys of `algo.token_sums.token_sums`."""
    progress: str = ""
    """Its format on the line of progress; empty if it is not shown there."""
    trouble: str = ""
    """Its format at the end of that line, where it is shown unless it is 0."""
    section: Literal["", "Policy", "World model", "Critic", "Cost", "Health"] = ""
    """Its section in the report's table; empty if it is not in the report."""
    chart: bool = False
    """Whether the report also draws it."""

    @property
    def is_count(self) -> bool:
        return self.unit in ("count", "running count")


EPISODES = (
    Metric(
        name="reward/mean",
        label="Mean return",
        meaning="Environment reward of a training episode, without penalties.",
        progress="reward {:.3g}",
        section="Policy",
        chart=True,
    ),
    Metric(
        name="success/all",
        label="Success in training",
        meaning="Share of won episodes among all that were played for the update, including those"
        " that `rollout.refill` leaves out.",
        unit="%",
        progress="success {:.1%}",
        section="Policy",
    ),
    Metric(
        name="success/<kind>",
        label="Success in training by kind of task",
        meaning="As success/all, for the episodes of one kind of task. A run with several [[envs]]"
        " also has success/LABEL for each, and its kinds are called LABEL/kind.",
        unit="%",
    ),
    Metric(
        name="reward/<environment>",
        label="Mean return by environment",
        meaning="As reward/mean, for each of several [[envs]], by label.",
    ),
    Metric(
        name="rewards/<reward>",
        label="Mean of a reward",
        meaning="Mean of one of several [[rewards]] over training episodes, without its weight. One"
        " of [[envs.rewards]] is LABEL/REWARD, over the episodes of that environment.",
    ),
    Metric(
        name="groups/<environment>",
        label="Groups by environment",
        meaning="Groups played for the update, for each of several [[envs]].",
        unit="count",
    ),
)
EVALUATION = (
    Metric(
        name="eval/games",
        label="Evaluation games",
        meaning="Held-out games, each played once, or `eval.attempts` times.",
    ),
    Metric(
        name="eval/success",
        label="Success on held-out games",
        meaning="Share of the evaluation games that succeeded.",
        unit="%",
    ),
    Metric(
        name="eval/ci_low",
        label="Lower end of the interval",
        meaning="Lower end of the 95 % interval of eval/success: Wilson's with one attempt at each"
        " game, a bootstrap over games with more.",
        unit="%",
    ),
    Metric(
        name="eval/ci_high",
        label="Upper end of the interval",
        meaning="Upper end of the 95 % interval of eval/success: Wilson's with one attempt at each"
        " game, a bootstrap over games with more.",
        unit="%",
    ),
    Metric(
        name="eval/attempts",
        label="Attempts at each evaluation game",
        meaning="`eval.attempts`, if it is more than 1.",
    ),
    Metric(
        name="eval/pass_at_<k>",
        label="pass@k on held-out games",
        meaning="With several attempts: chance that at least one of k attempts at a game succeeds,"
        " for k = 1, 2, 4, ... up to `eval.attempts` (the unbiased estimate of arXiv 2107.03374).",
        unit="%",
    ),
    Metric(
        name="eval/pass_at_<k>_low",
        label="Lower end of the interval of pass@k",
        meaning="95 %, over games. The upper end is `eval/pass_at_<k>_high`.",
        unit="%",
    ),
    Metric(
        name="eval/best_at_<k>",
        label="Best of k on held-out games",
        meaning="With several attempts: expected highest score of k attempts at a game, or highest"
        " return if the environment has no score.",
    ),
    Metric(
        name="eval/best_at_<k>_low",
        label="Lower end of the interval of best of k",
        meaning="95 %, over games. The upper end is `eval/best_at_<k>_high`.",
    ),
    Metric(
        name="eval/pass_at_<k>_<environment>",
        label="pass@k by environment",
        meaning="As eval/pass_at_<k>, for each of several [[envs]]. Its interval is"
        " `eval/pass_at_<k>_low_<environment>` and `_high_`.",
        unit="%",
    ),
    Metric(
        name="eval/best_at_<k>_<environment>",
        label="Best of k by environment",
        meaning="As eval/best_at_<k>, for each of several [[envs]], with an interval named in the"
        " same way.",
    ),
    Metric(
        name="eval/success_<kind>",
        label="Success on held-out games by kind of task",
        meaning="As eval/success, for the games of one kind of task. A run with several [[envs]]"
        " also has eval/success_LABEL for each.",
        unit="%",
    ),
    Metric(
        name="eval/ci_low_<environment>",
        label="Lower end of the interval by environment",
        meaning="As eval/ci_low, for each of several [[envs]], over its games.",
        unit="%",
    ),
    Metric(
        name="eval/ci_high_<environment>",
        label="Upper end of the interval by environment",
        meaning="As eval/ci_high, for each of several [[envs]], over its games.",
        unit="%",
    ),
    Metric(
        name="eval/rewards_<reward>",
        label="Mean of a reward in evaluation",
        meaning="As rewards/<reward>, for evaluation games.",
    ),
    Metric(
        name="eval/return_<environment>",
        label="Mean return in evaluation by environment",
        meaning="As eval/return, for each of several [[envs]].",
    ),
    Metric(
        name="eval/failure",
        label="First environment failure in evaluation",
        meaning="Text: why the first failed game failed.",
    ),
    Metric(
        name="eval/return",
        label="Mean return in evaluation",
        meaning="Environment reward of an evaluation game.",
    ),
    Metric(
        name="eval/steps",
        label="Turns in evaluation",
        meaning="Mean number of turns of an evaluation game.",
    ),
    Metric(
        name="eval/valid_actions",
        label="Valid actions in evaluation",
        meaning="Share of the turns whose response was well-formed.",
        unit="%",
    ),
    Metric(
        name="eval/score",
        label="Score in evaluation",
        meaning="Mean of the environment's own score of a game, if it has one.",
    ),
)
LOSSES = (
    Metric(
        name="wm/lambda",
        label="Weight λ",
        meaning="Mean over groups of 1 − return / R_max. Falls as tasks are solved.",
        progress="lambda {:.3f}",
        section="World model",
        chart=True,
    ),
    Metric(
        name="policy/loss",
        label="Policy loss",
        meaning="Its value in the objective, including weights; mean over optimizer steps.",
        ranks="sum",
        progress="policy {:.3g}",
        section="Policy",
    ),
    Metric(
        name="wm/loss",
        label="World-model loss",
        meaning="Its value in the objective, including weights.",
        ranks="sum",
        progress="world {:.3g}",
        section="World model",
        chart=True,
    ),
    Metric(
        name="wm/masked_frac",
        label="Masked tokens",
        meaning="Share of observation tokens left out because they are already predicted (p > ρ).",
        unit="%",
        ranks="sum",
        mean_of=("masked", "observation_tokens"),
        section="World model",
        chart=True,
    ),
    Metric(
        name="wm/token_loss",
        label="World-model loss of a token",
        meaning="Mean over observation tokens, without weights.",
        ranks="sum",
        mean_of=("wm_token_loss", "observation_tokens"),
    ),
    Metric(
        name="wm/selected_frac",
        label="Turns selected by entropy",
        meaning="Share of the update's turns from which the world model learns.",
        unit="%",
        section="World model",
    ),
)
POLICY = (
    Metric(
        name="policy/entropy",
        label="Policy entropy",
        meaning="Per response token. Exploration ends as it nears 0.",
        unit="nats",
        ranks="sum",
        mean_of=("entropy", "response_tokens"),
        progress="entropy {:.3g}",
        section="Policy",
        chart=True,
    ),
    Metric(
        name="policy/kl",
        label="KL to the start model",
        meaning="k3 estimate per response token.",
        unit="nats",
        ranks="sum",
        mean_of=("kl", "response_tokens"),
        progress="kl {:.3g}",
        section="Policy",
        chart=True,
    ),
    Metric(
        name="policy/clip_frac",
        label="Clipped tokens",
        meaning="Share of response tokens that have an advantage and are clipped by `policy.loss`."
        " They have no gradient, except with cispo, which clips their ratio but keeps their"
        " gradient.",
        unit="%",
        ranks="sum",
        mean_of=("clipped", "response_tokens"),
        section="Policy",
        chart=True,
    ),
    Metric(
        name="policy/importance_masked_frac",
        label="Tokens outside policy.importance_mask",
        meaning="Share of response tokens left out because of pi_old / pi_sampler.",
        unit="%",
        ranks="sum",
        mean_of=("importance_masked", "response_tokens"),
    ),
    Metric(
        name="policy/tis_capped_frac",
        label="Tokens above policy.tis_cap",
        meaning="Share of response tokens whose pi_old / pi_sampler is above the cap.",
        unit="%",
        ranks="sum",
        mean_of=("tis_capped", "response_tokens"),
    ),
    Metric(
        name="policy/response_tokens",
        label="Response length",
        meaning="Mean number of response tokens of a turn.",
        unit="tokens",
    ),
    Metric(
        name="staleness/mean",
        label="Staleness",
        meaning="Mean age of the response tokens' weights, with `rollout.ahead`.",
        unit="updates",
    ),
    Metric(
        name="staleness/max",
        label="Largest staleness",
        meaning="Age of the oldest weights from which a response token was sampled.",
        unit="updates",
    ),
    Metric(
        name="optim/grad_norm",
        label="Gradient norm",
        meaning="Mean over optimizer steps, before clipping.",
        progress="grad {:.3g}",
        section="Policy",
        chart=True,
    ),
    Metric(
        name="optim/shared_tokens",
        label="Tokens shared with another sequence",
        meaning="Share of the training sequences' tokens that are computed only once, with another "
        "sequence of the forward pass (optim.share_prefixes).",
        unit="%",
        mean_of=("shared_tokens", "row_tokens"),
    ),
    Metric(
        name="health/groups_mixed",
        label="Mixed groups",
        meaning="Share of groups with both wins and losses, from which the policy learns.",
        unit="%",
        section="Policy",
        chart=True,
    ),
    Metric(
        name="health/valid_actions",
        label="Valid actions",
        meaning="Share of the turns whose response was well-formed.",
        unit="%",
        progress="valid {:.0%}",
        section="Policy",
    ),
    Metric(
        name="optim/lr",
        label="Learning rate",
        meaning="The learning rate of the update.",
        section="Policy",
    ),
)
CRITIC = (
    Metric(
        name="critic/loss",
        label="Value loss",
        meaning="Loss of PPO's critic; mean over optimizer steps.",
        ranks="sum",
        section="Critic",
        chart=True,
    ),
    Metric(
        name="critic/explained_variance",
        label="Explained variance",
        meaning="Share of the variance of the returns that the critic's values explain.",
        section="Critic",
        chart=True,
    ),
    Metric(
        name="critic/grad_norm",
        label="Gradient norm of the critic",
        meaning="Mean over optimizer steps, before clipping.",
        section="Critic",
    ),
    Metric(
        name="critic/clip_frac",
        label="Clipped values",
        meaning="Share of response tokens whose clipped loss is larger than the unclipped one.",
        unit="%",
        ranks="sum",
        section="Critic",
    ),
)
COST = (
    Metric(
        name="perf/tokens_per_s",
        label="Throughput",
        meaning="Prompt and response tokens of the update per second, "
        "not counting time spent saving.",
        unit="tokens/s",
        ranks="first",
        progress="{:,.0f} tok/s",
        section="Cost",
        chart=True,
    ),
    Metric(
        name="optim/gradient_frac",
        label="Tokens with a gradient, f",
        meaning="The head costs 1 + 2f passes.",
        unit="%",
        ranks="sum",
        mean_of=("with_gradient", "tokens"),
        section="Cost",
        chart=True,
    ),
    Metric(
        name="perf/peak_gib",
        label="Peak memory",
        meaning="Peak memory so far: of the GPU or, on a CPU, of the process.",
        unit="GiB",
        ranks="first",
        progress="{:.1f} GiB",
        section="Cost",
    ),
    Metric(
        name="perf/cached_frac",
        label="Cached prompt tokens",
        meaning="Share of the prompt tokens that were in the engine's cache.",
        unit="%",
        ranks="sum",
    ),
    Metric(
        name="time/rollout",
        label="Rollout",
        meaning="Playing the episodes.",
        unit="s",
        ranks="first",
        section="Cost",
    ),
    Metric(
        name="time/score",
        label="Scoring pass",
        meaning="Making samples, advantages, log-probs and the selection.",
        unit="s",
        ranks="first",
        section="Cost",
    ),
    Metric(
        name="time/update",
        label="Update",
        meaning="Computing gradients and taking optimizer steps.",
        unit="s",
        ranks="first",
        section="Cost",
    ),
    Metric(
        name="time/sync",
        label="Weight sync",
        meaning="Sending the weights to the engine.",
        unit="s",
        ranks="first",
        section="Cost",
    ),
    Metric(
        name="time/eval",
        label="Evaluation, when one ran",
        meaning="Playing the evaluation games.",
        unit="s",
        ranks="first",
        section="Cost",
    ),
    Metric(
        name="time/save",
        label="Training waited for a checkpoint",
        meaning="Logged with the update after the checkpoint.",
        unit="s",
        ranks="first",
        section="Cost",
    ),
)
HEALTH = (
    Metric(
        name="optim/skipped",
        label="Steps skipped, not finite",
        meaning="Optimizer steps skipped so far because the loss or gradient was not finite.",
        unit="running count",
        trouble="steps skipped {:.0f}",
        section="Health",
    ),
    Metric(
        name="health/env_failures",
        label="Environment failures",
        meaning="Training episodes whose environment or agent failed. "
        "They are left out of their group.",
        unit="count",
        ranks="sum",
        trouble="environment failures {:.0f}",
        section="Health",
    ),
    Metric(
        name="eval/failures",
        label="Environment failures in evaluation",
        meaning="Evaluation games that failed. They count as unsuccessful.",
        unit="count",
        ranks="sum",
        section="Health",
    ),
    Metric(
        name="health/groups_dropped",
        label="Groups dropped",
        meaning="Groups left out because fewer than two episodes remained.",
        unit="count",
        trouble="groups dropped {:.0f}",
        section="Health",
    ),
    Metric(
        name="health/threads_lost",
        label="Threads lost to environments that hang",
        meaning="Calls abandoned after `env.step_timeout_s`. Each costs a thread.",
        unit="count",
        ranks="sum",
        trouble="threads lost {:.0f}",
        section="Health",
    ),
    Metric(
        name="health/processes_lost",
        label="Processes of environments lost",
        meaning="Workers of `env.processes` that died or hung.",
        unit="count",
        ranks="sum",
    ),
    Metric(
        name="health/rewards_failed",
        label="Episodes that could not be rewarded",
        meaning="Episodes lost because your own reward or the judge failed.",
        unit="count",
        ranks="sum",
    ),
    Metric(
        name="health/prompts_truncated",
        label="Prompts truncated",
        meaning="Prompts that were longer than `rollout.max_prompt_tokens`.",
        unit="count",
        ranks="sum",
    ),
    Metric(
        name="health/texts_cut",
        label="Texts cut",
        meaning="Texts of environments that were longer than `env.max_text`.",
        unit="count",
        ranks="sum",
    ),
    Metric(
        name="health/groups_refilled",
        label="Groups replaced",
        meaning="Groups whose returns are all equal, replaced because of `rollout.refill`.",
        unit="count",
    ),
    Metric(
        name="health/sampler_mismatch",
        label="Sampler mismatch, largest",
        meaning="Largest difference between the trainer's and the sampler's log-prob of a token.",
        unit="nats",
        section="Health",
    ),
    Metric(
        name="health/sampler_mismatch_mean",
        label="Sampler mismatch, mean",
        meaning="Mean difference between the trainer's and the sampler's log-prob of a token.",
        unit="nats",
        section="Health",
    ),
)
METRICS = (*EPISODES, *EVALUATION, *LOSSES, *POLICY, *CRITIC, *COST, *HEALTH)
"""All metrics, in the order in which they are shown."""


def page() -> str:
    """Return the text of docs/metrics.md."""
    rows = ["| metric | what | meaning | ranks | shown |", "|---|---|---|---|---|"]
    for metric in METRICS:
        label = metric.label
        if metric.unit == "%":
            label += " (share)"
        elif metric.unit:
            label += f" ({metric.unit})"

        places = []
        if metric.progress or metric.trouble:
            places.append("line")
        if metric.section:
            places.append("report")
        rows.append(
            f"| `{metric.name}` | {label} | {metric.meaning} | {metric.ranks} "
            f"| {', '.join(places)} |"
        )
    return PAGE_HEADING + "\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
