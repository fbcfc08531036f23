"""Domains, tasks and splits, as `tau2.registry.Registry` answers for them."""

from pydantic import BaseModel

SPLITS = {
    "train": [str(i) for i in range(8)],
    "test": ["8", "9", "10", "11"],
    "full": ["0", "not in base"],
}


class Task(BaseModel):
    id: str
    user_scenario: str


class Registry:
    def get_domains(self):
        return ["mock", "retail", "retail-workflow"]

    def get_task_sets(self):
        return ["mock", "retail", "telecom_full"]

    def get_tasks_loader(self, name):
        count = {"retail": 12, "mock": 3}[name]

        def get_tasks(task_split_name="base"):
            return [Task(id=str(i), user_scenario=f"cancel order {i}") for i in range(count)]

        return get_tasks

    def get_task_splits_loader(self, name):
        return (lambda: SPLITS) if name == "retail" else None


registry = Registry()
