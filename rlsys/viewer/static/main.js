// Which view is shown, and when it is read again: a live run every few seconds. Runs that have all ended are looked
// after more seldom, and drawn again when one goes on.
import { get } from "./api.js";
import { el, number, runColour } from "./dom.js";
import { overview } from "./overview.js";
import { group, sample, samples } from "./samples.js";

const AGAIN_MS = 4000;
const LOOKS_OF_ENDED = 5;
const main = document.getElementById("main");
const trouble = document.getElementById("trouble");
const off = new Set();
let runs = [];
let drawing = 0;
let drawn = 0;
let looks = 0;

function drawRuns() {
  document.getElementById("runs").replaceChildren(...runs.map((run, index) => {
    const box = el("input", { type: "checkbox", checked: !off.has(index), onchange: () => { off.has(index) ? off.delete(index) : off.add(index); show(); } });
    const state = run.ended ? `${number(run.steps)} steps, ended` : `step ${number(run.steps)} of ${number(run.of)}${quiet(run)}`;
    return el("label", { class: `run ${off.has(index) ? "off" : ""}`, style: { "--swatch": runColour(index) }, title: `${run.folder}\n${run.model}` },
      runs.length > 1 ? box : null, el("span", { class: "swatch" }), el("b", {}, run.name), el("span", { class: "state" }, state));
  }));
}

// How long ago a live run said something, where that is longer than most steps take.
function quiet(run) {
  const minutes = Math.floor((Date.now() / 1000 - run.last) / 60);
  if (!run.last || minutes < 2) return "";
  return minutes < 120 ? `, ${minutes} min ago` : `, ${Math.floor(minutes / 60)} h ago`;
}

async function show() {
  const mine = ++drawing;
  const [path, told] = location.hash.replace(/^#\/?/, "").split("?");
  const query = new URLSearchParams(told ?? "");
  const draft = document.createElement("div");
  try {
    runs = await get("runs");
    if (mine !== drawing) return;
    drawRuns();
    for (const link of document.querySelectorAll("nav a")) link.classList.toggle("here", link.dataset.view === (path ? "samples" : "overview"));
    const views = { samples, sample, group };
    if (path in views) await views[path](draft, runs, query);
    else await overview(draft, runs, new Set(runs.keys().filter((i) => !off.has(i))));
    if (mine !== drawing) return;
    const held = [window.scrollX, window.scrollY];
    main.replaceChildren(...draft.childNodes);
    window.scrollTo(...held);
    trouble.hidden = true;
  } catch (error) {
    if (mine !== drawing) return;
    trouble.textContent = error.message;
    trouble.hidden = false;
  }
  drawn = mine;
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
}

window.addEventListener("hashchange", () => { window.scrollTo(0, 0); show(); });
async function look() {
  const onOverview = !location.hash.replace(/^#\/?/, "");
  // A look that still waits for a slow coordinator would be thrown away for a new one, and that one again.
  if (!onOverview || document.hidden || drawn !== drawing) return;
  if (!runs.every((run) => run.ended)) return show();
  looks = (looks + 1) % LOOKS_OF_ENDED;
  if (looks) return;
  try {
    const now = await get("runs");
    if (JSON.stringify(now) !== JSON.stringify(runs)) show();
  } catch {
    // What is drawn stays true of runs that have ended, also when rlsys dash has.
  }
}

setInterval(look, AGAIN_MS);
show();
