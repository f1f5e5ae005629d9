"""The gallery: every example runs, and prints what lies beside it."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests import gallery
from tests.gallery import EXAMPLES, NOTEBOOKS, PROGRAMS

DEPLOYED = "deploy_locally"
SUBJECTS = {
    "quick_start", "own_model", "own_fleet", "choose_c_and_tau", "compare_protocols", DEPLOYED, "stop_at_target"
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != DEPLOYED])
def test_a_program_prints_what_lies_beside_it(name: str, tmp_path: Path) -> None:
    gallery.check((EXAMPLES / f"{name}.txt").read_text(encoding="utf-8"), gallery.printed(name, tmp_path))


@pytest.mark.slow
@pytest.mark.xdist_group("deployment-2")
def test_the_deployment_prints_what_lies_beside_it(tmp_path: Path) -> None:
    gallery.check((EXAMPLES / f"{DEPLOYED}.txt").read_text(encoding="utf-8"), gallery.printed(DEPLOYED, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_is_stored_in_it(name: str, tmp_path: Path) -> None:
    stored = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(stored)
    assert "(image/png)" in gallery.outputs(stored)
    gallery.check(gallery.outputs(stored), gallery.outputs(gallery.executed(name, tmp_path)))


def test_every_subject_has_an_example_and_every_example_a_line_in_the_index() -> None:
    assert {*PROGRAMS, *NOTEBOOKS} == SUBJECTS
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w.]+)\)", index))
    assert linked >= {f"{name}.py" for name in PROGRAMS} | {f"{name}.txt" for name in PROGRAMS}
    assert linked >= {f"{name}.ipynb" for name in NOTEBOOKS}
    assert not {name for name in linked if not (EXAMPLES / name).exists()}


def test_the_gallery_of_the_docs_names_every_example() -> None:
    page = (EXAMPLES.parent / "docs" / "gallery.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(\.\./examples/([\w.]+)\)", page))
    assert {Path(name).stem for name in linked if name.endswith((".py", ".ipynb"))} == SUBJECTS
    assert not {name for name in linked if not (EXAMPLES / name).exists()}


@pytest.mark.slow
def test_the_example_of_the_docs_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (EXAMPLES.parent / "docs" / "gallery.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block, {})
    assert (tmp_path / "accuracy.svg").read_text(encoding="utf-8").startswith("<svg")
    assert (tmp_path / "clients.png").read_bytes().startswith(b"\x89PNG")


def test_examples_are_short_and_say_what_they_are() -> None:
    for name in PROGRAMS:
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        assert text.startswith('"""')
        assert len(text.splitlines()) <= 60, name


@pytest.mark.parametrize(
    ("said", "found"), [("a 1.0 b\n", "a 1.0 c\n"), ("10 rounds\n", "20 rounds\n"), ("1 2\n", "1\n")]
)
def test_another_output_is_noticed_on_every_kind_of_machine(
    said: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for same in (True, False):
        monkeypatch.setattr(gallery, "is_same_kind", lambda same=same: same)
        gallery.check(said, said)
        with pytest.raises((AssertionError, ValueError)):
            gallery.check(said, found)
