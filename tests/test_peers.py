"""The comparison with other frameworks: that safa does the plain loop's job, and what the table makes of results."""

import json
from pathlib import Path

import numpy as np
import pytest

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


@pytest.mark.parametrize("model", ["svm", "logistic"])
def test_safa_and_the_plain_loop_come_to_the_same_model(model: str) -> None:
    import run_plain
    import run_safa
    from jobs import Job, Rounds, flat

    job = Job(model, clients=6, samples=25, batch_size=10, epochs=2, cohort=6, lr=0.1, rounds=3)
    models = {}
    for runner in (run_plain, run_safa):
        rounds = Rounds(limit_s=60.0)
        models[runner.__name__] = flat(runner.run(job, rounds))
        assert len(rounds.ends) == job.rounds
    np.testing.assert_allclose(models["run_safa"], models["run_plain"], rtol=0, atol=1e-6)
    assert np.abs(models["run_plain"] - flat(job.start_model().state_dict())).max() > 1e-2


def test_a_row_scales_to_the_whole_job_and_says_so(tmp_path: Path) -> None:
    from compare import Comparison, row
    from jobs import JOBS

    common = {"name": "tiny", "loss_before": 1.0, "loss_after": 0.5, "memory_mb": 300.0, "start_s": 2.0, "how": "here"}
    whole, part = (vars(job) for job in (JOBS["tiny"], JOBS["tiny"].smaller()))
    results = [
        {"peer": "safa", "repeat": 0, "job": whole, "rounds": 4, "updates_per_s": 1e5, "difference": 1e-6},
        {"peer": "other", "repeat": 0, "job": part, "rounds": 2, "updates_per_s": 1e3, "difference": None},
        {"peer": "third", "repeat": 0, "error": "time"},
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(common | result) + "\n" for result in results))
    comparison = Comparison(file, tmp_path, 300.0)
    assert row(comparison, "tiny", "other") == (
        "| other | 10.000 | 1,000 | 100.0 | 300 | 2.0 | 1.000 to 0.500 | - "
        "| here, 2 rounds, then time was up, 1,000 clients, scaled, 1 run(s) |"
    )
    assert row(comparison, "tiny", "third") == "| third | time | | | | | | | |"
