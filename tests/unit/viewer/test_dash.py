"""`rlsys dash`: what its server answers and to whom; the page itself, in a headless Chromium."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from rlsys.cli import main
from rlsys.config import dump_config
from rlsys.core.errors import UserError
from rlsys.core.owner import claim
from rlsys.core.sockets import make_folder
from rlsys.ledger.reader import RunReader
from rlsys.obs import coordinator
from rlsys.viewer.series import RunCurves
from rlsys.viewer.server import Dashboard
from tests.helpers.browser import CHROMIUM, Page, browser
from tests.helpers.rollout_rig import make_config, rig
from tests.helpers.seen_run import MODEL, RESPONSE_PARTS, write_run
from tests.helpers.service_rig import served

TOKEN = "the link's token"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write_run(tmp_path_factory.mktemp(name)) for name in ("first", "second")]


@pytest.fixture
async def stranger(runs: list[Path]) -> AsyncIterator[TestClient]:
    """Who knows the port, and not the token."""
    async with TestClient(TestServer(Dashboard(runs, TOKEN).app(), host="127.0.0.1")) as client:
        yield client


@pytest.fixture
async def reader(stranger: TestClient) -> TestClient:
    answer = await stranger.get("/", params={"token": TOKEN})
    assert answer.status == 200 and str(answer.url.query_string) == ""  # the address bar keeps no secret
    return stranger


async def ask(client: TestClient, path: str, **query: Any) -> Any:
    answer = await client.get(f"/api/{path}", params={k: str(v) for k, v in query.items()})
    return await answer.json()


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/samples?run=0", "/static/main.js", "/?token=guess"])
async def test_requests_without_the_token_are_refused(stranger: TestClient, path: str) -> None:
    assert (await stranger.get(path)).status == 403


async def test_post_requests_are_refused(reader: TestClient) -> None:
    for path in ("/", "/api/runs", "/api/samples"):
        assert (await reader.post(path)).status == 405


async def test_no_file_outside_the_static_folder_is_served(reader: TestClient) -> None:
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/"):
        assert (await reader.get(path)).status in (403, 404)


async def test_runs_curves_and_timeline(reader: TestClient) -> None:
    first, _ = await ask(reader, "runs")
    assert (first["steps"], first["ended"], "reward" in first["metrics"]) == (2, True, True)
    curves = await ask(reader, "curves", names="reward,eval.accuracy,none")
    assert curves[0]["reward"] == {"x": [1, 2], "y": [0.25, 0.5]}
    assert curves[0]["eval.accuracy"] == {"x": [0], "y": [0.25]} and curves[0]["none"] == {"x": [], "y": []}
    _, second = await ask(reader, "timeline", run=1)
    assert second == {
        "step": 2, "rollout": 2.0, "train": 1.0, "sync": 0.5, "other": 0.0, "between": 0.5, "stopped": 0.0
    }  # fmt: skip
    assert await ask(reader, "status", run=0) == {}


async def test_samples_by_page_and_token_by_token(reader: TestClient) -> None:
    listing = await ask(reader, "samples", run=0, resumed=1)
    assert [s["sample"] for s in listing["samples"]] == [4] and listing["next"] is None
    sample = await ask(reader, "sample", run=0, sample=4)
    assert (sample["fate"], sample["step"]) == ("not complete yet", None)
    assert "".join(sample["pieces"]) == "".join(RESPONSE_PARTS) and len(sample["mu"]) == len(sample["pieces"])
    sample_tail = await ask(reader, "sample", run=0, **{"sample": 4, "from": 20})
    assert "".join(sample_tail["pieces"]) == RESPONSE_PARTS[2]
    trained = await ask(reader, "sample", run=0, sample=0)
    gaps = [logp - mu for logp, mu in zip(trained["logp"], trained["mu"], strict=True)]
    assert gaps == pytest.approx([0.001] * trained["tokens"], abs=1e-6) and set(trained["advantages"]) == {
        1.0
    }


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("samples?run=7", "run = 7: expected a number below 2, the number of runs"),
        ("samples?step=9", "step 9: no such train step; the run has steps 1 to 2"),
        ("samples?step=x", "step = x: expected a whole number"),
        pytest.param("samples?step=1" + 18 * "0" + "1", "expected a whole number", id="20 digits"),
        pytest.param("samples?step=" + 5000 * "9", "expected a whole number", id="5,000 digits"),
        ("samples?order=odd", "order odd: expected one of newest"),
        ("samples?grep=(", "grep = (: not a regular expression"),
        ("sample?sample=99", "sample 99: no such sample in the run"),
    ],
)
async def test_invalid_queries_return_a_one_line_error(reader: TestClient, path: str, words: str) -> None:
    answer = await reader.get(f"/api/{path}")
    assert answer.status == 400 and words in (await answer.json())["error"]


async def test_curves_are_not_read_while_new_lines_are_loaded(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second look may come in the middle of the first: an array that is copied then cannot grow."""
    follow_started, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    def follow(self: RunCurves) -> None:
        follow_started.set()
        go_on.wait(30)
        calls.append("followed")

    monkeypatch.setattr(RunCurves, "follow", follow)
    monkeypatch.setattr(RunCurves, "curve", lambda *_: calls.append("curve"))
    monkeypatch.setattr(RunCurves, "timeline", lambda *_: calls.append("timeline"))
    async with TestClient(TestServer(Dashboard(runs[:1], TOKEN).app(), host="127.0.0.1")) as client:
        await client.get("/", params={"token": TOKEN})
        looks = [asyncio.create_task(ask(client, "runs"))]
        assert await asyncio.to_thread(follow_started.wait, 30)
        looks += [asyncio.create_task(ask(client, "curves", names="reward"))]
        looks += [asyncio.create_task(ask(client, "timeline", run=0))]
        for _ in range(20):  # the server has heard both by then
            await client.get("/static/icon.svg")
        go_on.set()
        await asyncio.gather(*looks)
    assert calls[0] == "followed" and len(calls) == 3


