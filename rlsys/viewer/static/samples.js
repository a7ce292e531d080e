// The views of samples: a list with filters, one sample token by token, and the samples of a group side by side.
import { get } from "./api.js";
import { el, empty, number } from "./dom.js";

const VIEWS = {
  version: "weight version", gap: "log-prob gap", advantage: "advantage",
};

export async function samples(main, runs, query) {
  const run = Math.min(Number(query.get("run") ?? 0), runs.length - 1);
  const asked = Object.fromEntries(query);
  const all = ["step", "group", "order", "status", "resumed", "grep"].every((key) => !asked[key]);
  const found = await get("samples", { ...asked, run });
  if (all && found.last && !asked.skip && !asked.whole) return samples(main, runs, new URLSearchParams({ ...asked, step: found.last }));
  const list = el("div", { class: "rows" }, ...found.samples.map((sample) => row(run, sample)));
  const parts = [filter(runs, run, asked, found.last)];
  if (asked.group) parts.push(el("p", { class: "note" }, el("a", { href: `#/group?${new URLSearchParams({ run, group: asked.group })}` }, "see this group side by side")));
  parts.push(found.samples.length ? list : empty(nothing(asked, found)));
  if (found.next !== null) {
    const words = found.samples.length ? "further samples" : `${number(found.looked)} searched; search on`;
    parts.push(el("p", { class: "more" }, el("a", { href: link({ ...asked, run, skip: found.next }) }, el("button", { type: "button" }, words))));
  }
  main.replaceChildren(...parts);
}

function nothing(asked, found) {
  if (asked.skip) return "There are no further samples.";
  if (!found.last && !asked.status) return "No step has taken samples yet. Select the status parked for unfinished samples.";
  return "No sample matches the filter.";
}

const link = (asked) => `#/samples?${new URLSearchParams(Object.fromEntries(Object.entries(asked).filter(([, v]) => v !== undefined && v !== "" && v !== null)))}`;

function filter(runs, run, asked, last) {
  const option = (chosen) => ([value, label]) => el("option", { value, selected: String(chosen ?? "") === value }, label);
  const submit = (event) => {
    event.preventDefault();
    const told = Object.fromEntries(new FormData(event.currentTarget));
    location.hash = link({ ...told, whole: told.step === "" ? "1" : "" });
  };
  const form = el("form", { class: "filter", onsubmit: submit },
    runs.length > 1 ? el("label", {}, "run", el("select", { name: "run" }, ...runs.map((r, i) => option(run)([String(i), r.name])))) : null,
    el("label", {}, last ? `step, 1 to ${last}` : "step", el("input", { name: "step", type: "number", min: 1, max: last || 1, placeholder: "all", value: asked.step })),
    el("label", {}, "group", el("input", { name: "group", type: "number", min: 0, placeholder: "all", value: asked.group })),
    el("label", {}, "order", el("select", { name: "order" }, ...[["", "newest"], ["worst", "lowest reward"], ["best", "highest reward"], ["longest", "longest"]].map(option(asked.order)))),
    el("label", {}, "status", el("select", { name: "status" }, ...[["", "any"], ["parked", "parked"], ["finished", "finished"], ["truncated", "truncated"], ["censored", "censored"]].map(option(asked.status)))),
    el("label", { class: "wide" }, "response has (regular expression)", el("input", { name: "grep", type: "text", value: asked.grep, spellcheck: "false" })),
    el("label", { class: "check" }, el("input", { name: "resumed", type: "checkbox", value: "1", checked: asked.resumed === "1" }), "resumed"),
    el("button", { class: "first" }, "Show"));
  form.addEventListener("change", (event) => { if (event.target.matches("select, [type=checkbox]")) form.requestSubmit(); });
  return form;
}

function row(run, sample) {
  return el("a", { class: "card row", href: `#/sample?${new URLSearchParams({ run, sample: sample.sample })}` },
    top(sample), el("p", { class: "text prompt clip" }, sample.prompt),
    sample.kept ? el("p", { class: "text clip" }, sample.response) : el("p", { class: "note" }, "The response is no longer stored (rollout.keep_groups)."), strip(sample));
}

