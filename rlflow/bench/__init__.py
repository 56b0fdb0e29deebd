"""What recorded observations allow to say: which cell is faster, which learns better, and whether a run left its trusted history.

Not here: how a run is prepared and carried out (`rlflow.runs`), and what one run shows of itself (`rlflow.watch`)."""