@pytest.mark.parametrize("local", [True, False], ids=["local disk", "shared folder"])
async def test_a_live_run_shows_its_engines_and_parked_samples(
    local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the file beside its writer; on a shared folder, where nobody else may open it, from the coordinator."""
    monkeypatch.setattr("rlsys.ledger.reader.is_local", lambda _: local)
    owner = claim(tmp_path, make_folder())
    monkeypatch.setattr("tests.helpers.service_rig.OWNER", owner)
    april = {"over_provision": 2, "max_staleness": 3}
    config = make_config(tmp_path, model={"path": str(MODEL)}, rollout=april)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    async with rig(config, lambda s: 3 if s.group_id < 2 else 15) as r, served(r):
        coordinator.publish_address(owner)
        await r.start()
        await r.take(1)  # the other two groups are interrupted
        async with TestClient(TestServer(Dashboard([tmp_path], TOKEN).app(), host="127.0.0.1")) as client:
            await client.get("/", params={"token": TOKEN})
            status = await ask(client, "status", run=0)
            assert [e["serving"] for e in status["engine_figures"].values()] == [True]
            assert status["parked"] >= 4  # with those that have not begun
            listing = await ask(client, "samples", run=0, status="parked")
            assert len(listing["samples"]) == 4 and listing["last"] == 1
            assert all(s["interrupts"] == [[s["tokens"], 1]] and s["tokens"] for s in listing["samples"])
            assert "step 7" in (await ask(client, "samples", run=0, step=7))["error"]


def test_a_long_run_is_no_more_points_than_a_screen_has(tmp_path: Path) -> None:
    lines = [{"kind": "run", "event": "start", "step": 0, "time": 0.0}]
    for step in range(1, 1001):
        timestamp = float(step)
        lines.append({"kind": "step", "step": step, "time": timestamp, "reward": timestamp, "time_step": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = RunCurves(tmp_path)
    curves.follow()
    curve = curves.curve("reward", 100)
    assert len(curve["x"]) == 100 and curve["y"][0] == curve["x"][0] == 5.5
    assert [c["step"] for c in curves.timeline(3)] == [998, 999, 1000]


def test_warnings_are_kept_unless_a_resume_discards_their_step(tmp_path: Path) -> None:
    warning = {"kind": "warning", "seen": "s", "cause": "c", "knob": "k", "time": 1.0}
    lines = [{**warning, "step": 2, "name": "a"}, {**warning, "step": 5, "name": "b"}]
    lines += [{"kind": "run", "event": "resume", "step": 3, "time": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = RunCurves(tmp_path)
    curves.follow()
    assert [w["name"] for w in curves.warnings] == ["a"] and curves.names == []


def test_steps_that_a_resume_makes_void_are_forgotten_and_the_stop_is_shown(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"kind": "run", "event": "start", "step": 0, "time": 0.0}]
    lines += [
        {"kind": "step", "step": s, "time": 10.0 * s, "reward": 1.0, "time_step": 4.0} for s in (1, 2, 3)
    ]
    lines += [{"kind": "run", "event": "resume", "step": 1, "time": 100.0}]
    lines += [{"kind": "step", "step": 2, "time": 110.0, "reward": 2.0, "time_step": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = RunCurves(tmp_path)
    curves.follow()
    assert curves.curve("reward", 100) == {"x": [1, 2], "y": [1.0, 2.0]}
    assert curves.timeline(10)[-1] == {
        "step": 2, "rollout": 0.0, "train": 0.0, "sync": 0.0, "other": 4.0, "between": 0.0, "stopped": 96.0
    }  # fmt: skip


def test_a_folder_that_is_no_run_and_a_bad_port_are_one_line(
    tmp_path: Path, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["dash", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert main.main(["dash", str(runs[0]), "--port", "99999"]) == 2
    assert "--port 99999: expected 0 to 65535" in capsys.readouterr().err
    with pytest.raises(UserError, match="not a run folder"):
        Dashboard([tmp_path], TOKEN)


@pytest.mark.full
def test_the_command_prints_a_link_and_an_ssh_tunnel(runs: list[Path]) -> None:
    command = [sys.executable, "-m", "rlsys.cli.main", "dash", str(runs[0])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    link, tunnel = process.stdout.readline(), process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    port = link.split("/?token=")[0].rpartition(":")[2]
    assert link.startswith("http://127.0.0.1:") and f"ssh -L {port}:127.0.0.1:{port} " in tunnel


# -- the page ------------------------------------------------------------------------------------------------


@pytest.fixture
async def page(stranger: TestClient, tmp_path: Path) -> AsyncIterator[Page]:
    async with browser(tmp_path) as page:
        await page.size(1280, 900)
        await page.open(str(stranger.make_url("/").with_query(token=TOKEN)))
        page.home = str(stranger.make_url("/"))
        yield page
        assert page.errors == []  # no error, nothing that the page's own policy refuses
        loaded = "performance.getEntriesByType('resource').map(r => new URL(r.name).host === location.host)"
        assert set(await page.evaluate(loaded)) == {True}  # nothing comes from elsewhere


@needs_chromium
@pytest.mark.gate
async def test_curves_of_two_runs_share_a_chart(page: Page) -> None:
    lines = "[...document.querySelectorAll('.chart')][0].querySelectorAll('polyline').length"
    await page.until(f"{lines} === 2")
    assert "Where the time went" in await page.text()
    await page.evaluate("document.querySelector('#runs input').click()")
    await page.until(f"{lines} === 1")


@needs_chromium
@pytest.mark.gate
async def test_named_evaluation_sets_have_charts_of_their_own(page: Page) -> None:
    titles = await page.evaluate("[...document.querySelectorAll('h3')].map(h => h.textContent)")
    assert "Evaluation: hardaccuracy; dashed: pass@8" in titles


@needs_chromium
@pytest.mark.gate
async def test_a_warning_is_shown_above_the_curves(page: Page, runs: list[Path]) -> None:
    warning = {
        "kind": "warning",
        "step": 2,
        "time": 120.0,
        "name": "no_signal",
        "seen": "All rewards are equal",
    }
    warning |= {"cause": "The task is too hard", "knob": "Change data.reward", "samples": []}
    with (runs[1] / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(warning) + "\n")
    await page.open(f"{page.home}#/samples")
    await page.open(f"{page.home}#/")
    assert "step 2: All rewards are equal." in await page.text("details.warning summary")
    await page.evaluate("document.querySelector('details.warning').open = true")
    assert "Change data.reward." in await page.text("details.warning")


@needs_chromium
@pytest.mark.gate
async def test_the_browser_shows_weight_versions_and_interruptions_of_a_sample(page: Page) -> None:
    await page.open(f"{page.home}#/samples?run=0&status=parked")
    await page.evaluate(
        "[...document.querySelectorAll('a.row')].find(r => r.innerText.includes('sample 4')).click()"
    )
    await page.until("document.querySelectorAll('.tokens span.cut').length === 2")
    by_version = (
        "[...new Set([...document.querySelectorAll('.tokens span:not(.cut)')].map(s => s.className))]"
    )
    assert await page.evaluate(by_version) == ["v-0", "v-1", "v-2"]
    assert "".join(RESPONSE_PARTS) in (await page.text(".tokens")).replace("interrupted", "")
    assert "weights 3 (2 train steps), tokens 11–19" in await page.text()


@needs_chromium
@pytest.mark.gate
async def test_gap_and_advantage_are_coloured_by_token(page: Page) -> None:
    await page.open(f"{page.home}#/sample?run=1&sample=0")
    for view in ("gap", "advantage"):
        await page.evaluate(f"document.querySelector('[data-view={view}]').click()")
        coloured = (
            "[...document.querySelectorAll('.tokens span')].every(s => s.style.background.startsWith('rgba'))"
        )
        assert await page.evaluate(coloured), view
    assert "logp - mu" in await page.evaluate("document.querySelector('.tokens span').title")


@needs_chromium
@pytest.mark.gate
async def test_a_coordinator_that_is_slow_to_answer_keeps_no_page_from_being_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is waited for, no other look takes the place of the one that waits."""
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"end"' not in line))
    answer = threading.Event()
    looks: list[RunCurves] = []

    def status(_: RunReader) -> dict[str, Any]:
        answer.wait(60)
        return {}

    def follow(self: RunCurves) -> None:
        looks.append(self)
        real(self)

    real = RunCurves.follow
    monkeypatch.setattr(RunCurves, "follow", follow)
    monkeypatch.setattr(RunReader, "status", status)
    app = Dashboard([run], TOKEN).app()
    async with TestClient(TestServer(app, host="127.0.0.1")) as client, browser(tmp_path / "browser") as page:
        quick = (
            "const later = setInterval; "
            "setInterval = (f, ms) => later(() => { window.looks = (window.looks ?? 0) + 1; f(); }, ms / 40);"
        )
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=quick)
        await page.call("Page.navigate", url=str(client.make_url("/").with_query(token=TOKEN)))
        await page.until("window.looks > 20")
        assert len(looks) == 1
        answer.set()
        await page.until("document.querySelectorAll('.chart polyline').length > 0")