// The heading of a sample. `alone`: no other heading names its step and group.
function top(sample, alone = true) {
  const words = [
    alone ? (sample.step === null ? `group ${sample.group}, ${sample.fate}` : `${sample.fate}, group ${sample.group}`) : null, `sample ${sample.sample}`, `${number(sample.tokens)} tokens`,
    sample.turns > 1 ? `${sample.turns} turns` : null, sample.answer === null ? null : `answer ${sample.answer}`,
    sample.resumes ? `resumed ${sample.resumes === 1 ? "once" : `${sample.resumes} times`}` : null,
    sample.advantage === null || sample.advantage === undefined ? null : `advantage ${number(sample.advantage)}`,
  ];
  const good = { finished: "good", censored: "bad" }[sample.status] ?? "";
  return el("div", { class: "top" }, el("span", { class: "reward" }, sample.reward === null ? "no reward" : `reward ${number(sample.reward)}`),
    el("span", { class: `pill ${good}` }, sample.status), ...words.filter(Boolean).map((word) => el("span", {}, word)));
}

const versionsOf = (sample) => [...new Set(sample.parts.map((part) => part.version))].sort((a, b) => a - b);
const classOf = (sample, part) => (part.tool ? "tool" : `v-${versionsOf(sample).indexOf(part.version) % 8}`);

// The token numbers of a part, counted from 0, including the last one.
const tokensOf = (part) => (part.end - part.start === 1 ? `token ${part.start}` : `tokens ${part.start}–${part.end - 1}`);

function strip(sample) {
  if (sample.parts.length < 2) return null;
  return el("div", { class: "strip", title: "tokens by weight version" }, ...sample.parts.map((part) => el("i", { class: classOf(sample, part), style: { flex: `${part.end - part.start} 0 0` } })));
}

export async function sample(main, runs, query) {
  const run = Number(query.get("run") ?? 0);
  const found = await get("sample", { run, sample: query.get("sample"), from: query.get("from") });
  let view = "version";
  const text = el("p", { class: "text tokens" });
  const key = el("div", { class: "legend" });
  const tabs = el("div", { class: "tabs" }, ...Object.entries(VIEWS).map(([name, label]) => el("button", { type: "button", "data-view": name, onclick: () => show(name) }, label)));
  const show = (name) => {
    view = name;
    for (const tab of tabs.children) tab.classList.toggle("here", tab.dataset.view === view);
    text.replaceChildren(...tokens(found, view));
    key.replaceChildren(...explain(found, view));
  };
  const rewards = Object.entries(found.rewards ?? {}).map(([name, value]) => el("span", {}, name, el("b", {}, number(value))));
  main.replaceChildren(
    el("p", { class: "note" }, el("a", { href: link({ run, step: found.step ?? "", status: found.step === null ? "parked" : "" }) }, "samples"), " / ",
      el("a", { href: `#/group?${new URLSearchParams({ run, group: found.group })}` }, `group ${found.group}, side by side`), runs.length > 1 ? ` / ${runs[run].name}` : ""),
    el("div", { class: "card" }, top(found), rewards.length ? el("div", { class: "facts" }, ...rewards) : null,
      found.reason ? el("p", { class: "note" }, found.reason) : null,
      el("h2", { style: { "margin-top": "16px" } }, "Prompt"), el("p", { class: "text prompt" }, found.prompt),
      el("h2", {}, "Response", el("small", {}, "coloured by")), tabs, key,
      found.kept ? text : el("p", { class: "note" }, "The response is no longer stored: no checkpoint needs it, and rollout.keep_groups keeps only a few groups of each step.")),
    found.from + found.pieces.length < found.tokens && found.kept
      ? el("p", { class: "more" }, el("a", { href: `#/sample?${new URLSearchParams({ run, sample: found.sample, from: found.from + found.pieces.length })}` }, el("button", { type: "button" }, `tokens from ${number(found.from + found.pieces.length)} on, of ${number(found.tokens)}`)))
      : "");
  show("version");
}

