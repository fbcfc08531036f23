"""Search-R1's way to play (arXiv 2503.09516): one answer that the model goes on writing, searches included.

Generation stops at </search>; what was found is appended between <information> tags, and the answer goes on from there.
"""

import re

from paw.rollouts.episode import EnvHandle, Model

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


async def search_r1(env: EnvHandle, model: Model) -> None:
    await env.reset()
    question = env.instruction.strip()
    text, response = PROMPT.format(question=question if question.endswith("?") else f"{question}?"), None
    while not env.done:
        response = await model.generate(text, stop=STOP, continues=response)
        found = ACTION.search(response)
        if found is None:
            outcome = await env.step(response)
            text = outcome.observation or AGAIN
            continue
        verb, content = found[1], found[2].strip()
        outcome = await env.step(await env.format_action(f"{verb}[{content}]"))
        seen = outcome.observation
        if "<information>" not in seen:
            seen = f"<information>{seen}</information>"
        text = f"{'' if response.stop else f'</{verb}>'}\n\n{seen}\n\n"
