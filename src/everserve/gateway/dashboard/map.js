// The map of the cluster: a card for every process, lines between those that talk to each other.
//
// Cards are made once per seat and changed in place, so that the focus stays where it is while workers come and go.

import { explain, glyph, make, makeSvg, say, setGlyph } from "./words.js";

const MAX_SQUARES = 64; // slots of a worker that are drawn one by one; beyond, a square stands for several
const MAX_LANES = 20; // beyond, lanes are drawn as one trunk
const HELPERS = ["orchestrator", "anchor", "zygote"];

export class ClusterMap {
  constructor(store, onKill) {
    this.store = store;
    this.onKill = onKill;
    this.graph = document.getElementById("graph");
    this.lines = document.getElementById("lines");
    this.columns = ["control", "attention", "expert"].map((name) => document.getElementById(`nodes-${name}`));
    this.cards = new Map(); // by key: "w3", "gateway"
    this.drawn = "";
    new ResizeObserver(() => this.#drawLines()).observe(this.graph);
  }

  update() {
    const { cluster, hello } = this.store;
    if (!cluster || !hello) return;
    const wanted = new Set();
    const show = (key, column, subject, fill) => {
      wanted.add(key);
      const card = this.cards.get(key) ?? this.#makeCard(key, column, subject);
      card.subject = subject;
      fill(card);
    };
    const processes = new Map(cluster.processes.map((process) => [process.name, process]));
    show("gateway", 0, { process: "gateway" }, (card) => fillGateway(card, processes.get("gateway"), this.store));
    for (const name of HELPERS) show(name, 0, { process: name }, (card) => fillHelper(card, name, processes.get(name)));
    const experts = cluster.workers.filter((worker) => worker.slots > 0);
    for (const worker of cluster.workers) {
      const column = worker.roles.includes("attention") ? 1 : 2;
      show(`w${worker.rank}`, column, { rank: worker.rank }, (card) => fillWorker(card, worker, standIns(worker, experts)));
    }
    for (const [key, card] of this.cards) {
      if (wanted.has(key)) continue;
      card.root.remove();
      this.cards.delete(key);
    }
    for (const column of this.columns.slice(1)) column.classList.toggle("many", column.childElementCount > 4);
    // The gateway gets no signals: it would have to answer for its own death.
    for (const [key, card] of this.cards) card.kill.hidden = !hello.enable_chaos || key === "gateway";
    const states = cluster.workers.map((worker) => `${worker.rank}${worker.state}${worker.requests > 0}`).join();
    if (states !== this.drawn) {
      this.drawn = states;
      this.#drawLines();
    }
  }

  #makeCard(key, column, subject) {
    const card = {
      glyph: glyph("unknown"),
      name: make("b"),
      state: make("span", { className: "state" }),
      kill: make("button", { type: "button", className: "kill", textContent: "Kill" }),
      meta: make("span", { className: "meta" }),
      load: make("div", { className: "load" }),
      slots: make("div", { className: "slots" }),
      note: make("p", { className: "note" }),
      column,
      subject,
    };
    const title = make("span", { className: "title" }, card.glyph, card.name, card.state);
    card.root = make("li", { className: `node ${["control", "attention", "expert"][column]}` });
    card.root.append(make("div", { className: "head" }, title, card.meta, card.kill), card.load, card.slots, card.note);
    card.root.dataset.key = key;
    card.kill.addEventListener("click", () => this.onKill(card.subject, card.name.textContent, card.pid));
    if (HELPERS.includes(key)) card.root.classList.add("helper");
    explain(card.name, subject.process ?? ["", "attention", "expert"][column]);
    this.cards.set(key, card);
    this.columns[column].append(card.root);
    return card;
  }

  #drawLines() {
    const { cluster } = this.store;
    if (!cluster) return;
    const box = this.graph.getBoundingClientRect();
    const [x0, y0] = [box.left - this.graph.scrollLeft, box.top - this.graph.scrollTop];
    const place = (key) => {
      const card = this.cards.get(key);
      if (!card) return null;
      const r = card.root.getBoundingClientRect();
      return { left: r.left - x0, right: r.right - x0, top: r.top - y0, bottom: r.bottom - y0, y: (r.top + r.bottom) / 2 - y0 };
    };
    const attention = cluster.workers.filter((worker) => worker.roles.includes("attention"));
    const experts = cluster.workers.filter((worker) => !worker.roles.includes("attention"));
    const paths = [];
    const add = (from, to, kind) => from && to && paths.push([curve(from, to), kind]);
    for (const worker of attention) add(place("gateway"), place(`w${worker.rank}`), kindOf(worker));
    if (attention.length * experts.length <= MAX_LANES) {
      for (const a of attention) for (const e of experts) add(place(`w${a.rank}`), place(`w${e.rank}`), kindOf(a, e));
    } else {
      paths.push(...trunk(attention, experts, (worker) => place(`w${worker.rank}`)));
    }
    this.lines.replaceChildren(...paths.map(([d, kind]) => makeSvg("path", { d, class: kind })));
  }
}

