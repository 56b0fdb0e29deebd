"""The bytes of a batch: the one format in which rows travel between processes and are saved in checkpoints.

`column_wire` writes and reads the format, and `header` describes it. `row_bytes` also narrows integers, and
notes which rank of a pool each row was on.
"""
