"""Search-R1's way to play (arXiv 2503.09516): one answer that the model goes on writing, searches included.

Generation stops at </search>; what was found is appended between <information> tags, and the answer goes on from there.
"""

import re

from paw.agents.episode import Episode

# The paper's template, as the reference code has it (scripts/data_process/nq_search.py).
PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)
AGAIN = (
    "\nMy action is invalid. To search, I put the query between <search> and </search>. To answer, I put the answer "
    "between <answer> and </answer>. I try again.\n"
)
STOP = ("</search>", "</answer>")
ACTION = re.compile(r"<(search|answer)>((?:(?!<search>|<answer>).)*)\Z", re.S)


class SearchR1:
    def play(self, episode: Episode) -> None:
        episode.reset()
        environment, text = episode.environment, ""
        question = environment.task.strip()
        prompt = PROMPT.format(question=question if question.endswith("?") else f"{question}?")
        while not episode.done:
            said = episode.say(prompt, start=text, stop=STOP).text
            found = ACTION.search(said)
            if found is None:
                outcome = episode.step(said)
                text += said + (outcome.observation or AGAIN)
                continue
            verb, content = found[1], found[2].strip()
            outcome = episode.step(environment.format_action(f"{verb}[{content}]"), said=f"{said}</{verb}>")
            seen = outcome.observation
            if "<information>" not in seen:
                seen = f"<information>{seen}</information>"
            text += f"{said}</{verb}>\n\n{seen}\n\n"
