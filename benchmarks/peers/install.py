"""Makes an environment of its own for every framework, with exact versions and a torch for the CPU.

    python benchmarks/peers/install.py [NAME ...] [--envs FOLDER]

`environments/NAME.txt` names every package, so that nothing is resolved and no framework replaces torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENTS = Path(__file__).parent / "environments"
NAMES = sorted(path.stem for path in ENVIRONMENTS.glob("*.txt"))
DEFAULT = Path.home() / ".cache" / "safa-peers"
TORCH = "torch==2.13.0"


def install(name: str, envs: Path) -> None:
    """Make an environment, or bring one up to date."""
    venv.create(envs / name, with_pip=True)
    pip = [str(envs / name / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--no-deps", "--requirement", str(ENVIRONMENTS / f"{name}.txt")], check=True)


def main() -> None:
    """Install those that are named, or all; those that fail are named at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all without")
    parser.add_argument("--envs", type=Path, default=DEFAULT)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"there is no framework {', '.join(sorted(unknown))}; there is {', '.join(NAMES)}")
    failed = []
    for name in arguments.names or NAMES:
        print(f"{name} into {arguments.envs / name}", flush=True)
        try:
            install(name, arguments.envs)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name} ({error})")
    if failed:
        sys.exit(f"not installed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