@needs_chromium
@pytest.mark.gate
async def test_the_page_shows_a_resume_of_an_ended_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    async with (
        TestClient(TestServer(Dashboard([run], TOKEN).app(), host="127.0.0.1")) as client,
        browser(tmp_path / "browser") as page,
    ):
        quick = "const later = setInterval; setInterval = (f, ms) => later(f, ms / 40);"
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=quick)
        await page.call("Page.navigate", url=str(client.make_url("/").with_query(token=TOKEN)))
        await page.until("document.querySelector('#runs')?.innerText.includes('ended')")
        await page.until("document.body.dataset.drawn === '1'")
        await page.until(
            "performance.getEntriesByType('resource').filter(e => e.name.includes('api/runs')).length > 3"
        )
        assert await page.evaluate("document.body.dataset.drawn") == "1", "nothing new, nothing drawn"
        with (run / "metrics.jsonl").open("a") as lines:
            print(json.dumps({"kind": "run", "event": "resume", "step": 4, "time": 200.0}), file=lines)
        await page.until("!document.querySelector('#runs').innerText.includes('ended')")
        assert page.errors == []


@needs_chromium
@pytest.mark.gate
async def test_a_long_stop_does_not_hide_the_other_steps(page: Page) -> None:
    """The axis ends at one and a half times the longest step's work: 15 s of 3,602. The stop's length is written."""
    drawn = await page.evaluate(
        "import('/static/chart.js').then(c => { const host = document.createElement('div');"
        "host.className = 'chart'; document.querySelector('main').append(host);"
        "c.stackedColumns(host, [{step: 1, work: 10, stopped: 0}, {step: 2, work: 2, stopped: 3600}],"
        "[['work', 'work', 'red'], ['stopped', 'stopped', 'blue', true]]);"
        "return {bars: [...host.querySelectorAll('rect')].map(r => r.height.baseVal.value),"
        "told: [...host.querySelectorAll('.beyond')].map(t => t.textContent)}; })"
    )
    ten, two, stopped = drawn["bars"]
    assert ten == pytest.approx(5 * two, rel=1e-3) and stopped == pytest.approx(1.3 * ten, rel=1e-3)
    assert drawn["told"] == ["3,602 s"]


