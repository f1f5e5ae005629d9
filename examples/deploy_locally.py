"""Deploy locally: the server and three clients as real processes of this machine, with TLS and a key each.

It needs Flower (`pip install 'safa[deploy]'`) and takes about half a minute: Flower starts a process for every update.
"""

import subprocess
import sys

import safa

# The same as `safa deploy local ...` in a shell. The server, its settings and its folder are those of a simulation;
# docs/deploy.md goes from here to servers and devices on machines of their own.
command = "deploy local --task boston --clients 3 --rounds 2 --fraction 0.5 --out runs/trial --force --quiet"
subprocess.run([sys.executable, "-m", "safa", *command.split()], check=True)

# It leaves an ordinary run: read it, plot it, or write its page with `safa report runs/trial`.
run = safa.load_run("runs/trial")
print("clients:", ", ".join(sorted(member["name"] for member in run.roster() or [])))
print("rounds:", len(list(run.records())))
for record in run.records():
    print(f"round {record.round}: {len(record.picked)} updates picked, the model is at version {record.version}")

# How long everything took differs from run to run, and with it who was picked. But the records say all that a model
# depends on: trained again from them, it is the same model.
again = safa.replay(run)
equal = all(bool((again[name] == tensor).all()) for name, tensor in run.model().items())
print("trained again from the records, the model is", "the same" if equal else "another one")
