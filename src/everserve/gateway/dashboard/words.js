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

/** What is said of a word while the pointer rests on it: elements with `data-term` have the title of that name. */
const TERMS = {
  rate: "Tokens of all streams, in the last second",
  gap: "The longest that any stream has waited for its next tokens, in the last ten seconds",
  streams: "Texts that are being written, or wait for a worker",
  epoch: "The version of the list of workers and of the routes to experts: every change has the next number",
  p50: "Half of all waits for the next tokens of a stream were shorter. Tokens that came together count as one wait",
  p99: "99 of 100 waits for the next tokens of a stream were shorter",
  largest: "The longest wait for the next tokens of a stream that ended at this moment",
  waiting: "How long the stream that waits longest has waited by now",
  gateway: "Serves HTTP, and has the tokens of every stream. Its death ends the instance",
  orchestrator: "Decides which workers belong to the cluster, and which of them serves what. Streams go on without it",
  anchor: "Makes the memory that has to outlive workers",
  zygote: "New workers are forked from it: everything is imported already, so a replacement takes milliseconds",
  incarnation: "Counts the processes of this rank: 2 is the first replacement",
  attention: "Attention workers own streams and their KV",
  expert: "Expert workers hold experts, or slices of FFNs, and keep nothing between two requests",
  slots: "Places for the weights of one expert, in each layer",
  active: "Serves its expert",
  standin: "A shadow that serves now, because the active place is gone",
  shadow: "A copy of another worker's expert, which serves when that worker is gone",
  loading: "Its worker is starting",
  gone: "Its worker is gone",
};

export function explain(element, term) {
  if (element.dataset.term === term && element.title) return;
  element.dataset.term = term;
  element.title = TERMS[term];
}

export function explainAll() {
  for (const element of document.querySelectorAll("[data-term]")) element.title = TERMS[element.dataset.term];
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
