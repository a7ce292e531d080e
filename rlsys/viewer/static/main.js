// Shows a view, and refreshes it: every AGAIN_MS while a run is live. If all runs have ended, every POLLS_OF_ENDED-th
// poll checks whether one has continued.
import { get } from "./api.js";
import { el, number, runColour } from "./dom.js";
import { overview } from "./overview.js";
import { group, sample, samples } from "./samples.js";

const AGAIN_MS = 4000;
const POLLS_OF_ENDED = 5;
const main = document.getElementById("main");
const trouble = document.getElementById("trouble");
const hiddenRuns = new Set();
let runs = [];
let latestShow = 0; // number of the last call of show()
let completedShow = 0; // number of the last call that has ended
let polls = 0;

function drawRuns() {
  document.getElementById("runs").replaceChildren(...runs.map((run, index) => {
    const isHidden = hiddenRuns.has(index);
    const box = el("input", { type: "checkbox", checked: !isHidden, onchange: () => { hiddenRuns.has(index) ? hiddenRuns.delete(index) : hiddenRuns.add(index); show(); } });
    const state = run.ended ? `${number(run.steps)} steps, ended` : `step ${number(run.steps)} of ${number(run.of)}${silence(run)}`;
    return el("label", { class: `run ${isHidden ? "off" : ""}`, style: { "--swatch": runColour(index) }, title: `${run.folder}\n${run.model}` },
      runs.length > 1 ? box : null, el("span", { class: "swatch" }), el("b", {}, run.name), el("span", { class: "state" }, state));
  }));
}

// The time since the last line of metrics of a live run, if it is longer than most steps take.
function silence(run) {
  const minutes = Math.floor((Date.now() / 1000 - run.last) / 60);
  if (!run.last || minutes < 2) return "";
  return minutes < 120 ? `, ${minutes} min ago` : `, ${Math.floor(minutes / 60)} h ago`;
}

async function show() {
  const thisShow = ++latestShow;
  const [path, params] = location.hash.replace(/^#\/?/, "").split("?");
  const query = new URLSearchParams(params ?? "");
  const draft = document.createElement("div");
  try {
    runs = await get("runs");
    if (thisShow !== latestShow) return;
    drawRuns();
    for (const link of document.querySelectorAll("nav a")) link.classList.toggle("here", link.dataset.view === (path ? "samples" : "overview"));
    const views = { samples, sample, group };
    if (path in views) await views[path](draft, runs, query);
    else await overview(draft, runs, new Set(runs.keys().filter((i) => !hiddenRuns.has(i))));
    if (thisShow !== latestShow) return;
    const scroll = [window.scrollX, window.scrollY];
    main.replaceChildren(...draft.childNodes);
    window.scrollTo(...scroll);
    trouble.hidden = true;
  } catch (error) {
    if (thisShow !== latestShow) return;
    trouble.textContent = error.message;
    trouble.hidden = false;
  }
  completedShow = thisShow;
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
}

window.addEventListener("hashchange", () => { window.scrollTo(0, 0); show(); });
async function poll() {
  const onOverview = !location.hash.replace(/^#\/?/, "");
  // While show() waits for a slow coordinator, another call would discard its result, and so would the next one.
  if (!onOverview || document.hidden || completedShow !== latestShow) return;
  if (!runs.every((run) => run.ended)) return show();
  polls = (polls + 1) % POLLS_OF_ENDED;
  if (polls) return;
  try {
    const newRuns = await get("runs");
    if (JSON.stringify(newRuns) !== JSON.stringify(runs)) show();
  } catch {
    // The page of ended runs stays valid, even if rlsys dash has ended.
  }
}

setInterval(poll, AGAIN_MS);
show();
