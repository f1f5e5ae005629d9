"""Quick start: train a model with SAFA on a simulated fleet, see what happened, and write a page of it."""

import safa

# Twenty devices that differ in speed, and crash now and then, learn to read digits; the data come with the package.
# A round ends when three tenths of them have sent an update. All else has a default; docs/python.md has the list.
run = safa.simulate("digits", protocol="safa", fraction=0.3, rounds=30, seed=0)

# The summary has the metrics of the whole run. Times are those of the simulated devices.
summary = run.summary
print(f"accuracy {summary['last_accuracy']:.2f} after {summary['virtual_time_s'] / 60:.0f} minutes of device time")
print(f"{summary['futility']:.0%} of the local work was thrown away")
print(f"{summary['starved']:.0%} of the devices were left out")

# A record says of a round who was picked, who crashed, how long it took, and how good the model was then.
print("\nround  minutes  picked  crashed  accuracy")
for record in list(run.records())[::5]:
    print(
        f"{record.round:5}  {record.closed_s / 60:7.1f}  {len(record.picked):6}  {len(record.crashed):7}  "
        f"{record.metrics['accuracy']:8.2f}"
    )

# The page opens in any browser, without a network. In a notebook, `run` shows itself and `run.plot()` draws the curve.
print("\nwritten:", safa.write_report(run, "quick-start.html"))
