// What happened, newest first: one entry per fault, which grows until what was lost is there again.

import { ago, glyph, make, ms, say, setGlyph, time } from "./words.js";

export class Feed {
  constructor(store) {
    this.store = store;
    this.list = document.getElementById("entries");
    this.announce = document.getElementById("announce");
    this.last = document.getElementById("last");
    this.items = new Map(); // by id
    this.isFirst = true;
  }

  update(news) {
    for (const entry of news.entries ?? []) this.#show(entry);
    for (const [id, item] of this.items) {
      if (this.store.entries.has(id)) continue;
      item.root.remove();
      this.items.delete(id);
    }
    if (news.entries) this.isFirst = false;
    this.showLast();
  }

  #show(entry) {
    if (!this.store.entries.has(entry.id)) return;
    let item = this.items.get(entry.id);
    if (!item) {
      item = { glyph: glyph("note"), time: make("time"), title: make("b"), rest: make("span") };
      item.root = make("li", {}, item.glyph, make("p", {}, item.title, item.rest), item.time);
      this.items.set(entry.id, item);
      this.list.prepend(item.root);
    }
    if (entry.kind !== "note") this.#tell(item, entry);
    item.isOpen = entry.is_open;
    const shape = shapeOf(entry);
    setGlyph(item.glyph, shape);
    item.root.dataset.shape = shape;
    item.root.dataset.kind = entry.kind;
    say(item.title, sentence(entry.title));
    say(item.rest, entry.parts.map((part) => ` · ${part}`).join(""));
    say(item.time, time(entry.unix_s));
  }

  /** A fault is read out twice: when it happens, and when it is over, with what it cost. Not what was before this page. */
  #tell(item, entry) {
    const text = !item.isTold ? entry.title : item.isOpen && !entry.is_open ? [entry.title, ...entry.parts].join(", ") : null;
    item.isTold = true;
    if (text && !this.isFirst) this.announce.textContent = text;
  }

  /** The latest fault and what it cost, for the status line. */
  showLast() {
    const faults = [...this.store.entries.values()].filter((entry) => entry.kind !== "note");
    const entry = faults[faults.length - 1];
    if (!entry || !this.store.latest) {
      say(this.last, this.store.latest ? "Nothing was lost since this server started." : "\u00a0");
      return;
    }
    const cost = entry.kind === "trouble" ? entry.parts[entry.parts.length - 1] ?? "" : entry.pause_ms === null ? "" : `longest pause ${ms(entry.pause_ms)}, 0 tokens lost`;
    const when = ago(this.store.latest.unix_s - entry.unix_s);
    say(this.last, [`Last: ${entry.title}, ${when}`, cost].filter(Boolean).join(" · "));
  }
}

function shapeOf(entry) {
  if (entry.kind === "trouble") return "trouble";
  if (entry.kind === "fault") return entry.is_open ? "gone" : "healed";
  if (entry.kind === "move") return entry.is_open ? "leaving" : "healed";
  return "note";
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
