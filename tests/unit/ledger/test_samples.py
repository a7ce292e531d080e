"""`rlsys samples`: which samples, their text, who sampled which part; from here and from another machine."""

from __future__ import annotations

import json
import socket
import sqlite3
import threading
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest

from rlsys.cli import main
from rlsys.core.errors import UserError
from rlsys.core.messages import encode
from rlsys.core.owner import claim
from rlsys.data.tokenizer import Tokenizer
from rlsys.ledger.reader import RunReader
from rlsys.ledger.samples import SampleQuery, SamplesAnswer
from rlsys.obs import coordinator
from rlsys.obs.token_records import readable_groups
from rlsys.viewer.reading import RunTexts, parts_of, turns_of
from tests.helpers.seen_run import MODEL, RESPONSE_PARTS, write_run
from tests.helpers.supervisor_stage import wait_until


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("seen"))


def ids(run: Path, query: SampleQuery) -> list[int]:
    return [view.sample.sample_id for view in RunReader(run).samples(query)]


def test_pieces_of_a_text_are_the_text() -> None:
    tokenizer = Tokenizer(MODEL)
    encoded = tokenizer.encode("12 + 30 = 42")
    pieces = tokenizer.pieces(encoded)
    assert (len(pieces), "".join(pieces)) == (len(encoded), tokenizer.decode(encoded))


