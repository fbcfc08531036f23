"""Agents decide how a model plays. Each is a coroutine `agent(env, model)` (docs/agents.md)."""
