"""The records of a run as data frames."""

from __future__ import annotations

import math
import sys
from dataclasses import fields

import numpy as np
import pytest

from safa import RoundRecord, Run, simulate
from safa.analysis.client_map import lag
from safa.errors import SafaError


@pytest.fixture(scope="module")
def run() -> Run:
    return simulate("boston", rounds=12, seed=3, crash_rate=0.5, lag_tolerance=1, eval_every=5)


def test_a_row_a_round(run: Run) -> None:
    frame, records = run.to_pandas(), list(run.records())
    assert len(frame) == len(records) == 12
    scalars = {item.name for item in fields(RoundRecord) if str(item.type) in ("int", "float")}
    for name in (*scalars, "length_s"):
        assert frame[name].tolist() == [getattr(record, name) for record in records], name
    for name in ("picked", "undrafted", "refused", "crashed", "deprecated", "sent"):
        assert frame[name].tolist() == [len(getattr(record, name)) for record in records], name
    assert frame.ended_by.tolist() == [record.ended_by.value for record in records]
    evaluated = frame.dropna(subset=["loss"])
    assert evaluated["round"].tolist() == [record.round for record in records if record.loss is not None]
    assert evaluated.accuracy.tolist() == [record.metrics["accuracy"] for record in records if record.metrics]


def test_a_row_an_update(run: Run) -> None:
    frame, records = run.updates(), list(run.records())
    assert len(frame) == sum(len(record.client) for record in records)
    for record in records:
        rows = frame[frame["round"] == record.round]
        for name in ("client", "base", "arrival_s", "weight", "into", "work"):
            assert np.array_equal(rows[name], getattr(record, name)), name
        assert np.array_equal(rows.lag, lag(record))
        for verdict in ("picked", "undrafted", "refused"):
            assert rows.client[rows.verdict == verdict].tolist() == getattr(record, verdict).tolist()
        assert ((rows.refusal != "none") == (rows.verdict == "refused")).all()


def test_a_run_without_training_has_no_scores() -> None:
    frame = simulate("boston", rounds=2, train=False).to_pandas()
    assert all(map(math.isnan, frame.loss))
    assert "accuracy" not in frame


def test_without_pandas_it_is_a_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for frame in (run.to_pandas, run.updates):
        with pytest.raises(SafaError, match=r"pandas, which is not installed: pip install 'safa\[pandas\]'"):
            frame()
