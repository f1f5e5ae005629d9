"""Stop at a target: end a run when it is good enough, when it no longer gets better, or when its time is over."""

import safa
from safa.server import Server

# 1. A target, which is kept with the settings of the run. It has to be held for three evaluations in a row, so that one
#    lucky round is not enough; the time that counts is that of the first of the three.
run = safa.simulate("digits", protocol="fedavg", seed=0, rounds=100, until="accuracy=0.85,held=3")
summary = run.summary
print(f"target: reached in round {summary['rounds_to_target']}, after {summary['time_to_target_s'] / 60:.0f} minutes;")
print(f"        the run ended after round {len(list(run.records()))} of {run.settings.rounds}")
print(f"        and moved {summary['bytes_to_target'] / 1e6:.0f} MB until then")

# 2. A limit of time, in seconds of device time: the run ends before the first round that would close later.
run = safa.simulate("digits", protocol="fedavg", seed=0, rounds=100, time_limit_s=1200)
print(f"time:   accuracy {run.summary['last_accuracy']:.2f} after {run.summary['virtual_time_s'] / 60:.1f} minutes")


# 3. Any rule of your own, as a callback: return true, and the run ends there, with a summary and a model.
class Patience:
    """Ends a run whose loss has not been at its lowest for so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round(self, record: safa.RoundRecord, server: Server) -> bool:
        """Called when a round is finished and written."""
        losses = [score["loss"] for score in server.metrics.scores]
        return len(losses) - 1 - losses.index(min(losses)) >= self.rounds


run = safa.simulate("digits", protocol="fedavg", seed=0, rounds=100, callbacks=[Patience(2)])
print(f"rule:   ended after round {len(list(run.records()))}, best loss {run.summary['best_loss']:.2f}")
