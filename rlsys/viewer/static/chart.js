// Small SVG charts: lines of several runs, and stacked columns. A chart is drawn again when its size changes.
import { el, number, svg } from "./dom.js";

const MARGIN = { left: 46, right: 8, top: 8, bottom: 20 };

function stepOf(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * (1 - 1e-9));
}

function ticks(low, high, most, step = stepOf(low, high, most)) {
  if (!(high > low)) return [low];
  const out = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) out.push(Math.abs(at) < step * 1e-9 ? 0 : Number(at.toPrecision(12)));
  return out;
}

function frame(host, draw) {
  const canvas = svg("svg", { role: "img" });
  const tip = el("div", { class: "tip", hidden: true });
  host.append(canvas, tip);
  let move = null;
  const redraw = () => {
    const width = host.clientWidth, height = host.clientHeight;
    if (!width) return;
    canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
    canvas.replaceChildren();
    move = draw(canvas, width, height);
  };
  const away = () => { tip.hidden = true; canvas.querySelector(".cursor")?.remove(); };
  host.addEventListener("pointermove", (event) => {
    if (!move) return;
    const box = host.getBoundingClientRect();
    const point = move(event.clientX - box.left);
    if (!point) return away();
    tip.replaceChildren(...point.lines);
    tip.hidden = false;
    const onRight = point.x > box.width / 2;
    tip.style.left = onRight ? "auto" : `${point.x + 10}px`;
    tip.style.right = onRight ? `${box.width - point.x + 10}px` : "auto";
    canvas.querySelector(".cursor")?.remove();
    canvas.append(svg("line", { class: "cursor", x1: point.x, x2: point.x, y1: MARGIN.top, y2: box.height - MARGIN.bottom }));
  });
  host.addEventListener("pointerleave", away);
  new ResizeObserver(redraw).observe(host);
  return redraw;
}

function axes(canvas, width, height, xs, ys, xOf, yOf, format) {
  for (const y of ys) {
    canvas.append(svg("line", { class: "rule", x1: MARGIN.left, x2: width - MARGIN.right, y1: yOf(y), y2: yOf(y) }));
    const label = svg("text", { x: MARGIN.left - 6, y: yOf(y) + 4, "text-anchor": "end" });
    label.textContent = format(y);
    canvas.append(label);
  }
  for (const x of xs) {
    const label = svg("text", { x: xOf(x), y: height - 4, "text-anchor": "middle" });
    label.textContent = number(x);
    canvas.append(label);
  }
}

// Draws a line chart. Returns whether there is a value to draw.
// lines: [{name, colour, dash, x: [], y: []}]; log: whether the y axis is logarithmic; floor: largest start of the y axis.
export function lineChart(host, { lines, log = false, floor = null }) {
  const drawn = lines.map((line) => {
    const pairs = line.x.map((x, i) => [x, line.y[i]]).filter(([, y]) => y !== null && Number.isFinite(y) && (!log || y > 0));
    return { ...line, pairs };
  }).filter((line) => line.pairs.length);
  if (!drawn.length) return false;
  const all = drawn.flatMap((line) => line.pairs);
  const xLow = Math.min(...all.map(([x]) => x)), xHigh = Math.max(...all.map(([x]) => x));
  const scale = log ? Math.log10 : (v) => v;
  let low = Math.min(...all.map(([, y]) => scale(y))), high = Math.max(...all.map(([, y]) => scale(y)));
  if (floor !== null && !log) low = Math.min(low, floor);
  if (high === low) { high += Math.abs(high) * 0.1 || 1; if (floor === null || low > floor) low -= Math.abs(low) * 0.1 || 1; }
  if (log) low = Math.max(low, high - 4); // otherwise a single tiny value would press all others into one line
  const step = stepOf(low, high, 4);
  if (!log) {
    [low, high] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  }
  frame(host, (canvas, width, height) => {
    const inner = width - MARGIN.left - MARGIN.right, tall = height - MARGIN.top - MARGIN.bottom;
    const xOf = (x) => MARGIN.left + (xHigh === xLow ? inner / 2 : ((x - xLow) / (xHigh - xLow)) * inner);
    const yRaw = (v) => MARGIN.top + (1 - (v - low) / (high - low)) * tall;
    const yOf = (y) => yRaw(Math.max(low, scale(y)));
    const whole = ticks(xLow, xHigh, Math.max(2, inner / 70)).filter(Number.isInteger);
    if (log) {
      const tens = ticks(low, high, 4).filter(Number.isInteger);
      const marks = tens.length ? tens : [low, high];
      axes(canvas, width, height, whole, marks, xOf, yRaw, (p) => (Number.isInteger(p) ? `1e${p}` : number(10 ** p)));
    } else axes(canvas, width, height, whole, ticks(low, high, 4, step), xOf, yOf, number);
    for (const line of drawn) {
      const points = line.pairs.map(([x, y]) => `${xOf(x).toFixed(1)},${yOf(y).toFixed(1)}`);
      const stroke = { fill: "none", style: { stroke: line.colour }, "stroke-width": line.dash ? 1.3 : 1.8, "stroke-linejoin": "round" };
      if (line.dash) stroke["stroke-dasharray"] = "4 3";
      canvas.append(svg("polyline", { points: points.join(" "), ...stroke }));
      if (line.pairs.length <= 30) {
        for (const [x, y] of line.pairs) canvas.append(svg("circle", { cx: xOf(x), cy: yOf(y), r: line.dash ? 1.6 : 2.4, style: { fill: line.colour } }));
      }
    }
    const steps = [...new Set(all.map(([x]) => x))].sort((a, b) => a - b);
    return (at) => {
      const x = steps.reduce((best, s) => (Math.abs(xOf(s) - at) < Math.abs(xOf(best) - at) ? s : best));
      const rows = [el("div", {}, `step ${number(x)}`)];
      for (const line of drawn) {
        const hit = line.pairs.find(([step]) => step === x);
        if (hit) rows.push(el("div", {}, el("span", { class: "swatch", style: { "--swatch": line.colour } }), `${line.name} ${number(hit[1])}`));
      }
      return { x: xOf(x), lines: rows };
    };
  })();
  return true;
}