function fillGateway(card, process, store) {
  const num = store.latest?.num_streams ?? 0;
  fillHead(card, "gateway", process ? "ready" : "gone", process?.pid, "");
  say(card.load, `${num} stream${num === 1 ? "" : "s"} in all`);
}

function fillHelper(card, name, process) {
  fillHead(card, name, process ? "ready" : "starting", process?.pid, process ? "" : "starting");
}

function fillWorker(card, worker, standIn) {
  const isBoth = worker.roles.length > 1;
  const name = isBoth ? `worker ${worker.rank}` : `${worker.roles[0]} ${worker.rank}`;
  fillHead(card, name, worker.state, worker.pid, worker.state, worker.incarnation > 1 ? `incarnation\u00a0${worker.incarnation}` : "");
  if (worker.roles.includes("attention")) fillLoad(card, worker);
  if (worker.slots > 0) fillSlots(card, worker, standIn);
  say(card.note, worker.note);
  if (card.note.title !== worker.note) card.note.title = worker.note;
}

function fillHead(card, name, state, pid, word, incarnation = "") {
  setGlyph(card.glyph, state);
  card.root.dataset.state = state;
  say(card.name, name);
  say(card.state, word);
  say(card.meta, [pid ? `pid ${pid}` : "no process", incarnation].filter(Boolean).join(" · "));
  if (incarnation) explain(card.meta, "incarnation");
  card.pid = pid;
  const label = `Kill ${name}`;
  if (card.kill.getAttribute("aria-label") !== label) card.kill.setAttribute("aria-label", label);
  const disabled = !pid;
  if (card.kill.disabled !== disabled) card.kill.disabled = disabled;
}

function fillLoad(card, worker) {
  if (!card.bar) {
    card.bar = make("i");
    card.streams = make("span");
    card.kv = make("span", { className: "kv" });
    const meter = make("span", { className: "meter" }, card.bar);
    card.load.append(card.streams, meter, card.kv);
  }
  const percent = 100 * worker.kv_cache_usage;
  say(card.streams, `${worker.requests} stream${worker.requests === 1 ? "" : "s"}`);
  say(card.kv, `KV ${percent < 10 ? percent.toFixed(1) : percent.toFixed(0)} %`);
  card.bar.style.width = `${Math.min(100, percent)}%`;
}

/** How many of a worker's shadows work now, because the places that they stand for are gone. */
function standIns(worker, experts) {
  const serves = experts.filter((e) => e.state === "ready");
  const missing = experts.filter((e) => e.state !== "ready" && e.state !== "leaving").reduce((sum, e) => sum + e.slots - e.shadow_slots, 0);
  return worker.state === "ready" && serves.length ? Math.min(worker.shadow_slots, Math.ceil(missing / serves.length)) : 0;
}

function fillSlots(card, worker, standIn) {
  const active = worker.slots - worker.shadow_slots;
  const shown = `${worker.state} ${active} ${worker.shadow_slots} ${standIn}`;
  if (card.shown === shown) return;
  card.shown = shown;
  const runs =
    worker.state === "starting" ? [["loading", worker.slots]]
    : worker.state === "gone" ? [["gone", worker.slots]]
    : [["active", active], ["standin", standIn], ["shadow", worker.shadow_slots - standIn]];
  const perSquare = Math.ceil(worker.slots / MAX_SQUARES);
  const squares = runs.flatMap(([kind, count]) => Array.from({ length: Math.ceil(count / perSquare) }, () => make("i", { className: `slot ${kind}` })));
  const words = runs.filter(([, count]) => count).map(([kind, count]) => `${count} ${kind === "standin" ? "standing in" : kind}`);
  const grid = make("span", { className: "squares" }, ...squares);
  grid.setAttribute("aria-hidden", "true");
  card.slots.replaceChildren(grid, make("span", { className: "words", textContent: words.join(", ") }));
}

function kindOf(...workers) {
  for (const state of ["gone", "starting", "leaving"]) if (workers.some((worker) => worker.state === state)) return state;
  return workers.some((worker) => worker.roles.includes("attention") && worker.requests > 0) ? "busy" : "ready";
}

/** Side by side: from edge to edge. One above the other: along the left edge, so that no card is crossed. */
function curve(from, to) {
  if (to.left >= from.right) {
    const middle = (from.right + to.left) / 2;
    return `M${from.right} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.left} ${to.y}`;
  }
  const x = to.left - 6;
  return `M${from.left + 14} ${from.bottom}V${from.bottom + 5}H${x}V${to.y}H${to.left}`;
}

/** Too many lanes to tell them apart: one line that all are joined to. */
function trunk(attention, experts, placeOf) {
  const [from, to] = [attention.map(placeOf), experts.map(placeOf)];
  const x = (Math.max(...from.map((p) => p.right)) + Math.min(...to.map((p) => p.left))) / 2;
  const ys = [...from, ...to].map((p) => p.y);
  const joins = (workers, places, side) => workers.map((worker, i) => [`M${places[i][side]} ${places[i].y}H${x}`, kindOf(worker)]);
  return [[`M${x} ${Math.min(...ys)}V${Math.max(...ys)}`, "ready"], ...joins(attention, from, "right"), ...joins(experts, to, "left")];
}
