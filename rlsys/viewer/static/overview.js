// The view of the selected runs: warnings, the state of the engines, curves, and the durations of each step's parts.
import { get } from "./api.js";
import { lineChart, stackedColumns } from "./chart.js";
import { el, empty, number, runColour } from "./dom.js";

const CHARTS = [
  { title: "Reward", keys: ["reward"] },
  { title: "Held-out accuracy", keys: ["eval.accuracy"], floor: 0 },
  { title: "Response length", unit: "median; dashed: 99 %", keys: ["response_len_p50", "response_len_p99"], floor: 0 },
  { title: "Off-policy tokens", unit: "share of trained tokens", keys: ["off_policy_share"], floor: 0 },
  { title: "Age of the oldest token", unit: "train steps; dashed: largest", keys: ["staleness_mean", "staleness_max"], floor: 0 },
  { title: "Trainer against engine", unit: "mean |logp − mu|; dashed: 99.9 %", keys: ["mismatch_mean", "mismatch_p999"], log: true },
  { title: "Speed", unit: "trained tokens a second", keys: ["tokens_per_s"], floor: 0 },
  { title: "Resumed samples", unit: "of a step", keys: ["resumed_samples"], floor: 0 },
  { title: "Groups with a gradient", keys: ["effective_groups"], floor: 0 },
  { title: "Loss", keys: ["loss"] },
  { title: "Gradient norm", keys: ["grad_norm"], floor: 0 },
  { title: "Truncated responses", unit: "share", keys: ["truncated_share"], floor: 0 },
];
const PARTS = [
  ["rollout", "rollout", "var(--part-rollout)"], ["train", "train", "var(--part-train)"], ["sync", "push", "var(--part-sync)"],
  ["other", "rest of the step", "var(--part-other)"], ["between", "evaluation, checkpoint", "var(--part-between)"],
  ["stopped", "stopped", "var(--part-stopped)", true],
];
let further = "";

export async function overview(main, runs, chosen) {
  const shown = runs.map((run, index) => ({ ...run, index })).filter((run) => chosen.has(run.index));
  if (!shown.length) return main.replaceChildren(empty("No run is selected. Select one above."));
  const names = [...new Set(shown.flatMap((run) => run.metrics))].sort();
  const wanted = [...CHARTS.slice(0, 2), ...setCharts(names), ...CHARTS.slice(2), ...(further ? [{ title: further, keys: [further] }] : [])].filter((c) => c.keys.some((k) => names.includes(k)));
  const curves = await get("curves", { names: [...new Set(wanted.flatMap((c) => c.keys))].join(",") });
  const times = await Promise.all(shown.map((run) => get("timeline", { run: run.index })));
  const live = await Promise.all(shown.map((run) => get("status", { run: run.index })));

  const grid = el("div", { class: "grid" });
  const parts = [...warnings(shown), ...engines(shown, live), el("h2", {}, "Curves")];
  parts.push(...(wanted.length ? [grid, picker(names)] : [empty("No step is complete yet. Curves start with the first step.")]));
  const hosts = shown.map(() => el("div", { class: "chart tall" }));
  if (times.some((steps) => steps.length)) {
    const lanes = shown.map((run, i) => el("div", { class: "card" }, el("h3", {}, run.name), hosts[i]));
    parts.push(el("h2", {}, "Where the time went", el("small", {}, "seconds of each of the last 60 steps")), legend(), el("div", { class: "grid lanes" }, ...lanes));
  }
  main.replaceChildren(...parts);

  for (const chart of wanted) {
    const host = el("div", { class: "chart" });
    const card = el("div", { class: "card" }, el("h3", {}, chart.title, chart.unit ? el("small", {}, chart.unit) : null), host);
    grid.append(card);
    const lines = shown.flatMap((run) => chart.keys.map((key, k) => ({
      name: shown.length > 1 ? run.name + (k ? " (dashed)" : "") : k ? "dashed" : chart.title.toLowerCase(),
      colour: runColour(run.index), dash: k > 0, ...(curves[run.index][key] ?? { x: [], y: [] }),
    })));
    if (!lineChart(host, { lines, log: chart.log, floor: chart.floor ?? null })) host.replaceWith(empty("no values yet"));
  }
  hosts.forEach((host, i) => { if (!stackedColumns(host, times[i], PARTS)) host.replaceWith(empty(shown[i].steps ? "the metrics of these steps have no durations" : "no step is complete yet")); });
}

