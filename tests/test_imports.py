"""Which module may import which: every layer imports only from layers before it, so that no two import each other."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import safa

SOURCE = Path(__file__).parent.parent / "src"
STANDARD = set(sys.stdlib_module_names)
SHARED = {"errors", "vocabulary", "streams", "cache", "cluster"}
"""Top-level modules that every layer may import."""


@dataclass(frozen=True)
class Layer:
    """What the modules of a layer may import, besides each other, the standard library and the shared modules."""

    layers: frozenset[str] = frozenset()
    """Layers, or single modules of a layer, as "layer.module"."""
    packages: frozenset[str] = frozenset()
    """Packages of others."""


def layer(layers: Iterable[str] = (), packages: str = "") -> Layer:
    return Layer(frozenset(layers), frozenset(packages.split()))


SIMULATED = ["protocol", "analysis", "tasks", "aggregation", "runs", "fleet", "training", "server", "simulation"]
DEPLOYED = ["protocol", "tasks", "aggregation", "runs", "fleet", "training", "server"]

LAYERS: dict[str, Layer] = {
    "errors": layer(),
    "vocabulary": layer(),
    "streams": layer(packages="numpy"),
    "cache": layer(packages="numpy"),
    "cluster": layer(packages="ray"),
    "protocol": layer(packages="numpy"),
    "analysis": layer(["protocol.records"], "numpy"),
    "tasks": layer(packages="numpy torch pooch requests tqdm"),
    "aggregation": layer(["protocol.records"], "numpy torch"),
    "runs": layer(["protocol", "analysis", "tasks", "aggregation.registry"], "numpy torch safetensors pandas altair"),
    "fleet": layer(["runs.settings"], "numpy"),
    "training": layer(["tasks", "runs.settings", "runs.schedule"], "numpy torch triton"),
    "server": layer(["protocol", "analysis", "tasks", "aggregation", "runs", "training"], "numpy torch"),
    "simulation": layer(["fleet", "server", "protocol", "runs.settings"], "numpy"),
    "report": layer(["analysis", "runs", "fleet", "protocol.records"], "numpy altair vl_convert starlette uvicorn"),
    "trackers": layer(["analysis", "runs", "server", "protocol.records", "report"], "tensorboard mlflow wandb"),
    "experiments": layer([*SIMULATED, "trackers"], "numpy pandas torch altair"),
    "deploy": layer(),
    "deploy.exchange": layer(DEPLOYED, "numpy torch safetensors"),
    "deploy.flower": layer([*DEPLOYED, "deploy"], "numpy torch flwr httpx uvicorn"),
    "deploy.launcher": layer([*DEPLOYED, "deploy"], "numpy cryptography flwr httpx uvicorn"),
    "testing": layer(["protocol", "aggregation"], "numpy torch"),
    "bench": layer([*SIMULATED, "experiments", "report"], "numpy torch altair"),
    "paper": layer([*SIMULATED, "experiments", "deploy", "report", "testing"], "numpy torch altair"),
    "__init__": layer(["analysis", "protocol.records", "tasks", "runs", "simulation", "experiments", "report"]),
    "cli": layer(
        [*SIMULATED, "experiments", "deploy", "report", "trackers", "testing", "bench", "paper", "__init__"],
        "rich torch safetensors",
    ),
    "__main__": layer(["cli"]),
}
"""The layers in order: folders of `safa`, parts of `deploy`, and the modules at the top."""

# To be removed: what still breaks the table.
EXCEPTIONS: dict[str, set[str]] = {
    "safa.fleet.faults": {"safa.protocol.records"},
}  # fmt: skip
"""Module -> the modules that it imports and should not. One that is no longer needed fails a test."""

SHOWN: dict[str, set[str]] = {
    "safa.runs.folder": {"safa.report.cards", "safa.report.plots"},
    "safa.experiments.results": {"safa.report.cards", "safa.report.plots"},
}  # fmt: skip
"""Module -> the modules of a later layer that its methods import when they are called, and it may not import otherwise.

