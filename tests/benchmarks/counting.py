"""A system for tests: its iterations take no time; settings and iteration numbers give tokens and metrics."""

import time
from pathlib import Path


class System:
    def prepare(self, cell, folder, seed):
        self.flags, self.seed, self.number, self.folder = cell["flags"], seed, 0, Path(folder)
        if self.flags.get("fails") == "prepare":
            raise ValueError("no such model")
        if not (self.folder.parents[2] / self.flags.get("fails_without", "")).exists():
            raise ValueError("not mended yet")
        others = [
            path
            for path in self.folder.parents[1].glob("*/seed-*/begun")
            if not path.with_name("closed").exists()
        ]
        if self.flags.get("alone") and others:
            raise ValueError(f"{others[0]} is loaded too")
        (self.folder / "begun").touch()
        return {"iterations": self.flags["iterations"]}

    def iterate(self, count):
        rows = []
        for _ in range(min(count, self.flags["iterations"] - self.number)):
            if self.flags.get("fails") == self.number:
                raise RuntimeError(f"iteration {self.number} does not work")
            if self.flags.get("hangs") == self.number:
                time.sleep(1000)
            rows.append(
                {
                    "iteration": self.number,
                    "wall": self.flags["seconds"],
                    "tokens": self.flags.get("tokens", 10),
                    "metrics": {},
                }
            )
            self.number += 1
        value = self.flags.get("learns", 0.0) * self.number + 0.001 * self.seed
        ended = self.number == self.flags["iterations"]
        evaluations = [{"iteration": self.number, "metrics": {"evaluation/sampled": value}}] if rows else []
        print("what a system prints is no answer")
        return {"iterations": rows, "evaluations": evaluations, "ended": ended}

    def observe(self):
        return {"fates": "trained", "closes": self.flags.get("closes", True)}

    def close(self):
        (self.folder / "closed").touch()
