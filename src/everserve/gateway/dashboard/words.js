// Numbers and times for people.

const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const number = (value) => whole.format(Math.round(value));

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 10 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

export const time = (unix_s) => clock.format(unix_s * 1000);

export function ago(seconds) {
  if (seconds < 2) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

/** Sets text only if it differs: what does not change costs nothing, and is not read out again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function makeSvg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function glyph(name) {
  const svg = makeSvg("svg", { class: "glyph", "aria-hidden": "true" });
  svg.append(makeSvg("use", { href: `#g-${name}` }));
  return svg;
}

export function setGlyph(svg, name) {
  const use = svg.firstElementChild;
  if (use.getAttribute("href") !== `#g-${name}`) use.setAttribute("href", `#g-${name}`);
}