def test_a_character_of_several_tokens_is_one_piece(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Fast(models.BPE(alphabet | {"<e>": 256}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    tokenizer = Tokenizer(tmp_path)
    encoded = tokenizer.encode("é漢x")
    assert tokenizer.pieces(encoded) == ["", "é", "", "", "漢", "x"]
    cut = encoded[:3]  # the response was cut off within a character
    assert "".join(tokenizer.pieces(cut)) == tokenizer.decode(cut)


def test_conditions_and_orders(run: Path) -> None:
    assert ids(run, SampleQuery(step=1)) == [1, 0]
    assert ids(run, SampleQuery(group=2)) == [5, 4]
    assert ids(run, SampleQuery(resumed=True)) == [4]
    assert ids(run, SampleQuery(order="worst")) == [3, 1, 2, 0]
    assert ids(run, SampleQuery(order="best", limit=1, skip=1)) == [0]
    assert ids(run, SampleQuery(order="longest", limit=1)) == [4]
    assert ids(run, SampleQuery(status="parked")) == [5, 4]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (SampleQuery(step=9), "step 9: no such train step; the run has steps 1 to 2"),
        (SampleQuery(group=3), "group 3: no such group; the run has groups 0 to 2"),
        (SampleQuery(sample=77), "sample 77: no such sample in the run"),
        (SampleQuery(status="done"), "status done: expected one of parked, finished, truncated, censored"),
        (SampleQuery(limit=1000), "limit 1000: expected 1 to 256"),
    ],
)
def test_a_query_for_missing_samples_is_an_error(run: Path, query: SampleQuery, words: str) -> None:
    with pytest.raises(UserError, match=words):
        RunReader(run).samples(query)


def test_parts_of_a_sample_show_their_version_and_interruptions(run: Path) -> None:
    texts = RunTexts(run)
    (view,) = texts.reader.samples(SampleQuery(sample=4))
    parts = parts_of(view)
    assert [(p.version, p.trained_steps, p.interrupted) for p in parts] == [
        (2, 1, False),
        (3, 2, True),
        (4, 3, True),
    ]
    pieces = texts.tokenizer.pieces(view.sample.response_ids)
    assert tuple("".join(pieces[p.start : p.end]) for p in parts) == RESPONSE_PARTS
    (tooled,) = texts.reader.samples(SampleQuery(sample=5))
    assert [p.tool for p in parts_of(tooled)] == [False, True, False]
    assert turns_of(tooled) == 2


def test_tokens_that_the_ledger_has_forgotten_are_read_where_the_trainer_wrote_them(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    views_before = RunReader(run).samples(SampleQuery(step=1))
    with sqlite3.connect(run / "rollouts.sqlite") as db:
        db.execute("DELETE FROM pieces WHERE sample_id < 2")
    views_after = RunReader(run).samples(SampleQuery(step=1))
    assert [s.sample.response_ids for s in views_after] == [s.sample.response_ids for s in views_before]
    assert views_after[0].sample.mu == pytest.approx(views_before[0].sample.mu)
    assert views_after[1].advantages == [1.0] * views_after[1].tokens
    (run / "trained" / "000001.msgpack").unlink()
    pruned_views = RunReader(run).samples(SampleQuery(step=1))
    assert [(s.has_tokens, s.tokens) for s in pruned_views] == [(False, b.tokens) for b in views_before]


def test_the_readable_groups_of_a_step_are_chosen_deterministically() -> None:
    assert readable_groups([7, 3, 9], 2) == {3, 7}
    assert readable_groups([7, 3, 9], 0) == set()


def test_the_command_shows_text_reward_answer_and_advantage(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["samples", str(run), "--step", "2", "--best", "--n", "1"]) == 0
    out = capsys.readouterr().out
    assert "group 1, step 2" in out
    assert "2 = 42" in out
    assert "reward 1" in out and "answer 42" in out and "advantage +1" in out


def test_the_last_step_is_shown_by_default(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["samples", str(run), "--json"]) == 0
    assert {json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()} == {2}


def test_grep_searches_responses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["samples", str(run), "--grep", "so it", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert (record["fate"], record["state"]) == ("not complete yet", "active")
    assert record["sample"] == 4 and record["response"] == "".join(RESPONSE_PARTS)
    assert len(record["parts"]) == 3 and record["interrupts"] == [
        [record["parts"][0]["end"], 2],
        [record["parts"][1]["end"], 3],
    ]
    assert main.main(["samples", str(run), "--grep", "no such words"]) == 0
    assert "no sample matches" in capsys.readouterr().out


def test_a_search_pauses_at_its_limit_and_continues(run: Path) -> None:
    import re

    texts = RunTexts(run)
    page = texts.page(SampleQuery(limit=20), re.compile("17"), max_searched=3)
    assert ([s.sample.sample_id for s in page.samples], page.next_skip, page.searched) == ([3], 3, 3)
    assert [s.sample.sample_id for s in texts.iterate(SampleQuery(limit=20), re.compile("17"), 9)] == [3, 1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--grep", "("], "--grep (: not a regular expression"),
        (["--n", "0"], "--n 0: expected 1 or more"),
        (["--step", "-1"], "step -1: expected 0 to 9223372036854775807"),
        (["--step", "9" * 20], "expected 0 to"),
        (["--status", "lost"], "status lost: expected one of"),
        (["--worst", "--best"], "not allowed with argument"),
    ],
)
def test_bad_arguments_are_one_line(
    run: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main.main(["samples", str(run), *words])
    except SystemExit as e:
        code = int(str(e.code))
    assert code == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["samples", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_a_reader_on_another_machine_queries_the_coordinator(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared folder: the supervisor carries question and answer."""
    owner = claim(run)
    coordinator.publish_address(owner)
    hostname = socket.gethostname()
    expected = RunReader(run).samples(SampleQuery(step=1))
    monkeypatch.setattr(socket, "gethostname", lambda: f"not-{hostname}")
    monkeypatch.setattr("rlsys.ledger.reader.is_local", lambda _: False)
    queries: list[SampleQuery] = []

    def supervisor() -> None:
        requests: list[tuple[str, str]] = []

        def heard_something() -> bool:
            requests.extend(coordinator.take_requests(run))
            return bool(requests)

        wait_until(heard_something)
        name, path = requests[0]
        queries.append(msgspec.json.decode(unquote(path.partition("query=")[2]), type=SampleQuery))
        coordinator.write_response(run, name, encode(SamplesAnswer(expected)))

    thread = threading.Thread(target=supervisor)
    thread.start()
    try:
        answer = RunReader(run).samples(SampleQuery(step=1))
    finally:
        thread.join()
        coordinator.withdraw_address(owner)
    assert queries == [SampleQuery(step=1)]
    assert [s.sample for s in answer] == [s.sample for s in expected]
    assert not list((run / coordinator.MAILBOX).iterdir())