// One chart for each evaluation set: its accuracy and, dashed, pass@k for the largest k.
function setCharts(names) {
  const sets = names.map((name) => name.match(/^eval\.(.+)\/accuracy$/)?.[1]).filter(Boolean);
  return sets.map((set) => {
    const ks = names.map((name) => (name.startsWith(`eval.${set}/pass_`) ? name.match(/\/pass_(\d+)$/)?.[1] : null)).filter(Boolean).map(Number);
    const most = Math.max(0, ...ks);
    return { title: `Evaluation: ${set}`, unit: most ? `accuracy; dashed: pass@${most}` : "accuracy", keys: [`eval.${set}/accuracy`, ...(most ? [`eval.${set}/pass_${most}`] : [])], floor: 0 };
  });
}

function warnings(shown) {
  return shown.flatMap((run) => run.warnings.toReversed().map((warning) => el("details", { class: "card warning" },
    el("summary", {}, el("b", {}, `${shown.length > 1 ? `${run.name}, ` : ""}step ${warning.step}: `), `${warning.seen}.`),
    el("p", {}, `${warning.cause}. ${warning.knob}.`),
    ...(warning.samples ?? []).map((s) => el("p", { class: "text" }, el("span", { class: "prompt" }, s.prompt), s.response, el("span", { class: "prompt" }, `  reward ${number(s.reward)}`))))));
}

function engines(shown, live) {
  const cards = [];
  shown.forEach((run, i) => {
    const status = live[i];
    if (!run.ended && !Object.keys(status).length) cards.push(el("div", { class: "card" }, el("b", {}, run.name), el("p", { class: "note" }, "This run is not running. The same command continues it.")));
    if (status.silent) cards.push(el("div", { class: "card" }, el("b", {}, run.name), el("p", { class: "note" }, status.silent)));
    for (const [url, engine] of Object.entries(status.engine_figures ?? {})) {
      const words = [`${number(engine.requests)} requests`, `${number(engine.tokens)} tokens`, engine.weight_version === null ? "no push yet" : `weights ${engine.weight_version}`];
      if (engine.state.includes(":")) words.push(engine.state);
      if (engine.deaths) words.push(`died ${engine.deaths} times`);
      cards.push(el("div", { class: "card engine" }, el("b", {}, shown.length > 1 ? `${run.name}: ${url}` : url),
        el("span", { class: `pill ${engine.serving ? "good" : engine.state.startsWith("dead") || engine.state.startsWith("quarantined") ? "bad" : ""}` }, engine.serving ? "serving" : engine.state.split(":")[0]), el("span", { class: "what" }, words.join(" · "))));
    }
    if (status.engine_figures) {
      const facts = [["in flight", status.in_flight], ["parked", status.parked], ["groups ready", status.ready], ["weights", status.weight_version], ["tokens lost", status.lost]];
      cards.push(el("div", { class: "card wide" }, el("b", {}, `${run.name}: samples`),
        el("div", { class: "facts", style: { margin: "4px 0 0" } }, ...facts.map(([name, value]) => el("span", {}, name, el("b", {}, number(value))))),
        status.waiting_for ? el("p", { class: "note" }, `waiting for: ${status.waiting_for}`) : null));
    }
  });
  return cards.length ? [el("h2", {}, "Engines", el("small", {}, "current state")), el("div", { class: "engines" }, ...cards)] : [];
}

function legend() {
  return el("div", { class: "legend" }, ...PARTS.map(([, label, colour]) => el("span", {}, el("span", { class: "swatch", style: { "--swatch": colour } }), label)));
}

function picker(names) {
  const used = new Set(CHARTS.flatMap((c) => c.keys));
  const choice = el("select", { "aria-label": "another metric", onchange: (e) => { further = e.target.value; window.dispatchEvent(new HashChangeEvent("hashchange")); } },
    el("option", { value: "" }, "another metric …"), ...names.filter((n) => !used.has(n)).map((n) => el("option", { value: n, selected: n === further }, n)));
  return el("div", { style: { "max-width": "260px", "margin-top": "12px" } }, choice);
}
