// What the page knows, in bounded arrays. Only this file writes it; views are told when it has changed.

const MAX_ENTRIES = 60;
const COLUMNS = ["time", "rate", "p50", "p99", "largest", "waiting"];
const LONG_WAIT_MS = 300; // longer than a tick: no token came in all of it

export class Store {
  constructor() {
    this.hello = null;
    this.cluster = null;
    this.entries = new Map(); // by id, oldest first
    this.columns = COLUMNS.map(() => []);
    this.lastTick = -1;
    this.latest = null;
    this.maxTicks = 1200;
    this.listeners = [];
  }

  subscribe(listener) {
    this.listeners.push(listener);
  }

  column(name) {
    return this.columns[COLUMNS.indexOf(name)];
  }

  apply(news) {
    if (news.hello) this.#greet(news.hello);
    for (const tick of news.ticks) this.#addTick(tick);
    for (const entry of news.entries ?? []) this.entries.set(entry.id, entry);
    for (const id of this.entries.keys()) {
      if (this.entries.size <= MAX_ENTRIES) break;
      this.entries.delete(id);
    }
    if (news.cluster) this.cluster = news.cluster;
    for (const listener of this.listeners) listener(news);
  }

  /** Over the last ticks: the mean, or the largest. */
  mean(name, ticks) {
    const values = this.column(name).slice(-ticks);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0;
  }

  largest(name, ticks) {
    const values = this.column(name).slice(-ticks).filter((value) => value !== null);
    return values.length ? Math.max(...values) : null;
  }

  #greet(hello) {
    if (this.hello && this.hello.gateway !== hello.gateway) {
      this.entries.clear();
      for (const column of this.columns) column.length = 0;
      this.lastTick = -1;
    }
    this.hello = hello;
    this.maxTicks = hello.num_ticks;
  }

  #addTick(tick) {
    if (tick.n <= this.lastTick) return;
    this.lastTick = tick.n;
    this.latest = tick;
    const waiting = (tick.waiting_ms ?? 0) > LONG_WAIT_MS ? tick.waiting_ms : null;
    const row = [tick.unix_s, tick.tokens_per_s ?? 0, tick.p50_ms, tick.p99_ms, tick.max_ms, waiting];
    row.forEach((value, i) => {
      const column = this.columns[i];
      column.push(value ?? null);
      if (column.length > this.maxTicks) column.splice(0, column.length - this.maxTicks);
    });
  }
}
