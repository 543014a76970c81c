// The one connection of this page: everything that changes, four times a second.
//
// A hidden tab has none. When it is seen again it asks for what it missed, which the server keeps for five minutes.
// Nothing but a hidden tab and a missing key ends it for good: every error is followed by another attempt.

import { ask, dataOf } from "./api.js";

const SILENCE_MS = 5000; // news come every 250 ms
const QUIET_MS = 2500; // from then on what is shown is not called live
const RETRY_MS = [250, 500, 1000, 2000, 4000];

export class Live {
  constructor(store, { onState, onKeyWanted }) {
    this.store = store;
    this.onState = onState;
    this.onKeyWanted = onKeyWanted;
    this.abort = null;
    this.failures = 0;
    this.retry = 0;
    this.heard = -Infinity; // when the last news came, by performance.now()
    this.began = 0; // when this page began to listen
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
    window.addEventListener("pagehide", () => this.stop());
    window.addEventListener("pageshow", () => document.hidden || this.start());
  }

  start() {
    if (this.abort) return;
    this.began = performance.now();
    this.run();
  }

  /** Whether what is shown may be of the past: the connection is lost, or nothing has come for a while. */
  isStale(isLost) {
    return isLost || performance.now() - Math.max(this.heard, this.began) > QUIET_MS;
  }

  stop() {
    clearTimeout(this.retry);
    this.abort?.abort();
    this.abort = null;
  }

  async run() {
    const abort = (this.abort = new AbortController());
    let watchdog = 0;
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    try {
      alive();
      const since = this.store.lastTick;
      const response = await ask(`cluster/live${since >= 0 ? `?since=${since}` : ""}`, { signal: abort.signal });
      for await (const data of dataOf(response)) {
        alive();
        this.heard = performance.now();
        this.onState("connected");
        this.#show(data);
        this.failures = 0;
      }
    } catch (error) {
      if (error.status === 401) {
        clearTimeout(watchdog);
        this.abort = null;
        this.onKeyWanted(error.message);
        return;
      }
      // Whatever else it was: another attempt follows.
    } finally {
      clearTimeout(watchdog);
    }
    if (this.abort !== abort) return; // stopped on purpose
    this.onState("lost");
    this.retry = setTimeout(() => this.run(), RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)]);
  }

  /** An error here is ours, not the connection's: it is reported before the connection begins anew. */
  #show(data) {
    try {
      this.store.apply(JSON.parse(data));
    } catch (error) {
      console.error(error);
      throw error;
    }
  }
}
