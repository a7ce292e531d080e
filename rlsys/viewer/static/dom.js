// Creates elements from data. Text is always set as text, so that the output of a model is never HTML.
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

// 12345.678 -> "12,346"; 0.001234 -> "0.00123"; 1.2e-7 -> "1.2e-7"
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

export const runColour = (index) => `var(--run-${index % 6})`;
export const empty = (text) => el("p", { class: "empty" }, text);