A notebook asks the object itself to show itself (`_repr_html_`, `plot`), so that the object has to know who draws it.
Nothing of the report is loaded before, and nothing that it computes comes back into a run.
"""
ALLOWED = {module: EXCEPTIONS.get(module, set()) | SHOWN.get(module, set()) for module in {*EXCEPTIONS, *SHOWN}}

IMPURE = {"random", "time", "datetime", "os", "io", "pathlib", "socket", "asyncio", "threading", "secrets"}


def name_of(file: Path) -> str:
    """The dotted name of a module, such as "safa.protocol.records"; that of a package ends in "__init__"."""
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts)


MODULES: dict[str, Path] = {name_of(file): file for file in sorted((SOURCE / "safa").rglob("*.py"))}


def layer_of(module: str) -> str | None:
    """The layer of a module of `safa`, by the longest name in the table that it begins with."""
    parts = module.removeprefix("safa.").split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in LAYERS), None)


def resolved(module: str) -> str:
    """The name of an imported module, as in `MODULES`: a package of `safa` is its `__init__`."""
    return f"{module}.__init__" if f"{module}.__init__" in MODULES else module


def imports(text: str) -> set[str]:
    """All modules that a source imports: at the top, in functions, and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {resolved(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are by absolute paths"
            found |= {_imported_from(node.module or "", alias.name) for alias in node.names}
    return found


def _imported_from(module: str, name: str) -> str:
    """`from safa.report import figures` imports a module, `from safa.report import render` imports from one."""
    inner = resolved(f"{module}.{name}")
    return inner if inner in MODULES else resolved(module)


IMPORTS: dict[str, set[str]] = {module: imports(file.read_text(encoding="utf-8")) for module, file in MODULES.items()}


def forbidden(module: str, imported: Iterable[str]) -> set[str]:
    """Which of the imported modules the table does not allow."""
    own = layer_of(module)
    assert own is not None, f"{module} is in no layer"
    allowed = {f"safa.{name}" for name in LAYERS[own].layers | SHARED | {own}} | LAYERS[own].packages | STANDARD
    return {name for name in imported if not any(name == one or name.startswith(f"{one}.") for one in allowed)}


def between_layers() -> dict[str, set[str]]:
    """Folder or top-level module -> those that it imports, leaving out the exceptions."""
    graph: dict[str, set[str]] = {}
    for module, imported in IMPORTS.items():
        others = {name for name in imported - ALLOWED.get(module, set()) if name.startswith("safa.")}
        graph.setdefault(_folder(module), set()).update(map(_folder, others))
    return {name: others - {name} for name, others in graph.items()}


def _folder(module: str) -> str:
    return module.removeprefix("safa.").partition(".")[0]


def cycle_in(graph: Mapping[str, Iterable[str]]) -> str:
    """A cycle of a graph, as text; nothing where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def loaded_by(code: str) -> set[str]:
    """The modules that are loaded after a piece of code."""
    program = f"import sys\n{code}\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_module_is_in_a_layer_and_every_layer_has_modules() -> None:
    assert [module for module in MODULES if layer_of(module) is None] == []
    assert {layer_of(module) for module in MODULES} == LAYERS.keys()


def test_every_folder_is_a_package() -> None:
    folders = {file.parent for file in MODULES.values()}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_a_layer_may_import_only_from_those_before_it() -> None:
    before: set[str] = set()
    for name, one in LAYERS.items():
        assert {_folder(other) for other in one.layers} <= before | {_folder(name)}, (
            f"{name} imports from a later layer"
        )
        before.add(_folder(name))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_imports_only_what_it_may(name: str) -> None:
    for module in (module for module in MODULES if layer_of(module) == name):
        wrong = forbidden(module, IMPORTS[module]) - ALLOWED.get(module, set())
        assert not wrong, f"{module} must not import {', '.join(sorted(wrong))}"


def test_every_exception_is_still_needed() -> None:
    for module, allowed in ALLOWED.items():
        assert module in MODULES, f"there is no module {module}: delete its exceptions"
        spare = allowed - forbidden(module, IMPORTS[module])
        assert not spare, f"{module} needs no exception for {', '.join(sorted(spare))} any more: delete it"


def test_what_objects_show_themselves_with_is_imported_in_methods_only() -> None:
    for module, shown in SHOWN.items():
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.ClassDef)
        at_the_top = ast.unparse(ast.Module([node for node in tree.body if not isinstance(node, kinds)], []))
        assert not imports(at_the_top) & shown
    loaded = loaded_by("import safa.experiments; safa.simulate('boston', rounds=1, train=False)")
    assert loaded & {"altair", "safa.report"} == set()


def test_no_two_layers_import_each_other() -> None:
    assert not cycle_in(between_layers()), f"layers import each other: {cycle_in(between_layers())}"


# -- the checks themselves ---------------------------------------------------------------------------------------------


def test_imports_in_functions_and_for_types_count() -> None:
    text = """
import numpy as np
from typing import TYPE_CHECKING
from safa.runs import Run
from safa.report import figures
if TYPE_CHECKING:
    from safa.server.learner import Learner
def function():
    import safa.simulation
"""
    found = imports(text) - {"numpy", "typing"}
    assert found == {"safa.runs.__init__", "safa.report.figures", "safa.server.learner", "safa.simulation.__init__"}
    assert forbidden("safa.protocol.safa", found | {"torch", "numpy", "safa.errors"}) == found | {"torch"}
    assert forbidden("safa.fleet.world", {"safa.runs.__init__", "safa.runs.settings"}) == {"safa.runs.__init__"}


def test_a_cycle_is_named() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == ""
    assert cycle_in({"a": {"b"}, "b": {"a"}}) in ("a -> b -> a", "b -> a -> b")


# -- what is loaded ----------------------------------------------------------------------------------------------------


def test_the_protocol_layer_is_pure() -> None:
    """No clock, no random number, no file, no socket."""
    for module in (module for module in MODULES if layer_of(module) == "protocol"):
        assert not {name.split(".")[0] for name in IMPORTS[module]} & IMPURE
        text = MODULES[module].read_text(encoding="utf-8")
        assert "np.random" not in text
        assert "open(" not in text.replace("def open(", "")


def test_simulating_needs_no_torch_and_no_rich() -> None:
    """Rounds alone are simulated without loading a tensor library or anything of the command line."""
    loaded = loaded_by("import safa; list(safa.run_rounds(safa.Settings.of('boston', rounds=2)))")
    assert "safa.simulation" in loaded
    assert loaded & {"torch", "rich", "hypothesis"} == set()


@pytest.mark.parametrize("module", ["safa.deploy.exchange.device", "safa.deploy.flower.client_app"])
def test_a_device_loads_no_simulator(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert module in loaded
    assert loaded & {"safa.simulation", "safa.experiments", "safa.server", "safa.paper.grid", "safa.cli"} == set()
    assert "torch" not in loaded, "it is loaded when there is something to train"


def test_the_public_names_are_loaded_on_first_use() -> None:
    assert {name for name in loaded_by("import safa") if name.startswith("safa")} == {"safa"}
    assert safa._WHERE.keys() == set(safa.__all__)
    assert set(dir(safa)) >= set(safa.__all__)
    for name in safa.__all__:
        assert getattr(safa, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'safa' has no attribute 'nothing'"):
        getattr(safa, "nothing")  # noqa: B009
