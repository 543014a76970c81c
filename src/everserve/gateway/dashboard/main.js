// The page: one store, one connection, five views of it.

import { setKey } from "./api.js";
import { Chart } from "./chart.js";
import { ExpertMap } from "./experts.js";
import { Feed } from "./feed.js";
import { KillDialog } from "./kill.js";
import { Live } from "./live.js";
import { ClusterMap } from "./map.js";
import { Prompt } from "./prompt.js";
import { Store } from "./state.js";
import { ago, explainAll, ms, number, say, setGlyph } from "./words.js";

const GAP_TICKS = 40; // ten seconds
const $ = (id) => document.getElementById(id);

export const store = new Store();
export const chart = new Chart(store);
const kill = new KillDialog();
const map = new ClusterMap(store, (...about) => kill.open(...about));
const experts = new ExpertMap(store);
const feed = new Feed(store);
const prompt = new Prompt(store);
let connection = "connecting";

store.subscribe((news) => {
  chart.update();
  map.update();
  experts.update();
  feed.update(news);
  prompt.update(news);
  showFigures();
  showVerdict();
});

function showFigures() {
  say($("fig-rate"), number(store.mean("rate", 4)));
  const waiting = store.latest?.waiting_ms ?? 0;
  say($("fig-gap"), ms(Math.max(store.largest("largest", GAP_TICKS) ?? 0, waiting) || null));
  say($("fig-streams"), number(store.latest?.num_streams ?? 0));
  say($("fig-epoch"), store.cluster ? String(store.cluster.epoch) : "–");
}

/** Is the cluster whole? One word, one shape, one reason. */
function judge() {
  const { cluster } = store;
  if (cluster && live.isStale(connection === "lost")) return ["gone", "No answer", "from the server; trying again."];
  if (connection === "lost") return ["gone", "No answer", "from the server; trying again. Nothing is known of it yet."];
  if (!cluster) return ["unknown", "Connecting", ""];
  const { workers, violations, degraded } = cluster;
  if (violations.length) return ["trouble", "Not valid", violations.join("; ")];
  const away = workers.filter((worker) => worker.state !== "ready");
  if (away.length) return ["starting", "Recovering", `${away.map((w) => `${w.roles.length > 1 ? "worker" : w.roles[0]} ${w.rank} is ${w.state}`).join(", ")}; streams go on`];
  if (degraded.length) return ["starting", "Degraded", degraded.join("; ")];
  return ["ready", "Whole", `${workers.length === 1 ? "the worker is" : `all ${workers.length} workers`} ready, tables valid`];
}

function showVerdict() {
  const [state, word, why] = judge();
  const verdict = $("verdict");
  if (verdict.dataset.state !== state) verdict.dataset.state = state;
  setGlyph(verdict.querySelector("svg"), state);
  say($("verdict-word"), word);
  say($("verdict-why"), why);
  showSeen();
  if (store.cluster) {
    const { epoch, violations, experts_without_place: lost } = store.cluster;
    say($("validity"), `epoch ${epoch}, ${violations.length ? `${violations.length} violation${violations.length > 1 ? "s" : ""}` : "valid"}${lost ? `, ${lost} expert${lost > 1 ? "s" : ""} without a place` : ""}`);
  }
  const title = `${word} · Everserve${store.hello ? ` · ${store.hello.models[0]}` : ""}`;
  if (document.title !== title) document.title = title;
}

/** What is no longer live looks so, and says from when it is. */
function showSeen() {
  const isStale = store.cluster !== null && live.isStale(connection === "lost");
  document.body.classList.toggle("stale", isStale);
  say($("verdict-seen"), isStale ? `Last seen ${ago((performance.now() - live.heard) / 1000)}; what is shown is from then.` : "");
}

// -- the connection ------------------------------------------------------------------------------

const live = new Live(store, {
  onState(state) {
    if (state === connection) return;
    connection = state;
    showVerdict();
  },
  onKeyWanted(message) {
    $("key-error").textContent = sessionStorage.length ? message : "";
    $("key").showModal();
  },
});

$("key").addEventListener("cancel", (event) => event.preventDefault()); // nothing works without one
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key-input").value.trim());
  $("key").close();
  live.start();
});

// -- theme and time ------------------------------------------------------------------------------

const THEMES = ["", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (theme) localStorage.setItem("everserve-theme", theme);
  else localStorage.removeItem("everserve-theme");
  $("theme").textContent = { "": "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[theme];
  chart.rebuild();
  experts.draw();
}

$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.rebuild());
setTheme(document.documentElement.dataset.theme ?? "");

for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[data-window]")) other.setAttribute("aria-pressed", String(other === button));
    chart.show(Number(button.dataset.window));
  });
}

explainAll();
setInterval(() => document.hidden || !store.cluster || showVerdict(), 500);
document.fonts.ready.then(() => chart.rebuild());
setInterval(() => document.hidden || chart.describe(), 5000);
if (!document.hidden) live.start();
