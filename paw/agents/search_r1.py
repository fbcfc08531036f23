"""The agent of Search-R1 (arXiv 2503.09516). It writes one response, continued after each search.

Generation stops at </search>. The results are appended between <information> tags, and the response
continues there.
"""

import re

from paw.rollouts.episode import EnvHandle, Model

# The paper's template, as in the reference code (scripts/data_process/nq_search.py).
PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every "
    "time you get new information. After reasoning, if you find you lack some knowledge, you can "
    "call a search engine by <search> query </search> and it will return the top searched results "
    "between <information> and </information>. You can search as many times as your want. If you "
    "find no further external knowledge needed, you can directly provide the answer inside "
    "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing "
    "</answer>. "
    "Question: {question}\n"
)
AGAIN = (
    "\nMy action is invalid. To search, I put the query between <search> and </search>. To answer, "
    "I put the answer between <answer> and </answer>. I try again.\n"
)
STOP = ("</search>", "</answer>")
ACTION = re.compile(r"<(search|answer)>((?:(?!<search>|<answer>).)*)\Z", re.S)


async def search_r1(env: EnvHandle, model: Model) -> None:
    """Play an episode of the search environment."""
    await env.reset()
    question = env.instruction.strip()
    if not question.endswith("?"):
        question += "?"
    text = PROMPT.format(question=question)
    response = None
    while not env.done:
        response = await model.generate(text, stop=STOP, continues=response)
        match = ACTION.search(response)
        if match is None:
            outcome = await env.step(response)
            text = outcome.observation or AGAIN
            continue

        verb = match[1]
        content = match[2].strip()
        outcome = await env.step(await env.format_action(f"{verb}[{content}]"))
        information = outcome.observation
        if "<information>" not in information:
            information = f"<information>{information}</information>"
        closing_tag = "" if response.stop else f"</{verb}>"
        text = f"{closing_tag}\n\n{information}\n\n"