function tokens(found, view) {
  const out = [];
  const interrupted = new Map(found.interrupts);
  const largest = Math.max(1e-9, ...found.advantages.map((a) => Math.abs(a ?? 0)));
  found.pieces.forEach((piece, i) => {
    const at = found.from + i;
    const part = found.parts.find((p) => p.start <= at && at < p.end) ?? found.parts.at(-1);
    if (interrupted.has(at)) out.push(el("span", { class: "cut", title: `the engine call was interrupted after ${at} tokens, with weight version ${interrupted.get(at)}` }, "interrupted"));
    const mu = found.mu[i], logp = found.logp[i], advantage = found.advantages[i];
    const gap = logp === undefined || logp === null || part.tool ? null : logp - mu;
    const facts = [`token ${at}`, part.tool ? "a tool's" : `weights ${part.version}`, part.tool ? null : `mu ${number(mu)}`, gap === null ? null : `logp - mu ${number(gap)}`, advantage === undefined || advantage === null ? null : `advantage ${number(advantage)}`];
    const token = el("span", { title: facts.filter(Boolean).join("\n") }, piece);
    if (view === "version") token.className = classOf(found, part);
    else if (view === "gap" && gap !== null) token.style.background = shade(gap, 1e-7, 1);
    else if (view === "advantage" && advantage) token.style.background = `rgba(var(--${advantage > 0 ? "plus" : "minus"}), ${0.12 + 0.4 * Math.abs(advantage) / largest})`;
    else if (part.tool) token.className = "tool";
    out.push(token);
  });
  if (interrupted.has(found.tokens)) out.push(el("span", { class: "cut", title: `after ${found.tokens} tokens` }, "parked"));
  return out;
}

// The shade is logarithmic, because gaps range from rounding errors to several nats.
function shade(gap, least, most) {
  const size = Math.abs(gap);
  if (size <= least) return "transparent";
  const share = Math.min(1, Math.log10(size / least) / Math.log10(most / least));
  return `rgba(var(--${gap > 0 ? "plus" : "minus"}), ${(0.06 + 0.55 * share).toFixed(3)})`;
}

function explain(found, view) {
  if (view === "version") {
    return found.parts.map((part) => el("span", {}, el("span", { class: `swatch ${classOf(found, part)}` }),
      part.tool ? `tool, ${tokensOf(part)}` : `weights ${part.version} (${part.trained_steps ?? "?"} train steps), ${tokensOf(part)}`));
  }
  const values = view === "gap" ? found.logp : found.advantages;
  if (!values.length) return [document.createTextNode(view === "gap" ? "The trainer's log-probs of this sample are not stored: it is not trained yet, has no gradient, or is not in the first groups of its step." : "The advantage of this sample is not stored: it is not trained yet, all rewards of its group are equal, or it is not in the first groups of its step.")];
  if (view === "advantage") return [el("span", {}, "green: the step makes the token more probable; red: less probable")];
  const gaps = found.logp.map((logp, i) => (logp === null || found.mu[i] === null ? null : Math.abs(logp - found.mu[i]))).filter((g) => g !== null);
  const mean = gaps.reduce((a, b) => a + b, 0) / Math.max(1, gaps.length);
  return [el("span", {}, `trainer's log-prob minus the engine's (mu), before the step (green: more probable for the trainer); mean |gap| ${number(mean)}, largest ${number(Math.max(...gaps))} nats`)];
}

export async function group(main, runs, query) {
  const run = Number(query.get("run") ?? 0);
  const listed = await get("samples", { run, group: query.get("group"), skip: query.get("skip") });
  const found = await Promise.all(listed.samples.map((s) => get("sample", { run, sample: s.sample })));
  found.sort((a, b) => a.place - b.place);
  if (!found.length) return main.replaceChildren(empty("This group has no tokens yet."));
  const mean = found.filter((s) => s.reward !== null).reduce((sum, s, _, all) => sum + s.reward / all.length, 0);
  main.replaceChildren(
    el("h2", {}, `Group ${found[0].group}`, el("small", {}, `${found.length} samples, mean reward ${number(mean)}${found[0].step === null ? "" : `, trained by step ${found[0].step}`}`)),
    el("p", { class: "text prompt", style: { "margin-bottom": "12px" } }, found[0].prompt),
    el("div", { class: "columns" }, ...found.map((s) => el("div", { class: "card" }, top(s, false),
      el("p", { class: "text tokens" }, ...(s.kept ? tokens(s, "version") : ["The response is no longer stored."])),
      el("p", { class: "note" }, el("a", { href: `#/sample?${new URLSearchParams({ run, sample: s.sample })}` }, "token by token"))))),
    listed.next === null ? "" : el("p", { class: "more" }, el("a", { href: `#/group?${new URLSearchParams({ run, group: query.get("group"), skip: listed.next })}` }, el("button", { type: "button" }, "further samples"))));
}
