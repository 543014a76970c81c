// The heat map of experts: a row for every layer, a column for every expert, the colour is its load.
//
// It is shown instead of the cluster map, and asks for its numbers only while it is shown. A dot marks an expert whose
// rows are dealt among several places, a frame one that is being loaded into another slot, a cross one without a place.

import { ask } from "./api.js";
import { number, say } from "./words.js";

const EVERY_MS = 1000;
const GAP = 1;

export class ExpertMap {
  constructor(store) {
    this.store = store;
    this.view = document.getElementById("heat");
    this.canvas = document.getElementById("heat-canvas");
    this.words = document.getElementById("heat-words");
    this.choice = document.getElementById("map-choice");
    this.graph = document.getElementById("graph");
    this.map = null;
    this.timer = 0;
    for (const button of this.choice.querySelectorAll("button")) button.addEventListener("click", () => this.show(button.dataset.view === "experts"));
    this.canvas.addEventListener("mousemove", (event) => this.#point(event));
    new ResizeObserver(() => this.draw()).observe(this.view);
    document.addEventListener("visibilitychange", () => this.#ask());
  }

  update() {
    const hasExperts = this.store.cluster?.workers.some((worker) => !worker.roles.includes("attention")) ?? false;
    if (this.choice.hidden === hasExperts) this.choice.hidden = !hasExperts;
    if (!hasExperts && !this.view.hidden) this.show(false);
  }

  show(isShown) {
    for (const button of this.choice.querySelectorAll("button")) button.setAttribute("aria-pressed", String((button.dataset.view === "experts") === isShown));
    this.view.hidden = !isShown;
    this.graph.hidden = isShown;
    for (const keys of document.querySelectorAll("[data-keys]")) keys.hidden = (keys.dataset.keys === "experts") !== isShown;
    this.#ask();
  }

  async #ask() {
    clearTimeout(this.timer);
    if (this.view.hidden || document.hidden) return;
    try {
      const response = await ask("cluster/experts?form=map");
      this.map = await response.json();
      this.draw();
    } catch {
      // The verdict tells what is wrong with the connection; what is shown is the last that was known.
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#ask(), EVERY_MS);
  }

  draw() {
    const { map, canvas, view } = this;
    if (!map || view.hidden) return;
    const numLayers = map.layers.length;
    const numExperts = Math.max(0, ...map.load.map((row) => row.length)); // layers may have different numbers
    const scale = devicePixelRatio;
    const [width, height] = [Math.floor(canvas.clientWidth * scale), Math.floor(canvas.clientHeight * scale)];
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    this.cell = { width: width / Math.max(numExperts, 1), height: height / Math.max(numLayers, 1) };
    const pen = canvas.getContext("2d");
    const colors = Object.fromEntries(["sunk", "ink", "warn", "bad", "largest"].map((name) => [name, colorOf(canvas, `--${name}`)]));
    pen.clearRect(0, 0, width, height);
    const most = Math.max(1e-9, ...map.load.map((row) => Math.max(...row)));
    const [moving, masked] = [map.moving, map.masked].map((pairs) => new Set(pairs.map(([layer, expert]) => layer * numExperts + expert)));
    for (let layer = 0; layer < numLayers; layer++) {
      for (let expert = 0; expert < map.load[layer].length; expert++) {
        const at = layer * numExperts + expert;
        this.#drawCell(pen, colors, layer, expert, map.load[layer][expert] / most, moving.has(at), masked.has(at));
      }
    }
    this.#describe(most);
  }

  #drawCell(pen, colors, layer, expert, share, isMoving, isMasked) {
    const { width, height } = this.cell;
    const gap = Math.min(GAP, width / 4, height / 4);
    const [x, y, w, h] = [expert * width + gap, layer * height + gap, width - 2 * gap, height - 2 * gap];
    pen.globalAlpha = 1;
    pen.fillStyle = colors.sunk;
    pen.fillRect(x, y, w, h);
    pen.globalAlpha = share;
    pen.fillStyle = colors.largest;
    pen.fillRect(x, y, w, h);
    pen.globalAlpha = 1;
    const size = Math.max(1, Math.min(w, h));
    if (isMasked || this.map.places[layer][expert] === 0) {
      pen.strokeStyle = isMasked ? colors.warn : colors.bad;
      pen.beginPath();
      pen.moveTo(x, y);
      pen.lineTo(x + w, y + h);
      pen.moveTo(x + w, y);
      pen.lineTo(x, y + h);
      pen.stroke();
    } else if (this.map.active[layer][expert] > 1) {
      pen.fillStyle = colors.ink;
      pen.beginPath();
      pen.arc(x + w / 2, y + h / 2, Math.min(size / 5, 4), 0, 2 * Math.PI);
      pen.fill();
    }
    if (isMoving) {
      pen.strokeStyle = colors.warn;
      pen.lineWidth = Math.max(1, size / 6);
      pen.strokeRect(x + pen.lineWidth / 2, y + pen.lineWidth / 2, w - pen.lineWidth, h - pen.lineWidth);
      pen.lineWidth = 1;
    }
  }

  #describe(most) {
    const { layers, kinds, load, active, moving, masked, imbalance } = this.map;
    if (!layers.length) return say(this.words, "no experts are known yet");
    const dealt = active.flat().filter((num) => num > 1).length;
    const ratio = imbalance.max_over_mean;
    const layer = load.findIndex((row) => row.includes(most));
    const parts = [
      ratio === null ? "no load" : `busiest worker ${ratio.toFixed(2)} × the mean`,
      layer >= 0 && ratio !== null ? `busiest ${kinds[layer]} ${load[layer].indexOf(most)} of layer ${layers[layer]}, ${number(most)} rows/s` : "",
      dealt ? `${dealt} with several active places` : "",
      moving.length ? `${moving.length} moving` : "",
      masked.length ? `${masked.length} masked` : "",
    ];
    say(this.words, parts.filter(Boolean).join("; "));
    const widest = load.reduce((most, row, i) => (row.length > load[most].length ? i : most), 0);
    const label = `Load of ${load[widest].length} ${kinds[widest]}s in ${layers.length} layers: ${this.words.textContent}`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
  }

  #point(event) {
    if (!this.map?.layers.length) return;
    const scale = devicePixelRatio;
    const [layer, expert] = [Math.floor((event.offsetY * scale) / this.cell.height), Math.floor((event.offsetX * scale) / this.cell.width)];
    const load = this.map.load[layer]?.[expert];
    if (load === undefined) return;
    const [places, active] = [this.map.places[layer][expert], this.map.active[layer][expert]];
    this.canvas.title = `layer ${this.map.layers[layer]}, ${this.map.kinds[layer]} ${expert}: ${number(load)} rows/s, ${places} place${places === 1 ? "" : "s"}, ${Math.min(active, places)} active`;
  }
}

/** A custom property, as a colour that a canvas understands. */
function colorOf(canvas, name) {
  const before = canvas.style.color;
  canvas.style.color = `var(${name})`;
  const color = getComputedStyle(canvas).color;
  canvas.style.color = before;
  return color;
}
