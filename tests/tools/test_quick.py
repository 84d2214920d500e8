"""Which tests `make quick` runs for a change, and the times that it goes by."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools import file_seconds, import_graph, quick

ROOT = Path(__file__).resolve().parents[2]
TESTS = [Path(f"tests/core/{name}.py") for name in ("test_far", "test_long", "test_near")]
DISTANCES = {TESTS[0]: 5, TESTS[1]: 1, TESTS[2]: 1}


def test_nearest_tests_run_first_and_those_beyond_the_budget_are_named():
    seconds = {"core/test_long.py": 50.0, "core/test_near.py": 4.0, "core/test_far.py": 3.0}
    chosen = quick.choose(DISTANCES, (), TESTS, seconds, budget_seconds=10)
    assert chosen.run == (TESTS[2], TESTS[0])
    assert chosen.left == (TESTS[1],)


def test_a_changed_test_runs_however_long_it_takes():
    chosen = quick.choose({TESTS[1]: 0}, (), TESTS, {"core/test_long.py": 500.0}, budget_seconds=10)
    assert chosen.run == (TESTS[1],)


def test_tests_in_the_folder_of_the_changed_code_run_although_they_import_none_of_it():
    changed = [Path("core/src/holdfast_core/node/tier.py")]
    tests = [Path("tests/core/node/test_a.py"), Path("tests/core/store/test_b.py")]
    chosen = quick.choose({}, quick.folders_of(changed), tests, {}, budget_seconds=10)
    assert chosen == quick.Chosen(run=(tests[0],), left=())


def test_tests_that_need_servers_or_a_cluster_are_never_chosen():
    assert quick.is_test(Path("tests/core/test_ids.py"))
    for path in (
        "tests/e2e/test_a.py",
        "tests/charts/test_a.py",
        "tests/support/x.py",
        "tools/test_a.py",
    ):
        assert not quick.is_test(Path(path))


def test_edited_deleted_and_unknown_files_are_the_change(tmp_path):
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("kept.py", "edited.py", "deleted.py"):
        (tmp_path / name).write_text("a = 1\n")
    git("add", ".")
    git("commit", "-m", "a")
    (tmp_path / "edited.py").write_text("a = 2\n")
    (tmp_path / "deleted.py").unlink()
    (tmp_path / "new.py").write_text("a = 3\n")
    assert quick.changed_files(tmp_path, None) == [Path("edited.py"), Path("new.py")]


def test_the_graph_follows_each_form_of_import(tmp_path):
    folder = tmp_path / "core/src/pack/inner"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("from .leaf import value\n")
    (folder / "leaf.py").write_text("value = 1\n")
    (folder.parent / "whole.py").write_text("import pack.inner.leaf\n")
    (folder.parent / "name.py").write_text("from pack.inner.leaf import value\n")
    (folder.parent / "module.py").write_text("from pack.inner import leaf\n")
    (folder.parent / "parent.py").write_text("def f():\n    from .inner import value\n")
    graph = import_graph.importers(tmp_path)
    leaf = Path("core/src/pack/inner/leaf.py")
    found = import_graph.distances([leaf], graph)
    assert {path.name: distance for path, distance in found.items()} == {
        "leaf.py": 0,
        "__init__.py": 1,
        "whole.py": 1,
        "name.py": 1,
        "module.py": 1,
        "parent.py": 2,
    }


def test_a_change_of_this_repository_reaches_its_tests():
    graph = import_graph.importers(ROOT)
    found = import_graph.distances([Path("core/src/holdfast_core/node/volume.py")], graph)
    assert found[Path("tests/core/node/test_budget.py")] == 1
    assert Path("tests/operator/model/test_render_pod.py") not in found


def test_times_of_files_come_from_reports_and_stay_for_files_in_none(tmp_path):
    for name in ("a/test_one.py", "a/test_two.py", "test_three.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    report = """<testsuites><testsuite>
        <testcase classname="tests.a.test_one" name="x" time="1.6"/>
        <testcase classname="tests.a.test_one.TestClass" name="y" time="2.0"/>
        <testcase classname="tests.a.test_two" name="y" time="0.2"/>
        <testcase classname="tests.gone.test_four" name="y" time="9"/>
    </testsuite></testsuites>"""
    new = file_seconds.of_report(report, tmp_path)
    assert new == {"a/test_one.py": 3.6, "a/test_two.py": 0.2}
    known = {"a/test_two.py": 5.0, "test_three.py": 7.0, "deleted/test_five.py": 3.0}
    assert file_seconds.merged(known, new, tmp_path) == {"a/test_one.py": 4, "test_three.py": 7}
