"""The pytest plugin: fixtures that answer from a script or a recording, in real runs of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.docs.page_blocks import DOCS, blocks_of

import agentflow as af
from agentflow.backends.open_session import current_substitute

pytest_plugins = ["pytester"]

JUDGE = """
    import agentflow as af

    @af.program
    async def judge(s, essay):
        s += f"Is it about science? {essay}" + af.select("related", ["yes", "no"])
        return await s["related"]

    def judged(essay):  # opens a session of its own, as an application does
        return af.run(judge, essay)
"""
BACKEND = """
    import pytest
    import agentflow as af

    @pytest.fixture
    def agentflow_backend():
        return af.Scripted(lambda prompt: "yes" if "Leaves" in prompt else "no")
"""
RECORD = "--agentflow-record"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs pytest on the given tests, with the plugin."""
    monkeypatch.setenv("AGENTFLOW_URL", "ws://127.0.0.1:1")  # a session that reaches for it fails
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each run would import the others again
    pytester.makepyfile(judging=JUDGE)
    pytester.makeconftest(BACKEND)

    def run(*options: str, **files: str) -> pytest.RunResult:
        if files:
            pytester.makepyfile(**files)
        # With its faulthandler, the outer run's would write to a captured file from then on.
        plugins = ("pytest_agentflow", "anyio", "no:cacheprovider", "no:faulthandler")
        result = pytester.runpytest_inprocess(*(f"-p{plugin}" for plugin in plugins), *options)
        assert current_substitute() is None
        return result

    return run


def test_a_script_answers_the_sessions_of_the_code_under_test(run):
    result = run(
        test_judge="""
        from judging import judged

        def test_both(agentflow_scripted):
            backend = agentflow_scripted({"related": ["yes", "no"]})
            assert [judged("Leaves."), judged("Soup.")] == ["yes", "no"]
            assert backend.prompts[1].endswith("Soup.")

        def test_the_next_test_has_its_own(agentflow_scripted):
            agentflow_scripted(["no"])
            assert judged("Leaves.") == "no"
        """
    )
    result.assert_outcomes(passed=2)