// Draws stacked columns. Returns whether there is a column to draw.
// columns: [{step, name: seconds, ...}]; parts: [[key, label, colour, cut]]. A part with `cut` does not extend the axis,
// because seconds would be invisible next to hours. A column that exceeds the axis is cut off, and labelled with its sum.
export function stackedColumns(host, columns, parts) {
  if (!columns.length) return false;
  const sums = columns.map((c) => parts.reduce((sum, [key]) => sum + c[key], 0));
  const worked = columns.map((c) => parts.reduce((sum, [key, , , cut]) => sum + (cut ? 0 : c[key]), 0));
  const high = Math.min(Math.max(...sums), 1.5 * Math.max(...worked) || Infinity) || 1;
  frame(host, (canvas, width, height) => {
    const inner = width - MARGIN.left - MARGIN.right, tall = height - MARGIN.top - MARGIN.bottom;
    const slot = inner / columns.length, wide = Math.max(1, Math.min(46, slot * 0.76));
    const xOf = (i) => MARGIN.left + slot * (i + 0.5);
    const yOf = (s) => MARGIN.top + (1 - s / high) * tall;
    const every = Math.ceil(columns.length / Math.max(1, inner / 44));
    axes(canvas, width, height, [], ticks(0, high, 4), xOf, yOf, (s) => `${number(s)} s`);
    columns.forEach((column, i) => {
      if (i % every === 0) {
        const label = svg("text", { x: xOf(i), y: height - 4, "text-anchor": "middle" });
        label.textContent = number(column.step);
        canvas.append(label);
      }
      let at = 0;
      for (const [key, , colour] of parts) {
        if (!(column[key] > 0)) continue;
        const top = yOf(Math.min(high, at + column[key]));
        canvas.append(svg("rect", { x: xOf(i) - wide / 2, y: top, width: wide, height: Math.max(0.5, yOf(at) - top), style: { fill: colour } }));
        at += column[key];
      }
      if (sums[i] <= high) return;
      const label = svg("text", { class: "beyond", x: xOf(i), y: MARGIN.top + 13, "text-anchor": "middle" });
      label.textContent = `${number(Math.round(sums[i]))} s`;
      canvas.append(label);
    });
    return (at) => {
      const i = Math.floor((at - MARGIN.left) / slot);
      if (i < 0 || i >= columns.length) return null;
      const rows = [el("div", {}, `step ${number(columns[i].step)}, ${number(sums[i])} s`)];
      for (const [key, label, colour] of parts) {
        if (columns[i][key] > 0.005) rows.push(el("div", {}, el("span", { class: "swatch", style: { "--swatch": colour } }), `${label} ${number(columns[i][key])} s`));
      }
      return { x: xOf(i), lines: rows };
    };
  })();
  return true;
}
