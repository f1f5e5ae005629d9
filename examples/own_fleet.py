"""Your own fleet: speeds, links and times online from a table of devices, instead of a fleet that is drawn."""

import csv
from pathlib import Path

from safa import simulate

# A row is a device: mini-batches per second, Mbit/s down and up, and when it is online, in hours from the start.
with Path(__file__).with_name("devices.csv").open(encoding="utf-8") as file:
    devices = list(csv.DictReader(file))
speeds = [float(device["speed"]) for device in devices]
links = [(float(device["down_mbps"]), float(device["up_mbps"])) for device in devices]
trace = [
    (client, 3600 * float(device["online_from_h"]), 3600 * float(device["online_until_h"]))
    for client, device in enumerate(devices)
]  # a device may have several rows, one for each time that it is online

# The same fleet twice: as the table says, and as if everybody were always online. A larger model takes longer to send.
fleet = {"clients": len(devices), "speeds": speeds, "links": links, "model_size_mb": 50, "crash_rate": 0.1}
for what, online in {"online as the table says": trace, "always online": None}.items():
    run = simulate("digits", protocol="safa", fraction=0.4, rounds=25, seed=0, trace=online, **fleet)
    merged = dict.fromkeys(range(len(devices)), 0)
    for record in run.records():
        for client in record.picked.tolist():
            merged[client] += 1
    print(f"{what}: accuracy {run.summary['last_accuracy']:.2f} after {run.summary['virtual_time_s'] / 3600:.1f} hours")
    print("  rounds in which each was picked:")
    for client, device in enumerate(devices):
        print(f"    {device['device']:9} {merged[client]:3} {'#' * merged[client]}")