@needs_chromium
@pytest.mark.gate
async def test_a_logarithmic_axis_has_four_decades_at_most(page: Page) -> None:
    drawn = await page.evaluate(
        "import('/static/chart.js').then(c => { const host = document.createElement('div');"
        "host.className = 'chart'; document.querySelector('main').append(host);"
        "const line = {name: 'a', colour: 'red', x: [1, 2, 3, 4], y: [1e-6, 1e-12, 1e-7, 1e-8]};"
        "c.lineChart(host, {lines: [line], log: true});"
        "return [...host.querySelectorAll('circle')].map(p => p.cy.baseVal.value); })"
    )
    top, bottom, tenth, hundredth = drawn
    assert tenth - top == pytest.approx(hundredth - tenth) == pytest.approx((bottom - top) / 4)


@needs_chromium
@pytest.mark.gate
async def test_filter_search_and_groups_side_by_side(page: Page) -> None:
    await page.open(f"{page.home}#/samples")
    assert (
        await page.evaluate("document.querySelector('[name=step]').value") == "2"
    )  # the last one, by itself
    for name, value in (("grep", "so it"), ("step", "")):
        await page.evaluate(f"document.querySelector('[name={name}]').value = '{value}'")
    await page.evaluate("document.querySelector('form.filter').requestSubmit()")
    await page.until("document.querySelectorAll('a.row').length === 1")
    await page.open(f"{page.home}#/group?run=0&group=1")
    assert await page.evaluate("document.querySelectorAll('.columns .card').length") == 2


@needs_chromium
@pytest.mark.gate
async def test_model_output_is_rendered_as_text_and_never_as_html(page: Page) -> None:
    script = "import('/static/dom.js').then(d => d.el('p', {}, '<img src=x onerror=alert(1)>').innerHTML)"
    assert await page.evaluate(script) == "&lt;img src=x onerror=alert(1)&gt;"
    modules = (Path(main.__file__).parents[1] / "viewer" / "static").glob("*.js")
    assert [p.name for p in modules if "innerHTML" in p.read_text()] == []


@needs_chromium
@pytest.mark.gate
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
async def test_no_page_is_wider_than_the_screen(page: Page, width: int, dark: bool) -> None:
    await page.size(width, 900, dark=dark)
    for view in ("/", "/samples?run=0&status=parked", "/sample?run=0&sample=4", "/group?run=0&group=2"):
        await page.open(f"{page.home}#{view}")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


@needs_chromium
@pytest.mark.gate
async def test_an_error_response_is_shown_and_the_page_stays(page: Page) -> None:
    await page.open(f"{page.home}#/samples?run=0&step=9")
    assert await page.text("#trouble") == "step 9: no such train step; the run has steps 1 to 2"
    assert "400" in page.errors[0]
    page.clear_errors()
