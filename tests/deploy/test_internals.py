"""What is used of Flower beyond its documented interface: it is there, it stands in one module, and a lack is said."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from flwr.supercore import date

from safa.cli.program import main
from safa.deploy.flower import internals
from safa.deploy.flower.internals import NEEDED, TESTED, check_flower
from safa.errors import SafaError

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "src" / "safa" / "deploy"
DOCUMENTED = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
NETWORK = {"flwr", "httpx", "uvicorn", "socket", "ssl", "http", "asyncio"}


def imports(file: Path) -> set[str]:
    """The modules that a file imports, at any place."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_the_installed_version_is_a_tested_one() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["deploy"]
    assert extra == [f"flwr{TESTED}"]
    least, below = (tuple(map(int, bound.lstrip("<>=").split("."))) for bound in TESTED.split(","))
    assert least <= tuple(map(int, version("flwr").split("."))) < below
    check_flower()


def test_a_missing_name_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delattr(date, "now")
    sentence = f"Flower {version('flwr')} has no flwr.supercore.date.now, which safa deploy needs: use flwr{TESTED}"
    with pytest.raises(SafaError) as raised:
        check_flower()
    assert str(raised.value) == sentence
    for command in ("local boston", "server boston --insecure", "client --server h:1 --name a --state s --insecure"):
        assert main(["deploy", *command.split()]) == 2
        assert capsys.readouterr().err == f"safa: {sentence}\n"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("flwr.no_such_module", "name"),
        ("flwr.supercore.run", "NoSuchException"),
        ("flwr.proto.fleet_pb2", "NoSuchRequest"),
        ("flwr.superlink.grid.http_grid", "HttpGrid._no_such_client"),
    ],
)
def test_names_are_looked_up_without_loading_flower(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "NEEDED", NEEDED | {module: (name,)})
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("flwr.")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(SafaError, match=f"has no {module}.{name}, which"):
        check_flower()
    assert not [loaded for loaded in sys.modules if loaded.startswith("flwr.")]


def test_only_one_module_uses_what_flower_does_not_document() -> None:
    for file in DEPLOY.rglob("*.py"):
        undocumented = {module for module in imports(file) if module.split(".")[0] == "flwr"} - DOCUMENTED
        assert not undocumented, f"{file} imports {undocumented}"
        if file.name != "internals.py":
            text = file.read_text(encoding="utf-8")
            assert "_runtime_client" not in text
            assert "_retry_invoker" not in text


def test_the_exchange_has_no_network_and_no_deployment_a_simulator() -> None:
    for file in DEPLOY.rglob("*.py"):
        found = imports(file)
        if file.parent.name == "exchange":
            assert not {module.split(".")[0] for module in found} & NETWORK, file
            assert not {m for m in found if m.startswith(("safa.deploy.flower", "safa.deploy.launcher"))}, file
        if file.parent.name == "flower":
            assert not {module for module in found if module.startswith("safa.deploy.launcher")}, file
        assert not {module for module in found if module.startswith("safa.simulation")}, file


def test_a_device_imports_neither_server_nor_simulator() -> None:
    """Nothing on the way from the client app, the package `safa` itself apart, which offers all of it."""
    left, seen = ["safa.deploy.flower.client_app"], set[str]()
    while left:
        module = left.pop()
        path = ROOT.joinpath("src", *module.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if module not in seen and module != "safa" and file.is_file():
            seen.add(module)
            left += [found for found in imports(file) if found.startswith("safa.")] + [module.rpartition(".")[0]]
    assert "safa.training" in seen
    assert not {module for module in seen if module.startswith(("safa.server", "safa.simulation", "safa.experiments"))}
