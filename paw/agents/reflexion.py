"""Reflexion (arXiv 2303.11366): after a failed trial the model writes a new plan, and tries again with the last plans.

The result is that of the last trial, so an episode is won if any of agent.trials was: more chances than other agents
get. Whether a trial succeeded is told by the environment, as in the paper.
"""

from paw.agents.episode import Episode
from paw.agents.react import REASONING, React
from paw.config import Config

REFLECT = """Below is the transcript of an attempt at a task, which failed. Do not retell it: think about the strategy \
behind it and about where it went wrong. Then make a concise new plan that avoids the mistake, naming the actions that \
should be taken instead. It is for the next attempt at the same task.

{transcript}
STATUS: FAIL
{past}
New plan:"""
MEMORY = "Plans that you made after failed attempts at the task below:\n{plans}"


class Reflexion:
    def __init__(self, config: Config) -> None:
        self.react, self.trials, self.memory = React(config), config.agent.trials, config.agent.memory

    def play(self, episode: Episode) -> None:
        for trial in range(self.trials):
            plans = listed(episode.plans[-self.memory :])
            transcript = self.react.trial(episode, MEMORY.format(plans=plans) if plans else "")
            if episode.won or trial + 1 == self.trials:
                return
            past = f"\nPlans from past attempts:\n{plans}\n" if plans else ""
            reply = episode.say(REFLECT.format(transcript=transcript, past=past))
            episode.plans.append(REASONING.sub("", reply.text).rpartition("New plan:")[2].strip())


def listed(plans: list[str]) -> str:
    return "\n".join(f"Trial {i}: {plan}" for i, plan in enumerate(plans, start=1))