def test_unused_answers_fail_a_test_that_passed(run):
    result = run(
        test_judge="""
        def test_unused(agentflow_scripted):
            agentflow_scripted({"related": "yes"})

        def test_lenient(agentflow_scripted):
            agentflow_scripted({"related": "yes"}, strict=False)

        def test_failed(agentflow_scripted):
            agentflow_scripted({"related": "yes"})
            assert False
        """
    )
    result.assert_outcomes(passed=2, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*unused*1 for 'related'*"])


def test_a_session_before_the_script_fails_the_test(run):
    result = run(test_judge="from judging import judged\ndef test_it(agentflow_scripted): judged('x')")
    result.assert_outcomes(failed=1)


REPLAYED = """
    import pytest
    import agentflow as af
    from judging import judge, judged

    def test_two_sessions(agentflow_replay):
        assert [judged("Leaves."), judged("Soup.")] == ["yes", "no"]

    class TestMore:
        @pytest.mark.parametrize("essay", ["Leaves / light?"])
        def test_one(self, agentflow_replay, essay):
            assert agentflow_replay.name.startswith("TestMore.test_one[Leaves-light-]~")
            assert judged(essay) == "yes"
"""


def test_tests_are_recorded_and_replayed(run, pytester: pytest.Pytester):
    run(RECORD, test_judge=REPLAYED).assert_outcomes(passed=2)
    folder = pytester.path / "cassettes" / "test_judge"
    assert sorted(path.name.split("~")[0] for path in folder.iterdir()) == [
        "TestMore.test_one[Leaves-light-]",
        "test_two_sessions-2.jsonl",
        "test_two_sessions.jsonl",
    ]
    pytester.makeconftest("")  # there is no model any more
    run().assert_outcomes(passed=2)


def test_recording_again_removes_what_is_not_used_any_more(run, pytester: pytest.Pytester):
    run(RECORD, test_judge=REPLAYED)
    fewer = REPLAYED.replace('judged("Soup.")]', '"no"]')
    run(RECORD, test_judge=fewer).assert_outcomes(passed=2)
    names = {path.name.split("~")[0] for path in (pytester.path / "cassettes" / "test_judge").iterdir()}
    assert names == {"TestMore.test_one[Leaves-light-]", "test_two_sessions.jsonl"}


def test_f22b_recordings_of_different_parameters_never_share_a_file(run, pytester: pytest.Pytester):
    essays = ["Leaves/1", "Leaves 1", "Leaves::1", "Leaves.1", "leaves-1", "Leaves-1", "é" * 90, "x" * 300]
    test = f"""
        import pytest
        from judging import judged

        @pytest.mark.parametrize("essay", {essays})
        def test_one(agentflow_replay, essay):
            assert judged(essay) == ("yes" if "Leaves" in essay else "no")
    """
    run(RECORD, test_judge=test).assert_outcomes(passed=len(essays))
    names = [path.name for path in (pytester.path / "cassettes" / "test_judge").iterdir()]
    assert len({name.lower() for name in names}) == len(essays)
    pytester.makeconftest("")
    run().assert_outcomes(passed=len(essays))


def test_f22c_a_recording_stays_where_recording_again_finds_no_backend(run, pytester: pytest.Pytester):
    run(RECORD, test_judge=REPLAYED).assert_outcomes(passed=2)
    pytester.makeconftest("")  # AGENTFLOW_URL has no server
    run(RECORD).assert_outcomes(failed=2)
    run().assert_outcomes(passed=2)


def test_a_missing_recording_says_what_to_run(run):
    result = run(test_judge=REPLAYED)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*there is no recording *test_two_sessions.jsonl*"])
    result.stdout.fnmatch_lines(["*pytest --agentflow-record 'test_judge.py::test_two_sessions'"])


def test_a_changed_program_says_how_to_record_it_again(run, pytester: pytest.Pytester):
    run(RECORD, test_judge=REPLAYED)
    result = run("-k", "two", test_judge=REPLAYED.replace("Soup", "Bread"))
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*ReplayDiffers*", "*pytest --agentflow-record 'test_judge.py::test_two*"])


def test_a_session_without_a_fixture_chooses_for_itself(run, monkeypatch: pytest.MonkeyPatch):
    """Here a server that does not exist."""
    result = run(
        RECORD,
        conftest="",
        test_judge="""
        import pytest
        import agentflow as af
        from judging import judged

        def test_it(agentflow_replay):
            with pytest.raises(af.errors.ServerUnreachable):
                judged("Leaves.")
        """,
    )
    result.assert_outcomes(passed=1)


def test_a_given_backend_stays(run):
    result = run(
        test_judge="""
        import agentflow as af
        from judging import judge

        def test_it(agentflow_replay):
            assert af.run(judge, "x", session=af.session(backend=af.Scripted("no"))) == "no"
        """
    )
    result.assert_outcomes(passed=1)


def test_async_tests_use_it_in_their_event_loop(run):
    result = run(
        test_judge="""
        import pytest
        import agentflow as af
        from judging import judge

        @pytest.mark.anyio
        async def test_it(agentflow_scripted):
            agentflow_scripted({"related": "yes"})
            async with af.session() as flow:
                assert await flow.run(judge, "x") == "yes"
        """
    )
    assert result.parseoutcomes()["passed"] >= 1


def test_the_plugin_loads_nothing_of_agentflow():
    """pytest imports it in each run of an environment that has agentflow."""
    script = "import pytest_agentflow, sys; print({'agentflow', 'anyio', 'msgspec'} & set(sys.modules))"
    root = Path(af.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_f47h_the_blocks_of_the_page_are_tests(run, pytester: pytest.Pytester):
    scripted, replayed = [
        block.source for block in blocks_of(DOCS / "guides" / "offline-tests.md") if not block.runs
    ]
    application = """
        import agentflow as af

        async def reviewed(s, essay):
            s += af.user(f"Is it about science? {essay}") + af.assistant(af.select("related", ["yes", "no"]))
            if await s["related"] == "no":
                return "not about science"
            s += af.user("Judge it.") + af.assistant(af.gen("judgment"))
            return await s["judgment"]

        def review(essay):
            return af.run(reviewed, essay)
    """
    pytester.makepyfile(my_app=application)
    pytester.makeconftest(
        """
        import pytest
        import agentflow as af

        @pytest.fixture
        def agentflow_backend():
            return af.Scripted({"related": "yes", "judgment": "It is clear."})
        """
    )
    run(RECORD, test_page=f"import my_app\n{scripted}\n{replayed}").assert_outcomes(passed=2)
    run().assert_outcomes(passed=2)
