"""Calls of a stage to a pool: in every case each row gets its own values from all workers."""

from collections import Counter

import pytest
import torch

from rlflow.benchmarks.peers.dispatch import CASES, HALF, POOL, System, payload

FLAGS = {"workers": 2, "rows": 8, "tokens": 5, "calls": 3, "iterations": 2}


def test_the_payload_has_nine_columns_and_equal_rows():
    batch = payload(3, 4)
    assert len(batch.columns) == 9
    assert {tuple(batch[name].shape) for name in batch.columns} == {(3, 4)}
    assert Counter(batch[name].dtype for name in batch.columns) == {torch.int64: 1, torch.float32: 8}


def test_an_unknown_case_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no case 'stay'; expected one of stays, moves, touched, returned"):
        System().prepare({"flags": {**FLAGS, "case": "stay"}}, str(tmp_path), 0)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_every_case_gives_each_row_its_own_values(case, tmp_path):
    system = System()
    try:
        assert system.prepare({"flags": {**FLAGS, "case": case}}, str(tmp_path), 0) == {"iterations": 2}
        result, values = system.call(), system.batch["values"]
        if case == "returned":
            assert torch.equal(result["values"], values)
        else:
            column = result.data["values"]
            assert {shard.at.pool for shard in column.layout.shards} == {POOL}
            assert len({shard.at.rank for shard in column.layout.shards}) == FLAGS["workers"]
            assert torch.equal(system.roles.prepared.engine.fetch(result)["values"], values)
        system.moved()  # resets the count of bytes
        turn = system.iterate(5)
        assert [row["tokens"] for row in turn["iterations"]] == [3 * 8 * 5] * 2
        there, back = 3 * 8 * 5 * 9 * 4, 3 * 8 * 5 * 4  # int64 columns are sent as int32
        # one of the two workers had half of the rows already
        least = {"stays": 0, "moves": there // 2, "touched": there, "returned": there + back}[case]
        for row in turn["iterations"]:
            # plus headers of two or four frames per call
            assert least <= row["bytes"] <= (least + 3 * 2 * 2 * 1200 if least else 0)
        assert turn["ended"]
        assert (HALF in system.roles.prepared.engine.pools) is (case == "moves")
    finally:
        system.close()
