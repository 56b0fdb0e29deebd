"""A search agent: what the model says first is looked up together with its question; it answers when it has read what was found."""

import json
import urllib.request

from rlflow import Turn


class Lookup:
    def __init__(self, *, retriever: str, topk: int = 1):
        self.retriever, self.topk, self.question, self.found = retriever, topk, "", None

    def reset(self, prompt, *, seed):
        self.question = prompt

    def step(self, said):
        if self.found is not None:
            return Turn(done=True)
        body = json.dumps({"query": f"{self.question} {said}", "topk": self.topk, "return_scores": True}).encode()
        request = urllib.request.Request(self.retriever, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            self.found = [each["document"]["contents"] for each in json.load(answer)["result"][0]]
        return Turn(says=f" {' '.join(self.found)} . {self.question}", log={"passages": len(self.found)})
