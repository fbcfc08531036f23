"""A tool, of a server of its own that all episodes share."""

import verifiers.v1 as vf

YEARS = {"Emma": 1815, "Ulysses": 1922, "Dracula": 1897, "Walden": 1854}


class Books(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    def year(self, title: str) -> str:
        """The year in which a book appeared."""
        return (
            f"{title} appeared in {YEARS[title]}."
            if title in YEARS
            else f"There is no book {title}."
        )


class Data(vf.TaskData):
    answer: int


class Ask(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)


class Config(vf.TasksetConfig):
    split: str = "train"


class Library(vf.Taskset[Ask, Config]):
    def load(self):
        for title, year in YEARS.items():
            if (year > 1900) == (self.config.split == "test"):
                yield Ask(Data(prompt=f"When did {title} appear?", answer=year), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Books(vf.SharedToolsetConfig())]


__all__ = ["Library"]

if __name__ == "__main__":
    Books.run()
