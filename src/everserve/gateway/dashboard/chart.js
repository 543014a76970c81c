// Tokens per second above, times between tokens below, one time axis; faults and recoveries as marks across both.

import { explain, ms, number, time } from "./words.js";

const SERIES = [
  { name: "rate", label: "tokens/s", color: "--rate", plot: 0, width: 1.75, format: number },
  { name: "p50", label: "between tokens p50", color: "--p50", plot: 1, width: 1.5, format: ms },
  { name: "p99", label: "p99", color: "--p99", plot: 1, width: 1.5, dash: [5, 3], format: ms },
  { name: "largest", label: "largest gap", color: "--largest", plot: 1, width: 0, points: true, format: ms },
  { name: "waiting", label: "waiting now", color: "--bad", plot: 1, width: 2.5, dash: [2, 3], format: ms },
];
const AXIS_WIDTH = 52;
const DECADES = [1, 10, 100, 1000, 10000, 100000, 1000000];
const PLOTS = ["plot-rate", "plot-gaps"];

export class Chart {
  constructor(store) {
    this.store = store;
    this.window_s = 60;
    this.plots = [];
    this.hovered = null;
    this.values = [];
    this.box = document.getElementById("plots");
    this.#makeLegend();
    this.rebuild();
    new ResizeObserver(() => this.#resize()).observe(this.box);
    this.box.addEventListener("keydown", (event) => this.#onKey(event));
    this.box.addEventListener("blur", () => this.#hover(null));
  }

  show(window_s) {
    this.window_s = window_s;
    this.update();
  }

  /** Colours come from the style sheet: when the theme changes, the plots are made again. */
  rebuild() {
    const probe = document.createElement("i");
    this.box.append(probe);
    this.color = (name) => {
      probe.style.color = `var(${name})`;
      return getComputedStyle(probe).color;
    };
    this.colors = Object.fromEntries(
      ["--ink", "--muted", "--line", "--ok", "--bad", "--warn", "--panel", ...SERIES.map((s) => s.color)].map((name) => [name, this.color(name)]),
    );
    probe.remove();
    for (const plot of this.plots) plot.destroy();
    this.plots = PLOTS.map((id, index) => this.#makePlot(document.getElementById(id), index));
    this.update();
  }

  update() {
    const time = this.store.column("time");
    this.plots.forEach((plot, index) => {
      plot.setData([time, ...SERIES.filter((s) => s.plot === index).map((s) => this.store.column(s.name))]);
    });
    this.#showValues();
  }

  #makePlot(element, index) {
    const series = SERIES.filter((s) => s.plot === index);
    const { colors } = this;
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: colors["--muted"], font, grid: { stroke: colors["--line"], width: 1 }, ticks: { show: false } };
    const isLast = index === PLOTS.length - 1;
    const { width, height } = this.#size(element);
    return new uPlot(
      {
        width,
        height,
        padding: [index === 0 ? 22 : 6, 26, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: "everserve" }, drag: { x: false, y: false }, points: { size: 6 }, y: false },
        scales: {
          x: { time: false, range: () => this.#range() },
          y: index === 0 ? { range: (_u, _min, max) => [0, niceTop(max)] } : { distr: 3, range: (_u, _min, max) => [1, top10(max)] },
        },
        axes: [
          { ...axis, show: true, size: isLast ? 22 : 4, gap: 4, incrs: [5, 10, 15, 30, 60], space: 70, values: (_u, at) => at.map((t) => (isLast ? time(t) : "")) },
          index === 0
            ? { ...axis, size: AXIS_WIDTH, gap: 6, space: 28, values: (_u, at) => at.map(number) }
            : { ...axis, size: AXIS_WIDTH, gap: 6, splits: (_u, _i, min, max) => DECADES.filter((v) => v >= min && v <= max), values: (_u, at) => at.map(decade) },
        ],
        series: [{}, ...series.map((s) => ({
          stroke: colors[s.color],
          width: s.width,
          dash: s.dash,
          spanGaps: false,
          paths: s.points ? () => null : undefined,
          points: { show: Boolean(s.points), size: 4.5, width: 0, stroke: colors[s.color], fill: colors[s.color], filter: s.points ? allOf : undefined },
          fill: index === 0 ? withAlpha(colors[s.color], 0.1) : undefined,
        }))],
        hooks: {
          drawClear: [(u) => this.#drawBands(u)],
          draw: [(u) => this.#drawMarks(u, index)],
          setCursor: [(u) => index === 0 && this.#hover(u.cursor.idx ?? null)],
        },
      },
      [[], ...series.map(() => [])],
      element,
    );
  }

  #range() {
    const time = this.store.column("time");
    const now = time.length ? time[time.length - 1] : Date.now() / 1000;
    return [now - this.window_s, now];
  }

  #marks() {
    const [from] = this.#range();
    const shown = [...this.store.entries.values()].filter((entry) => entry.kind === "fault" || entry.kind === "trouble" || entry.kind === "move");
    return shown.filter((entry) => (entry.ended_unix_s ?? Infinity) > from);
  }

  /** From a fault to the moment when nothing was missing any more. */
  #drawBands(u) {
    const { ctx } = u;
    const [from, now] = this.#range();
    ctx.save();
    clip(u);
    for (const mark of this.#marks()) {
      const left = u.valToPos(Math.max(from, mark.unix_s), "x", true);
      const right = u.valToPos(mark.ended_unix_s ?? now, "x", true);
      ctx.fillStyle = withAlpha(this.colors[mark.kind === "move" ? "--warn" : "--bad"], 0.09);
      ctx.fillRect(left, u.bbox.top, right - left, u.bbox.height);
    }
    ctx.restore();
  }

  #drawMarks(u, index) {
    const { ctx } = u;
    const ratio = devicePixelRatio;
    const [from, now] = this.#range();
    const { top, height, left, width } = u.bbox;
    const marks = this.#marks();
    const shapes = marks.filter((mark) => mark.unix_s >= from).map((mark) => u.valToPos(mark.unix_s, "x", true));
    let taken = -Infinity; // where the last label ends
    ctx.save();
    ctx.font = `500 ${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    for (const mark of marks) {
      const color = this.colors[mark.kind === "move" ? "--warn" : "--bad"];
      if (mark.unix_s >= from) {
        const x = Math.round(u.valToPos(mark.unix_s, "x", true)) + 0.5;
        line(ctx, x, top, top + height, color, 1.5 * ratio);
        if (index === 0) {
          const y = top - 12 * ratio;
          const label = mark.title.replace(/ worker|^the | \(SIG.*| was asked to leave.*|: .*/g, "");
          if (mark.kind === "move") diamond(ctx, x, y, 4 * ratio, color);
          else cross(ctx, x, y, 3.5 * ratio, color, 2 * ratio);
          // Beside its shape, where neither the edge nor another mark is: to the right, to the left, or not at all.
          const long = ctx.measureText(label).width;
          const begin = [x + 8 * ratio, x - 8 * ratio - long].find((at) => {
            const isFree = shapes.every((other) => Math.abs(other - x) < 1 || other + 6 * ratio < at || other - 6 * ratio > at + long);
            return isFree && at > taken && at >= left && at + long <= left + width;
          });
          if (begin !== undefined) {
            ctx.fillStyle = this.colors["--ink"];
            ctx.fillText(label, begin, y);
            taken = begin + long + 6 * ratio;
          }
        }
      }
      if (mark.ended_unix_s && mark.ended_unix_s >= from && mark.ended_unix_s <= now && mark.kind !== "note") {
        const x = Math.round(u.valToPos(mark.ended_unix_s, "x", true)) + 0.5;
        line(ctx, x, top, top + height, this.colors["--ok"], 1 * ratio, [3 * ratio, 3 * ratio]);
        if (index === 0) dot(ctx, x, top + 1 * ratio, 4 * ratio, this.colors["--ok"], this.colors["--panel"]);
      }
    }
    ctx.restore();
  }

  #makeLegend() {
    const legend = document.getElementById("legend");
    for (const series of SERIES) {
      const item = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.className = `swatch ${series.name}`;
      const value = document.createElement("b");
      const label = document.createElement("span");
      label.textContent = series.label;
      explain(label, series.name);
      item.append(swatch, label, " ", value);
      legend.append(item);
      this.values.push(value);
      if (series.name === "waiting") this.waitingItem = item;
    }
  }

  #hover(index) {
    if (this.hovered === index) return;
    this.hovered = index;
    this.#showValues();
  }

  #showValues() {
    const length = this.store.column("time").length;
    const at = this.hovered ?? length - 1;
    SERIES.forEach((series, i) => {
      const column = this.store.column(series.name);
      const value = this.hovered === null && series.name === "rate" ? this.store.mean("rate", 4) : column[at];
      const text = value === null || value === undefined ? "–" : series.format(value);
      if (this.values[i].textContent !== text) this.values[i].textContent = text;
    });
    this.waitingItem.hidden = (this.store.column("waiting")[at] ?? null) === null;
  }

  describe() {
    const [rate, largest] = [this.store.mean("rate", 4), this.store.largest("largest", 40)];
    this.box.setAttribute("aria-label", `Chart. ${number(rate)} tokens per second now; largest gap in the last 10 seconds ${ms(largest)}.`);
  }

  /** The arrow keys look at one tick after the other. */
  #onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Escape: NaN }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const column = this.store.column("time");
    const index = Math.min(column.length - 1, Math.max(0, (this.hovered ?? column.length - 1) + step));
    const left = Number.isNaN(index) ? -10 : this.plots[0].valToPos(column[index], "x");
    this.plots[0].setCursor({ left, top: Number.isNaN(index) ? -10 : 5 });
  }

  #size(element) {
    return { width: Math.max(200, Math.floor(element.clientWidth)), height: Math.max(60, Math.floor(element.clientHeight)) };
  }

  #resize() {
    this.plots.forEach((plot, index) => {
      const size = this.#size(document.getElementById(PLOTS[index]));
      if (size.width !== plot.width || size.height !== plot.height) plot.setSize(size);
    });
  }
}

/** Every point that there is; by default crowded ones are left out. */
const allOf = (u, series) => u.data[series].flatMap((value, index) => (value === null ? [] : [index]));
const withAlpha = (color, alpha) => color.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
/** Where there is no room for a label the value is null. */
const decade = (value) => (value === null ? "" : value >= 1000 ? `${value / 1000} s` : `${value} ms`);
const top10 = (max) => 10 ** Math.ceil(Math.log10(Math.max(100, (max ?? 0) * 1.05)));

function niceTop(max) {
  const wanted = Math.max(10, (max ?? 0) * 1.1);
  const unit = 10 ** Math.floor(Math.log10(wanted));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((m) => m * unit).find((top) => top >= wanted);
}

function clip(u) {
  u.ctx.beginPath();
  u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  u.ctx.clip();
}

function line(ctx, x, from, to, color, width, dash = []) {
  ctx.strokeStyle = color;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.beginPath();
  ctx.moveTo(x, from);
  ctx.lineTo(x, to);
  ctx.stroke();
  ctx.setLineDash([]);
}

function cross(ctx, x, y, r, color, width) {
  ctx.strokeStyle = color;
  ctx.lineWidth = width;
  ctx.lineCap = "round";
  ctx.beginPath();
  ctx.moveTo(x - r, y - r);
  ctx.lineTo(x + r, y + r);
  ctx.moveTo(x + r, y - r);
  ctx.lineTo(x - r, y + r);
  ctx.stroke();
  ctx.lineCap = "butt";
}

function diamond(ctx, x, y, r, color) {
  ctx.fillStyle = color;
  ctx.beginPath();
  ctx.moveTo(x, y - r);
  ctx.lineTo(x + r, y);
  ctx.lineTo(x, y + r);
  ctx.lineTo(x - r, y);
  ctx.fill();
}

function dot(ctx, x, y, r, color, around) {
  ctx.beginPath();
  ctx.arc(x, y, r, 0, 2 * Math.PI);
  ctx.fillStyle = color;
  ctx.fill();
  ctx.strokeStyle = around;
  ctx.lineWidth = 1.5;
  ctx.stroke();
}
